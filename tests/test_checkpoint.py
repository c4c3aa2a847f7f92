"""State dicts in torch's format: between world sizes, and to and from torch.optim."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Rank, RankPool
from training import AWKWARD, assert_close, assert_same_bits, gradient, make_params, mean_gradient

import fusedshard

MODES = ("sharded", "replicated")
HYPER: dict[str, Any] = {"lr": 0.1, "eps": 1.0, "weight_decay": 0.1}
State = tuple[list[torch.Tensor], dict[str, Any]]


def resume(
    rank: Rank, start: State | None, steps: range, mode: str, donors: int, **options: Any
) -> State:
    """Train ``steps`` from a saved state; gradients are those of ``donors`` ranks, dealt out so
    that their mean does not depend on the world size."""
    params = make_params(AWKWARD, seed=rank.rank)
    if start is not None:
        params = [torch.nn.Parameter(value.clone()) for value in start[0]]
    optimizer = fusedshard.AdamW(params, mode=mode, process_group=rank.group, **HYPER, **options)
    if start is not None:
        kept = copy.deepcopy(start[1])
        optimizer.load_state_dict(start[1])
        assert_same_bits(start[1], kept)  # the source is not changed
        assert_same_bits(optimizer.full_state_dict()["state"], kept["state"])
    for step in steps:
        for index, param in enumerate(params):
            param.grad = mean_gradient(param, step, index, donors)
        optimizer.step()
    return [p.detach().clone() for p in params], optimizer.full_state_dict()


def torch_run(start: State | None, steps: range, donors: int, **options: Any) -> State:
    params = make_params(AWKWARD)
    if start is not None:
        params = [torch.nn.Parameter(value.clone()) for value in start[0]]
    optimizer = torch.optim.AdamW(params, **HYPER, **options)
    if start is not None:
        optimizer.load_state_dict(start[1])
    for step in steps:
        for index, param in enumerate(params):
            param.grad = mean_gradient(param, step, index, donors)
        optimizer.step()
    return [p.detach() for p in params], optimizer.state_dict()


@pytest.mark.parametrize("mode", MODES)
def test_ckp_01_resuming_equals_not_stopping(ranks: RankPool, mode: str) -> None:
    straight = ranks.run(2, resume, None, range(6), mode, 3)
    half = ranks.run(2, resume, None, range(3), mode, 3)[0]
    resumed = ranks.run(2, resume, half, range(3, 6), mode, 3)
    for result in (*straight, *resumed):
        assert_same_bits(result, straight[0])


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 3), (2, 1), (3, 4), (4, 2), (1, 3)])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_ckp_02_another_world_size_and_mode(
    ranks: RankPool, saved_on: int, loaded_on: int, amsgrad: bool
) -> None:
    options: dict[str, Any] = {"amsgrad": amsgrad}
    half = ranks.run(saved_on, _resume, None, range(3), "sharded", options)[0]
    for mode in MODES:
        resumed = ranks.run(loaded_on, _resume, half, range(3, 5), mode, options)
        for result in resumed:
            assert_same_bits(result, resumed[0])
        assert_close(resumed[0], torch_run(None, range(5), 2, **options))


def _resume(rank: Rank, start: Any, steps: range, mode: str, options: dict[str, Any]) -> State:
    return resume(rank, start, steps, mode, 2, **options)


@pytest.mark.parametrize("mode", MODES)
def test_ckp_03_exchange_with_torch(ranks: RankPool, mode: str) -> None:
    expected = torch_run(None, range(5), 3)
    half = torch_run(None, range(3), 3)
    for result in ranks.run(2, resume, half, range(3, 5), mode, 3):
        assert_close(result, expected)
    ours = ranks.run(2, resume, None, range(3), mode, 3)[0]
    assert_close(torch_run(ours, range(3, 5), 3), expected)


@pytest.mark.parametrize("mode", MODES)
def test_ckp_06_parameters_without_state_start_afresh(ranks: RankPool, mode: str) -> None:
    for saved_keys, params, step in ranks.run(2, _ckp_06, mode):
        assert saved_keys == {0, 2}
        assert step == 1
        (fresh,) = make_params([(4,)], seed=9)
        reference = torch.optim.AdamW([fresh], **HYPER)
        fresh.grad = mean_gradient(fresh, 7, 1, 2)
        reference.step()
        torch.testing.assert_close(params[1], fresh.detach(), rtol=0, atol=1e-6)


def _ckp_06(rank: Rank, mode: str) -> Any:
    params = [*make_params([(3,)]), *make_params([(4,)], seed=9), *make_params([(5,)])]
    optimizer = fusedshard.AdamW(params, mode=mode, process_group=rank.group, **HYPER)
    for step in range(2):
        for index in (0, 2):
            params[index].grad = gradient(params[index], step, index, rank.rank)
        optimizer.step()
    state = optimizer.full_state_dict()
    params = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer = fusedshard.AdamW(params, mode=mode, process_group=rank.group, **HYPER)
    optimizer.load_state_dict(state)
    params[1].grad = gradient(params[1], 7, 1, rank.rank)
    optimizer.step()
    step = optimizer.state[params[1]]["step"].item()
    return set(state["state"]), [p.detach().clone() for p in params], step


def _wrapped(state: dict[str, Any]) -> None:
    inner = dict(state)
    state.clear()
    state.update(model={}, optimizer=inner)


def _one_group_more(state: dict[str, Any]) -> None:
    state["param_groups"].append({**state["param_groups"][0], "params": [9]})


def _one_param_fewer(state: dict[str, Any]) -> None:
    state["param_groups"][0]["params"].pop()


def _transposed(state: dict[str, Any]) -> None:
    state["state"][1]["exp_avg"] = state["state"][1]["exp_avg"].t()


def _missing_moment(state: dict[str, Any]) -> None:
    del state["state"][0]["exp_avg_sq"]


def _sparse_moment(state: dict[str, Any]) -> None:
    state["state"][1]["exp_avg"] = state["state"][1]["exp_avg"].to_sparse()


def _endless_step(state: dict[str, Any]) -> None:
    state["state"][0]["step"] = torch.tensor(float("inf"))


def _huge_step(state: dict[str, Any]) -> None:
    state["state"][0]["step"] = 1e30


def _one_beta(state: dict[str, Any]) -> None:
    state["param_groups"][0]["betas"] = (0.9,)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("on_all", [True, False])
@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_wrapped, "state_dict: got the keys 'model', 'optimizer', wanted 'state'"),
        (_one_group_more, "param_groups: got 2 in the state dict, wanted 1"),
        (_one_param_fewer, "group 0: got 1 parameters in the state dict, wanted 2"),
        (_transposed, "parameter 1: exp_avg has shape (3, 2) in the state dict, wanted (2, 3)"),
        (_missing_moment, "parameter 0: exp_avg_sq is missing"),
        (_sparse_moment, "parameter 1: exp_avg is no plain dense tensor"),
        (_endless_step, "parameter 0: step is inf in the state dict, wanted an integer from 0"),
        (_huge_step, "parameter 0: step is 1e+30 in the state dict, wanted an integer from 0"),
        (_one_beta, "betas: got (0.9,), wanted two numbers"),
    ],
)
def test_ckp_07_a_checkpoint_that_does_not_fit(
    ranks: RankPool, mode: str, on_all: bool, spoil: Any, named: str
) -> None:
    for text, before, after in ranks.run(2, _ckp_07, mode, on_all, spoil):
        assert named in text
        assert_same_bits(before, after)


def _ckp_07(rank: Rank, mode: str, on_all: bool, spoil: Any) -> Any:
    params = make_params([(4,), (2, 3)])
    optimizer = fusedshard.AdamW(params, mode=mode, process_group=rank.group, **HYPER)
    for index, param in enumerate(params):
        param.grad = gradient(param, 0, index, rank.rank)
    optimizer.step()
    before = optimizer.full_state_dict()
    other = copy.deepcopy(before)
    other["state"][0]["exp_avg"] += 1
    if on_all or rank.rank == 1:
        spoil(other)
    with pytest.raises(ValueError) as caught:
        optimizer.load_state_dict(other)
    return str(caught.value), before, optimizer.full_state_dict()


def test_ckp_08_state_dict_on_one_rank_hangs_nobody_and_is_no_file(ranks: RankPool) -> None:
    text, *others = ranks.run(2, _ckp_08)
    assert "call full_state_dict() on every rank" in text and others == [""]


def _ckp_08(rank: Rank) -> str:
    optimizer = fusedshard.AdamW(make_params([(4,), (2, 3)]), process_group=rank.group)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    if rank.rank != 0:
        return ""
    with pytest.raises(TypeError) as caught:
        torch.save(optimizer.state_dict(), io.BytesIO())
    return str(caught.value)


@pytest.mark.parametrize("mode", MODES)
def test_full_state_dict_on_the_first_rank_only(ranks: RankPool, mode: str) -> None:
    (first, whole), *others = ranks.run(3, _rank0_only, mode)
    assert_same_bits(first, whole)
    assert [state for state, _ in others] == [{}, {}]


def _rank0_only(rank: Rank, mode: str) -> Any:
    params = make_params(AWKWARD)
    optimizer = fusedshard.AdamW(params, mode=mode, process_group=rank.group)
    for index, param in enumerate(params):
        param.grad = gradient(param, 0, index, rank.rank)
    optimizer.step()
    return optimizer.full_state_dict(rank0_only=True), optimizer.full_state_dict()


def test_local_state_dict_in_replicated_mode_is_the_full_one(ranks: RankPool) -> None:
    for local, full in ranks.run(2, _local_state):
        assert_same_bits(local, full)


def _local_state(rank: Rank) -> Any:
    params = make_params(AWKWARD)
    optimizer = fusedshard.AdamW(params, mode="replicated", process_group=rank.group)
    for index, param in enumerate(params):
        param.grad = gradient(param, 0, index, rank.rank)
    optimizer.step()
    return optimizer.state_dict(), optimizer.full_state_dict()


@pytest.mark.parametrize("world_size", [1, 2])
def test_loading_its_own_state_dict_changes_nothing(ranks: RankPool, world_size: int) -> None:
    """Its tensors are the optimizer's own moments, as torch hands them out. Beside a parameter
    without state."""
    for state, expected in ranks.run(world_size, _reload_own):
        assert_same_bits(state, expected)


def _reload_own(rank: Rank) -> Any:
    params = make_params([(40,), (3, 5), (7,)])
    optimizer = fusedshard.AdamW(
        params, process_group=rank.group, mode="replicated", amsgrad=True, eps=1.0
    )
    for param in params[:2]:
        param.grad = torch.linspace(-1, 1, param.numel()).view_as(param)
    optimizer.step()
    expected = copy.deepcopy(optimizer.state_dict())
    assert all(state["exp_avg"].any() for state in expected["state"].values())
    optimizer.load_state_dict(optimizer.state_dict())
    return optimizer.state_dict(), expected


@pytest.mark.parametrize("mode", MODES)
def test_amsgrad_switched_on_between_two_uses(ranks: RankPool, mode: str) -> None:
    """A parameter without gradient since then has a third moment of zero in the state dict, which
    torch takes as well; loaded from one that has none, it begins at zero."""
    for third, next_steps in ranks.run(2, _amsgrad_later, mode):
        assert third == [True, False]
        assert_same_bits(next_steps[0], next_steps[1])
        torch.testing.assert_close(next_steps[0], next_steps[2], rtol=0, atol=1e-6)


def _amsgrad_later(rank: Rank, mode: str) -> Any:
    def build(params: Any, state: Any) -> Any:
        optimizer = fusedshard.Adam(params, mode=mode, process_group=rank.group, amsgrad=True)
        optimizer.load_state_dict(state)
        return optimizer

    params = make_params([(40,), (30,)])
    optimizer = fusedshard.Adam(params, mode=mode, process_group=rank.group)
    for used in ((0, 1), (0,)):
        for param in params:
            param.grad = None
        for index in used:
            params[index].grad = torch.linspace(-1, 1, params[index].numel())
        optimizer.step()
        optimizer.param_groups[0]["amsgrad"] = True
    state = optimizer.full_state_dict()
    third = [bool(state["state"][i]["max_exp_avg_sq"].any()) for i in range(2)]
    without = copy.deepcopy(state)
    del without["state"][1]["max_exp_avg_sq"]
    results = []
    for kind in ("ours", "ours without", "torch"):
        copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
        if kind == "torch":
            again: Any = torch.optim.Adam(copies, amsgrad=True)
            again.load_state_dict(state)
        else:
            again = build(copies, without if kind == "ours without" else state)
        for param in copies:
            param.grad = torch.linspace(-1, 1, param.numel())
        again.step()
        results.append([p.detach() for p in copies])
    return third, results


def test_hooks_see_the_whole_state(ranks: RankPool) -> None:
    for shapes, extra, kept in ranks.run(2, _hooks_on_full_state):
        assert shapes == [(100,), (100,)] and extra == "mine" and kept == 7.0


def _hooks_on_full_state(rank: Rank) -> Any:
    (param,) = make_params([(100,)])
    optimizer = fusedshard.AdamW([param], process_group=rank.group)
    param.grad = torch.ones(100)
    optimizer.step()
    shapes: list[tuple[int, ...]] = []

    def look(optimizer: Any, packed: dict[str, Any]) -> None:
        shapes.extend(tuple(packed["state"][0][n].shape) for n in ("exp_avg", "exp_avg_sq"))
        packed["state"][0]["exp_avg"].fill_(7.0)

    optimizer.register_state_dict_post_hook(look)
    optimizer.register_state_dict_post_hook(lambda _, packed: {**packed, "extra": "mine"})
    state = optimizer.full_state_dict()
    return shapes, state["extra"], state["state"][0]["exp_avg"][0].item()


def test_a_full_state_dict_is_no_larger_than_its_contents(tmp_path: Path) -> None:
    """Each step count is a tensor of its own, not a view of all."""
    params = make_params([(1,)] * 500)
    optimizers = [kind(params) for kind in (fusedshard.AdamW, torch.optim.AdamW)]
    sizes = []
    for optimizer in optimizers:
        for param in params:
            param.grad = torch.ones(1)
        optimizer.step()
        state = getattr(optimizer, "full_state_dict", optimizer.state_dict)()
        torch.save(state, tmp_path / "state.pt")
        sizes.append((tmp_path / "state.pt").stat().st_size)
    assert sizes[0] < 1.1 * sizes[1]


def test_ckp_09_a_saved_parameter_is_no_larger_than_itself() -> None:
    def size(value: Any) -> int:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return len(buffer.getvalue())

    model = torch.nn.Sequential(*[torch.nn.Linear(20, 20) for _ in range(50)])
    before = size(model.state_dict())
    optimizer = fusedshard.AdamW(model.parameters())
    model(torch.ones(1, 20)).sum().backward()
    optimizer.step()
    assert size(model.state_dict()) < 1.05 * before
    assert size(model[0].bias) < 20 * 4 + 4096
    assert size(optimizer.full_state_dict()) < 1.3 * 2 * before
    buffer = io.BytesIO()
    torch.save(optimizer.full_state_dict(), buffer)
    buffer.seek(0)
    assert_same_bits(torch.load(buffer, weights_only=True), optimizer.full_state_dict())


def test_ckp_10_extra_keys_survive_and_loaded_values_win(ranks: RankPool) -> None:
    for groups in ranks.run(2, _ckp_10):
        assert [g["name"] for g in groups] == ["a", "b"]
        assert [g["lr_mult"] for g in groups] == [1, 2]
        assert [g["initial_lr"] for g in groups] == [0.1, 0.2]
        assert groups[1]["betas"] == (0.5, 0.6)


def _ckp_10(rank: Rank) -> Any:
    params = make_params([(3,), (4,)])
    groups = [
        {"params": params[:1], "name": "a", "lr_mult": 1, "lr": 0.1},
        {"params": params[1:], "name": "b", "lr_mult": 2, "lr": 0.2, "betas": (0.5, 0.6)},
    ]
    optimizer = fusedshard.AdamW(groups, process_group=rank.group)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    state = optimizer.full_state_dict()
    other = fusedshard.AdamW([{"params": [p]} for p in params], process_group=rank.group)
    other.load_state_dict(state)
    torch.optim.lr_scheduler.StepLR(other, 10, last_epoch=5)
    return [{k: v for k, v in g.items() if k != "params"} for g in other.param_groups]
