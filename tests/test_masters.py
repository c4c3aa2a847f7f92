"""Master weights: edits and loaded weights count, and nothing is lost on the way through a state
dict, a copy or a pickle."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from mixed import BF16, CODED, FP16, FP32, HYPER, STATES, make_mixed
from ranks import Rank, RankPool
from training import MODES, assert_same_bits, gradient

import fusedshard

FORMATS = {"remainder": (BF16, None), "bf16 copy": (BF16, True), "fp16 copy": (FP16, True)}
each_format = pytest.mark.parametrize("name", FORMATS)
each_mode = pytest.mark.parametrize("mode", MODES)
NUMEL = 17 * 257


class Model:
    """A parameter that has trained for three steps, so that its master is none of its numbers."""

    def __init__(self, name: str, rank: Rank | None = None, mode: str = "sharded") -> None:
        dtype, self.master_weights = FORMATS[name]
        self.number = 0 if rank is None else rank.rank
        self.options = {
            "process_group": None if rank is None else rank.group,
            "mode": mode,
            "master_weights": self.master_weights,
            **HYPER,
        }
        self.param = torch.nn.Parameter(torch.linspace(-2, 2, NUMEL).to(dtype))
        self.optimizer = fusedshard.AdamW([self.param], **self.options)
        for step in range(3):
            self.step(step)

    def step(self, step: int) -> None:
        self.param.grad = gradient(self.param, step, 0, self.number)
        self.optimizer.step()

    @property
    def master(self) -> torch.Tensor:
        masters: dict[int, torch.Tensor] = self.optimizer.full_state_dict()["master_weights"]
        return masters[0]

    def whole(self) -> Any:
        return self.param.detach().clone(), self.optimizer.full_state_dict()


def job(rank: Rank, work: Any, name: str, mode: str) -> Any:
    return work(Model(name, rank, mode))


def run(ranks: RankPool, world_size: int, work: Any, name: str, mode: str) -> Any:
    """What the first rank returns, once all are known to return the same."""
    if world_size == 1:
        return work(Model(name, mode=mode))
    results = ranks.run(world_size, job, work, name, mode)
    for result in results[1:]:
        assert_same_bits(result, results[0])
    return results[0]


each_world_size = pytest.mark.parametrize("world_size", [1, 3])


@each_world_size
@each_mode
@each_format
def test_edited_elements_are_their_own_masters(
    ranks: RankPool, name: str, mode: str, world_size: int
) -> None:
    before, after, param = run(ranks, world_size, _edit, name, mode)
    assert not torch.equal(before, before.to(param.dtype).to(FP32))
    assert (after[100:2000] == 1.5).all()
    rest = torch.ones(NUMEL, dtype=torch.bool).index_fill_(0, torch.arange(100, 2000), False)
    # Beside a remainder, the rest of an edited parameter loses its own.
    kept = before if name != "remainder" else before.to(param.dtype).to(FP32)
    assert_same_bits(after[rest], kept[rest])


def _edit(model: Model) -> Any:
    before = model.master
    with torch.no_grad():
        model.param[100:2000] = 1.5
    return before, model.master, model.param.detach().clone()


@each_mode
@each_format
def test_a_step_after_an_edit_starts_at_the_edited_weights(
    ranks: RankPool, name: str, mode: str
) -> None:
    """As one does whose parameter had these bits all along, and no master but them."""
    edited, fresh = run(ranks, 3, _step_after_an_edit, name, mode)
    assert_same_bits(edited, fresh)


def _step_after_an_edit(model: Model) -> Any:
    state = model.optimizer.full_state_dict()
    with torch.no_grad():  # to values that no element had: its master counts where one had
        model.param.copy_(torch.linspace(10, 20, NUMEL))
    param = torch.nn.Parameter(model.param.detach().clone())
    optimizer = fusedshard.AdamW([param], **model.options)
    del state["master_weights"]
    optimizer.load_state_dict(state)
    grad = gradient(param, 7, 0, model.number)
    outcomes = []
    for p, o in ((model.param, model.optimizer), (param, optimizer)):
        p.grad = grad.clone()
        o.step()
        outcomes.append((p.detach().clone(), o.full_state_dict()))
    return outcomes


@pytest.mark.parametrize("order", ["parameters first", "optimizer first"])
@each_mode
@each_format
def test_training_resumes_to_the_bit(ranks: RankPool, name: str, mode: str, order: str) -> None:
    work = _resume_parameters_first if order == "parameters first" else _resume_optimizer_first
    went_on, resumed = run(ranks, 3, work, name, mode)
    assert_same_bits(resumed, went_on)


def _resume_parameters_first(model: Model) -> Any:
    return _resume(model, parameters_first=True)


def _resume_optimizer_first(model: Model) -> Any:
    return _resume(model, parameters_first=False)


def _resume(model: Model, *, parameters_first: bool) -> Any:
    state, weights = model.optimizer.full_state_dict(), model.param.detach().clone()
    twin = copy.copy(model)
    twin.param = torch.nn.Parameter(torch.zeros_like(model.param))
    twin.optimizer = fusedshard.AdamW([twin.param], **model.options)
    if parameters_first:
        with torch.no_grad():
            twin.param.copy_(weights)
    twin.optimizer.load_state_dict(state)
    if not parameters_first:
        with torch.no_grad():
            twin.param.copy_(weights)
    model.step(5)
    twin.step(5)
    return model.whole(), twin.whole()


@each_format
def test_loading_twice_and_saving_between_loses_nothing(name: str) -> None:
    """The state is saved again before the parameters are loaded."""
    model = Model(name)
    state, weights = model.optimizer.full_state_dict(), model.param.detach().clone()
    param = torch.nn.Parameter(torch.zeros_like(model.param))
    optimizer = fusedshard.AdamW([param], **model.options)
    optimizer.load_state_dict(state)
    optimizer.load_state_dict(state)
    assert (optimizer.full_state_dict()["master_weights"][0] == 0).all()
    with torch.no_grad():
        param.copy_(weights)
    assert_same_bits(optimizer.full_state_dict(), state)


@pytest.mark.parametrize("state_dtype", STATES, ids=["fp32", "bf16", "codes"])
@each_mode
def test_copies_go_on_to_the_bit(ranks: RankPool, mode: str, state_dtype: torch.dtype) -> None:
    for original, *copies in ranks.run(2, _copies, mode, state_dtype):
        for other in copies:
            assert_same_bits(other, original)


def _copies(rank: Rank, mode: str, state_dtype: torch.dtype) -> Any:
    params = make_mixed()
    optimizer = fusedshard.AdamW(
        params, process_group=rank.group, mode=mode, state_dtype=state_dtype, **HYPER
    )
    _train(params, optimizer, range(3), rank.rank)
    with torch.no_grad():
        params[0][0] = 0.25  # a stale remainder must not come along
    pairs = [(params, optimizer), copy.deepcopy((params, optimizer))]
    for some, its in pairs:
        _train(some, its, range(3, 5), rank.rank)
    return [([p.detach().clone() for p in some], its.full_state_dict()) for some, its in pairs]


def _train(params: list[torch.nn.Parameter], optimizer: Any, steps: range, number: int) -> None:
    for step in steps:
        for index, param in enumerate(params):
            param.grad = gradient(param, step, index, number)
        optimizer.step()


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("state_dtype", STATES, ids=["fp32", "bf16", "codes"])
def test_a_pickle_goes_on_to_the_bit(state_dtype: torch.dtype, amsgrad: bool) -> None:
    params = make_mixed()
    optimizer = fusedshard.AdamW(params, state_dtype=state_dtype, amsgrad=amsgrad, **HYPER)
    _train(params, optimizer, range(3), 0)
    optimizer.state[params[0]]["mine"] = "kept"
    twins, twin = pickle.loads(pickle.dumps((params, optimizer)))
    assert twin.state[twins[0]]["mine"] == "kept"
    assert twin.state[twins[5]]["exp_avg"].dtype == optimizer.state[params[5]]["exp_avg"].dtype
    for some, its in ((params, optimizer), (twins, twin)):
        _train(some, its, range(3, 5), 0)
    for param, other in zip(params, twins, strict=True):
        assert_same_bits(other.detach(), param.detach())
    assert_same_bits(twin.full_state_dict(), optimizer.full_state_dict())


def test_torch_loads_the_state_dict_and_back() -> None:
    """Torch knows no masters, and casts moments to the parameters' dtype."""
    model = Model("remainder")
    twin = torch.nn.Parameter(model.param.detach().clone())
    theirs = torch.optim.AdamW([twin])
    saved = io.BytesIO()
    torch.save(model.optimizer.state_dict(), saved)
    saved.seek(0)
    theirs.load_state_dict(torch.load(saved))
    assert theirs.state[twin]["exp_avg"].dtype == BF16
    model.optimizer.load_state_dict(theirs.state_dict())
    state = model.optimizer.state_dict()
    assert_same_bits(state["state"][0]["exp_avg"], theirs.state[twin]["exp_avg"].to(FP32))
    assert_same_bits(state["master_weights"][0], twin.detach().to(FP32))


