"""copy.deepcopy and pickle of a model with its optimizer, beside torch's."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Rank, RankPool
from training import AWKWARD, assert_close, assert_same_bits, gradient, mean_gradient, train

import fusedshard

MODES = ("sharded", "replicated")
each_mode = pytest.mark.parametrize("mode", MODES)
WORLDS = [(1, "sharded"), *((n, mode) for n in (2, 3) for mode in MODES)]
each_world = pytest.mark.parametrize(("world_size", "mode"), WORLDS)
HYPER: dict[str, Any] = {"lr": 0.1, "eps": 1.0, "weight_decay": 0.1}


class Model(torch.nn.Module):
    """Parameters of many shapes, strides and dtypes, one of them in two places."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        values = [torch.randn(shape, generator=generator) for shape in AWKWARD]
        values += [torch.randn(6, 50, generator=generator).t()]
        values += [
            torch.randn(5, generator=generator, dtype=d) for d in (torch.float64, torch.complex64)
        ]
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(v) for v in values)
        self.tied = self.weights[2]

    def params(self) -> list[torch.nn.Parameter]:
        assert self.tied is self.weights[2]
        return list(self.parameters())


Grad = Callable[[torch.Tensor, int, int], torch.Tensor]
Copier = Callable[[Any], Any]


def by_pickle(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


def by_torch_save(pair: Any) -> Any:
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def copied_job(new: Callable[[Any], Any], duplicate: Copier, grad: Grad) -> list[tuple[Any, Any]]:
    """Two steps, then both the original and its copy take two more, on different gradients and with
    one parameter more, that was frozen."""

    def trained(param: torch.Tensor, step: int, index: int) -> torch.Tensor | None:
        return grad(param, step, index) if param.requires_grad else None

    model = Model()
    model.params()[1].requires_grad_(False)
    optimizer = new(model.params())
    train(optimizer, model.params(), range(2), trained)
    twins = duplicate((model, optimizer))
    for its_model in (model, twins[0]):
        its_model.params()[1].requires_grad_(True)
    for step in range(2, 4):  # taking turns, so that shared memory would show
        for offset, (its_model, its_optimizer) in ((0, (model, optimizer)), (10, twins)):
            train(
                its_optimizer, its_model.params(), range(step + offset, step + offset + 1), trained
            )
    return [(model, optimizer), twins]


def results_of(pairs: list[tuple[Any, Any]]) -> list[Any]:
    def state_of(optimizer: Any) -> Any:
        ours = isinstance(optimizer, fusedshard.Adam)
        return optimizer.full_state_dict() if ours else optimizer.state_dict()

    return [([p.detach().clone() for p in model.params()], state_of(opt)) for model, opt in pairs]


def check_pairs(ours: list[Any], theirs: list[Any]) -> None:
    for mine, reference in zip(ours, theirs, strict=True):
        assert_close(mine, reference)
    assert not torch.equal(ours[0][0][2], ours[1][0][2])


@each_world
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_lif_07_deepcopy_of_model_and_optimizer(
    ranks: RankPool, world_size: int, mode: str, kind: str, amsgrad: bool
) -> None:
    options = {**HYPER, "amsgrad": amsgrad}
    want = results_of(
        copied_job(
            lambda p: getattr(torch.optim, kind)(p, **options),
            copy.deepcopy,
            lambda p, t, i: mean_gradient(p, t, i, world_size),
        )
    )
    results = ranks.run(world_size, _deepcopy, kind, {**options, "mode": mode})
    for ours in results:
        check_pairs(ours, want)
        assert_same_bits(ours, results[0])


def _deepcopy(rank: Rank, kind: str, options: dict[str, Any]) -> Any:
    pairs = copied_job(
        lambda p: getattr(fusedshard, kind)(p, process_group=rank.group, **options),
        copy.deepcopy,
        lambda p, t, i: gradient(p, t, i, rank.rank),
    )
    (model, optimizer), (other_model, other) = pairs
    assert type(other) is type(optimizer) and other is not optimizer
    places = [{p.data_ptr() for p in m.params() if p.numel()} for m in (model, other_model)]
    assert not places[0] & places[1]
    assert [p.stride() for p in model.params()] == [p.stride() for p in other_model.params()]
    assert other.layout == optimizer.layout and other.memory() == optimizer.memory()
    return results_of(pairs)


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch_save])
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_lif_07_copies_and_pickles_in_one_process(kind: str, duplicate: Copier) -> None:
    def grad(param: torch.Tensor, step: int, index: int) -> torch.Tensor:
        return gradient(param, step, index, 0)

    options = {**HYPER, "amsgrad": True}
    ours, theirs = (
        copied_job(lambda p, m=module: getattr(m, kind)(p, **options), duplicate, grad)  # type: ignore[misc]
        for module in (fusedshard, torch.optim)
    )
    check_pairs(results_of(ours), results_of(theirs))


