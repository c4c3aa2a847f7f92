"""Master weights: edits and loaded weights count, and nothing is lost on the way through a state
dict, a copy or a pickle."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mixed import BF16, FP16, FP32, HYPER, STATES, make_mixed
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

    def load(self, weights: torch.Tensor) -> None:
        with torch.no_grad():
            self.param.copy_(weights)

    def skip_a_step(self) -> None:
        """By a gradient that is not finite."""
        scaler = fusedshard.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        self.param.grad = torch.full_like(self.param, float("inf"))
        scaler.step(self.optimizer)

    @property
    def master(self) -> torch.Tensor:
        master: torch.Tensor = self.optimizer.full_state_dict()["state"][0]["master_weights"]
        return master

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
    # Beside a remainder, the rest of an edited block of 128 loses its own.
    blocks = [range(100), range(2000, 2048)]
    for index in [index for block in blocks for index in block]:
        kept = before[index] if name != "remainder" else before[index].to(param.dtype).to(FP32)
        assert after[index] == kept
    assert_same_bits(after[2048:], before[2048:])


def _edit(model: Model) -> Any:
    """In a way that autograd does not count."""
    before = model.master
    model.param.data[100:2000] = 1.5
    return before, model.master, model.param.detach().clone()


@each_mode
@each_format
def test_pruned_weights_stay_near_zero(ranks: RankPool, name: str, mode: str) -> None:
    """The rest of a small number beside zero would be another zero's, or NaN's."""
    param, master = run(ranks, 2, _prune, name, mode)
    assert param.isfinite().all() and master.isfinite().all()
    assert (master[::2].abs() < 0.2).all() and (master[1::2].abs() > 0.2).any()


def _prune(model: Model) -> Any:
    for step in range(3, 6):
        model.step(step)
        model.param.data[::2] *= 0.0
    model.step(6)
    return model.param.detach().clone(), model.master


@each_format
def test_what_changes_no_bit_loses_nothing(name: str) -> None:
    """Neither do weights that are exchanged for others for a while."""
    model = Model(name)
    before = model.master
    weights = model.param.detach().clone()
    with torch.no_grad():
        model.param.nan_to_num_().clamp_(-1e4, 1e4)
        model.param.zero_()
        model.param.copy_(weights)
    assert_same_bits(model.master, before)
    twin = Model(name)
    for one in (model, twin):
        one.step(9)
    assert_same_bits(model.whole(), twin.whole())


@each_mode
@each_format
def test_weights_that_arrive_by_a_broadcast(ranks: RankPool, name: str, mode: str) -> None:
    """Loaded on one rank in a way that autograd counts, and sent to the others in one that it does
    not."""
    run(ranks, 3, _broadcast, name, mode)


def _broadcast(model: Model) -> Any:
    if model.number == 0:
        with torch.no_grad():
            model.param.mul_(0.75)
    dist.broadcast(model.param.detach(), 0, group=model.options["process_group"])
    model.step(4)
    model.step(5)
    return model.whole()


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
    del state["state"][0]["master_weights"]
    optimizer.load_state_dict(state)
    grad = gradient(param, 7, 0, model.number)
    outcomes = []
    for p, o in ((model.param, model.optimizer), (param, optimizer)):
        p.grad = grad.clone()
        o.step()
        outcomes.append((p.detach().clone(), o.full_state_dict()))
    return outcomes


@pytest.mark.parametrize("order", ["parameters first", "optimizer first", "a skipped step between"])
@each_mode
@each_format
def test_training_resumes_to_the_bit(ranks: RankPool, name: str, mode: str, order: str) -> None:
    went_on, resumed = run(ranks, 3, partial(_resume, order=order), name, mode)
    assert_same_bits(resumed, went_on)


def _resume(model: Model, *, order: str) -> Any:
    state, weights = model.optimizer.full_state_dict(), model.param.detach().clone()
    twin = copy.copy(model)
    twin.param = torch.nn.Parameter(torch.zeros_like(model.param))
    twin.optimizer = fusedshard.AdamW([twin.param], **model.options)
    if order == "parameters first":
        twin.load(weights)
    twin.optimizer.load_state_dict(state)
    if order == "a skipped step between":
        twin.skip_a_step()
    if order != "parameters first":
        twin.load(weights)
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
    assert (optimizer.full_state_dict()["state"][0]["master_weights"] == 0).all()
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
    assert_same_bits(state["state"][0]["master_weights"], twin.detach().to(FP32))


def test_setstate_of_what_load_state_dict_has_put_together() -> None:
    """As libraries call it that put their own in the place of load_state_dict."""
    model, twin = Model("remainder"), Model("remainder")
    state = {twin.param: dict(model.optimizer.state[model.param])}
    twin.step(3)
    twin.optimizer.__setstate__({"state": state, "param_groups": twin.optimizer.param_groups})
    loaded, wanted = (m.optimizer.full_state_dict()["state"][0] for m in (twin, model))
    assert_same_bits(loaded.pop("master_weights"), twin.param.detach().to(FP32))
    del wanted["master_weights"]
    assert_same_bits(loaded, wanted)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_masters_that_an_optimizer_has_no_use_for(dtype: torch.dtype) -> None:
    state = Model("remainder").optimizer.full_state_dict()
    param = torch.nn.Parameter(torch.zeros(NUMEL, dtype=dtype))
    optimizer = fusedshard.AdamW([param], master_weights=False)
    with pytest.warns(UserWarning, match="1 parameters .first: parameter 0. that this optimizer"):
        optimizer.load_state_dict(state)
    assert "master_weights" not in optimizer.full_state_dict()["state"][0]


WRONG_MASTERS = {
    "shape": (
        torch.ones(3),
        r"master_weights has shape \(3,\) in the state dict, wanted \(4369,\)",
    ),
    "integers": (
        torch.ones(NUMEL, dtype=torch.int16),
        "master_weights is torch.int16 in the state dict, wanted floats",
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
    state["state"][0]["master_weights"] = master
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
        del state["state"][0]["master_weights"]
    with pytest.raises(ValueError) as error:
        model.optimizer.load_state_dict(state)
    return str(error.value)