WRONG_MASTERS = {
    "shape": (
        torch.ones(3),
        r"master_weights has shape \(3,\) in the state dict, wanted \(4369,\)",
    ),
    "kind": ([1.0], "master_weights is a list in the state dict, wanted a tensor"),
    "complex": (
        torch.ones(NUMEL, dtype=torch.complex64),
        "master_weights is torch.complex64 in",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_MASTERS)
def test_masters_that_do_not_fit_are_refused(wrong: str) -> None:
    master, message = WRONG_MASTERS[wrong]
    model = Model("remainder")
    before = model.whole()
    state = model.optimizer.full_state_dict()
    state["master_weights"][0] = master
    with pytest.raises(ValueError, match=f"parameter 0: {message}"):
        model.optimizer.load_state_dict(state)
    assert_same_bits(model.whole(), before)


def test_ranks_with_and_without_masters_are_refused(ranks: RankPool) -> None:
    for message in ranks.run(2, _masters_on_one_rank):
        assert "the ranks bring different ones" in message


def _masters_on_one_rank(rank: Rank) -> str:
    model = Model("remainder", rank)
    state = model.optimizer.full_state_dict()
    if rank.rank == 1:
        del state["master_weights"]
    with pytest.raises(ValueError) as error:
        model.optimizer.load_state_dict(state)
    return str(error.value)


NUMELS = {"fp32": 4, "bf16": 2, "codes": 1 + 1 / 128}


@pytest.mark.parametrize(("state", "dtype"), list(zip(NUMELS, STATES, strict=True)))
@each_mode
def test_bytes_of_a_rank(ranks: RankPool, mode: str, state: str, dtype: torch.dtype) -> None:
    """8, 4 or 2 bytes a parameter, and 2 or 4 for its master; all of it over N when sharded."""
    numel = 2 * 128 * 1024
    for found in ranks.run(2, _bytes, mode, dtype, numel):
        share = numel // (2 if mode == "sharded" else 1)
        for memory, master in zip(found, (2, 4, 4, 0), strict=True):
            assert memory["moments"] == 2 * NUMELS[state] * share
            assert memory["masters"] == master * share


def _bytes(rank: Rank, mode: str, state_dtype: torch.dtype, numel: int) -> list[dict[str, int]]:
    found = []
    for dtype, master in ((BF16, None), (BF16, True), (FP16, None), (BF16, False)):
        param = torch.nn.Parameter(torch.ones(numel, dtype=dtype))
        optimizer = fusedshard.AdamW(
            [param],
            mode=mode,
            process_group=rank.group,
            state_dtype=state_dtype,
            master_weights=master,
        )
        found.append(optimizer.memory())
    return found


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "master_weights": ({"master_weights": "yes"}, "got 'yes', wanted None, True or False"),
    "state_dtype": (
        {"state_dtype": FP16},
        "got torch.float16, wanted one of torch.float32, torch.bfloat16, torch.uint8",
    ),
    "stochastic_rounding": ({"stochastic_rounding": None}, "got None, wanted True or False"),
    "seed": ({"seed": 1 << 63}, "got 9223372036854775808, wanted an integer of 64 bits"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_are_checked_on_every_rank(ranks: RankPool, name: str) -> None:
    options, message = WRONG[name]
    for text in ranks.run(2, _refused, options):
        assert f"{name}: {message}" in text
    for text in ranks.run(2, _unlike, {name: {"seed": 5, "state_dtype": CODED}.get(name, False)}):
        assert "the ranks build different optimizers" in text and f"{name}=" in text


def _refused(rank: Rank, options: dict[str, Any]) -> str:
    return _failure(rank, options if rank.rank == 1 else {})


def _unlike(rank: Rank, options: dict[str, Any]) -> str:
    return _failure(rank, options if rank.rank == 0 else {})


def _failure(rank: Rank, options: dict[str, Any]) -> str:
    param = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError) as error:
        fusedshard.AdamW([param], process_group=rank.group, **options)
    return str(error.value)