@each_mode
def test_lif_07_pickling_a_shard_is_refused_with_the_remedy(ranks: RankPool, mode: str) -> None:
    for text, before, after in ranks.run(2, _pickled_shard, mode):
        assert "AdamW" in text and "full_state_dict()" in text
        assert_same_bits(before, after)


def _pickled_shard(rank: Rank, mode: str) -> Any:
    model = Model()
    optimizer = fusedshard.AdamW(model.params(), process_group=rank.group, mode=mode)
    train(optimizer, model.params(), range(1), lambda p, t, i: gradient(p, t, i, rank.rank))
    before = optimizer.full_state_dict()
    with pytest.raises(TypeError) as caught:
        pickle.dumps(optimizer)
    return str(caught.value), before, optimizer.full_state_dict()


def test_unpickling_on_one_of_several_ranks_is_refused(ranks: RankPool) -> None:
    """Where a rank on its own would become one of the default group's."""
    (param,) = params = [torch.nn.Parameter(torch.ones(3))]
    optimizer = fusedshard.AdamW(params)
    param.grad = torch.ones(3)
    optimizer.step()
    for text in ranks.run(2, _unpickle, pickle.dumps(optimizer)):
        assert "state_dict()" in text


def _unpickle(rank: Rank, pickled: bytes) -> str:
    with pytest.raises(RuntimeError) as caught:
        pickle.loads(pickled)
    return str(caught.value)


def test_a_shallow_copy_is_refused() -> None:
    (param,) = params = [torch.nn.Parameter(torch.ones(3))]
    optimizer = fusedshard.AdamW(params)
    with pytest.raises(TypeError, match=r"use copy\.deepcopy"):
        copy.copy(optimizer)
    param.grad = torch.ones(3)
    optimizer.step()


def test_an_optimizer_alone_has_copies_of_its_parameters() -> None:
    """As torch's: in its groups alone, apart from the model."""
    model = Model()
    optimizer = fusedshard.AdamW(model.params(), **HYPER)
    other = copy.deepcopy(optimizer)
    params = other.param_groups[0]["params"]
    before = [p.detach().clone() for p in model.params()]
    train(other, params, range(1), lambda p, t, i: gradient(p, t, i, 0))
    assert_same_bits(before, [p.detach() for p in model.params()])
    assert_same_bits(before[3], params[3].detach())  # the empty one
    assert not torch.equal(before[2], params[2])
    assert len(other.state) == len(params) and not optimizer.state


@each_world
def test_copies_go_on_as_the_original(ranks: RankPool, world_size: int, mode: str) -> None:
    """To the bit, through groups, thawing, late groups and state dicts: the same job with and
    without copies on the way, which send nothing."""
    results = ranks.run(world_size, _changing, mode)
    for plain, copied, sent in results:
        assert_same_bits(plain, copied)
        assert_same_bits(plain, results[0][0])
        assert not any(sent)


def _changing(rank: Rank, mode: str) -> Any:
    sent: list[int] = []

    def duplicate(pair: Any) -> Any:
        before = sum(pair[1].stats.calls.values())
        twins = copy.deepcopy(pair)
        sent.append(sum(pair[1].stats.calls.values()) - before + len(twins[1].stats.calls))
        return twins

    options = {"mode": mode, "process_group": rank.group, "bucket_cap_mb": 1e-3}
    plain = changing_job(rank.rank, lambda pair: pair, options)
    return plain, changing_job(rank.rank, duplicate, options), sent


def changing_job(rank: int, duplicate: Copier, options: dict[str, Any]) -> Any:
    model = Model()
    frozen = model.params()[:2]
    for param in frozen:
        param.requires_grad_(False)
    groups: list[dict[str, Any]] = [
        {"params": model.params()[:4], "name": "first"},
        {"params": model.params()[4:], "lr": torch.tensor(0.3), "weight_decay": 0.0},
    ]
    optimizer: Any = fusedshard.Adam(
        groups, lr=0.1, eps=1.0, decoupled_weight_decay=True, **options
    )
    for step in range(6):
        model, optimizer = duplicate((model, optimizer))
        params = model.params()
        if step == 1:
            params[0].requires_grad_(True)
            params[2].requires_grad_(False)  # and stays in flat memory
            optimizer.param_groups[1]["amsgrad"] = True
        if step == 2:
            late = torch.nn.Parameter(torch.ones(700))
            model.weights.append(late)
            optimizer.add_param_group({"params": [late], "betas": (0.5, 0.9)})
        if step == 4:
            optimizer.param_groups[1]["amsgrad"] = False
            optimizer.load_state_dict(optimizer.full_state_dict())
        everyone = [p for group in optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in everyone} == {id(p) for p in model.parameters()}
        for index, param in enumerate(everyone):
            used = param.requires_grad and (step + index) % 3
            param.grad = gradient(param, step, index, rank) if used else None
        optimizer.clip_grad_norm_(5.0)
        optimizer.step()
    model, optimizer = duplicate((model, optimizer))
    full = optimizer.full_state_dict()
    assert full["param_groups"][0]["name"] == "first"
    return [p.detach().clone() for p in model.parameters()], full, optimizer.defaults


@pytest.mark.parametrize(
    "options",
    [{"reduction": "backend"}, {"grad_sync": "external"}, {"mode": "replicated"}],
    ids=str,
)
def test_copies_keep_the_options(ranks: RankPool, options: dict[str, Any]) -> None:
    """A step of the copy is the same collectives, of the same sizes."""
    for original, copied in ranks.run(2, _traffic, options):
        assert sum(original.values()) > 0 and copied == original


def _traffic(rank: Rank, options: dict[str, Any]) -> Any:
    model = Model()
    pair = model, fusedshard.AdamW(model.params(), process_group=rank.group, **options)
    sent = []
    for its_model, optimizer in (pair, copy.deepcopy(pair)):
        optimizer.stats.reset()
        train(optimizer, its_model.params(), range(1), lambda p, t, i: gradient(p, t, i, 0))
        sent.append(optimizer.stats.sent_bytes)
    return sent


def test_pickles_keep_the_options_and_hold_each_number_once() -> None:
    params = [torch.nn.Parameter(torch.randn(1000)) for _ in range(200)]
    optimizer = fusedshard.AdamW(params, bucket_cap_mb=0.2, mode="replicated")
    train(optimizer, params, range(1), lambda p, t, i: torch.ones_like(p))
    pickled = pickle.dumps((params, optimizer))
    state = optimizer.state[params[7]].values()
    assert [tensor.untyped_storage().nbytes() for tensor in state] == [4, 4000, 4000]
    numbers = 3 * 4 * 200 * 1000
    assert numbers < len(pickled) < 1.5 * numbers  # a tensor's own description is 500 bytes
    _, other = pickle.loads(pickled)
    assert other.layout == optimizer.layout and len(other.layout.flats) > 2
    assert other.defaults == optimizer.defaults


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
def test_users_own_state_survives_and_hooks_stay_behind_as_with_torch(duplicate: Copier) -> None:
    seen = []
    for kind in (fusedshard.AdamW, torch.optim.AdamW):
        calls: list[Any] = []
        (param,) = params = [torch.nn.Parameter(torch.ones(3))]
        optimizer: Any = kind(params, lr=0.1, amsgrad=True)
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        train(optimizer, params, range(1), lambda p, t, i: torch.ones(3))
        optimizer.param_groups[0]["amsgrad"] = False  # the third moment stays to be seen
        optimizer.state[param]["mine"] = torch.arange(2)
        optimizer.state["everyones"] = [7]
        (twin,), other = duplicate((params, optimizer))
        other.state["everyones"].append(8)
        train(other, [twin], range(1), lambda p, t, i: torch.ones(3))
        seen.append((len(calls), optimizer.state["everyones"], other.state_dict()))
    torch.testing.assert_close(seen[0][2]["state"][0], seen[1][2]["state"][0], rtol=0, atol=1e-6)
    assert seen[0][:2] == seen[1][:2] == (1, [7])
    assert seen[0][2]["state"]["everyones"] == seen[1][2]["state"]["everyones"] == [7, 8]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
def test_an_optimizer_that_refers_to_itself(duplicate: Copier) -> None:
    optimizer: Any = fusedshard.AdamW([torch.nn.Parameter(torch.ones(3))])
    optimizer.param_groups[0]["owner"] = [optimizer]
    other = duplicate(optimizer)
    assert other is not optimizer and other.param_groups[0]["owner"] == [other]


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step:UserWarning")
def test_a_scheduler_that_is_copied_along_drives_the_copy() -> None:
    rates = []
    for kind in (fusedshard.AdamW, torch.optim.AdamW):
        params = [torch.nn.Parameter(torch.ones(3))]
        optimizer: Any = kind(params, lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        _, other, its_scheduler = copy.deepcopy((params, optimizer, scheduler))
        for _ in range(2):
            other.step()
            its_scheduler.step()
        rates.append([o.param_groups[0]["lr"] for o in (optimizer, other)])
    assert rates[0] == rates[1] == [0.1, 0.025]


def test_a_copy_of_parameters_in_another_form_is_refused() -> None:
    model = Model()
    optimizer = fusedshard.AdamW(model.params())
    memo: dict[int, Any] = {}
    copy.deepcopy(model, memo).double()
    with pytest.raises(RuntimeError, match="parameter 0: cast or reshaped"):
        copy.deepcopy(optimizer, memo)


def test_a_copy_made_in_inference_mode_trains() -> None:
    model = Model()
    optimizer = fusedshard.AdamW(model.params())
    with torch.inference_mode():
        other = copy.deepcopy(optimizer)
    params = other.param_groups[0]["params"]
    params[2].square().sum().backward()
    other.step()
    assert not torch.equal(params[2], model.params()[2])
