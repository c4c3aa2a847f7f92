"""GradScaler: one decision for all ranks; beside torch's scaler and optimizer on the means."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from ranks import Rank, RankPool
from training import assert_same_bits, gradient, make_params, mean_gradient, backward

import fusedshard

MODES = ("sharded", "replicated")
each_mode = pytest.mark.parametrize("mode", MODES)
each_world = pytest.mark.parametrize(
    ("world_size", "mode"), [(1, "sharded"), *((n, mode) for n in (2, 3) for mode in MODES)]
)
SHAPES = [(1,), (17, 25), (300,)]
SCALE = 1024.0


def backward(scaler: torch.amp.GradScaler, params: Any, grads: Any) -> None:
    """As a backward of a scaled loss leaves gradients."""
    factor = scaler.scale(torch.ones(()))
    for param in params:
        param.grad = None
    backward(params, [grad * factor for grad in grads])


def new_scaler(kind: Any = fusedshard.GradScaler, **options: Any) -> Any:
    return kind("cpu", init_scale=SCALE, growth_interval=4, **options)


def poisoned(step: int) -> bool:
    """Every fifth step has an infinite gradient, the first among them."""
    return step % 5 == 0


def train_scaled(rank: Rank, mode: str, unscale: bool, clip: bool, steps: int) -> Any:
    params = make_params(SHAPES)
    optimizer = fusedshard.AdamW(params, lr=0.1, eps=1.0, process_group=rank.group, mode=mode)
    scaler = new_scaler()
    scales = []
    for step in range(steps):
        grads = [gradient(p, step, i, rank.rank) for i, p in enumerate(params)]
        if poisoned(step) and rank.rank == rank.world_size - 1:
            grads[1][3, 7] = math.inf
        backward(scaler, params, grads)
        if unscale:
            scaler.unscale_(optimizer)
        if clip:
            optimizer.clip_grad_norm_(1.0)
        before = [p.detach().clone() for p in params]
        scaler.step(optimizer)
        assert poisoned(step) == all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, [p.detach() for p in params], optimizer.full_state_dict()["state"]


def train_scaled_by_torch(world_size: int, clip: bool, steps: int) -> Any:
    params = make_params(SHAPES)
    optimizer = torch.optim.AdamW(params, lr=0.1, eps=1.0)
    scaler = new_scaler(torch.amp.GradScaler)
    scales = []
    for step in range(steps):
        grads = [mean_gradient(p, step, i, world_size) for i, p in enumerate(params)]
        if poisoned(step):
            grads[1][3, 7] = math.inf
        backward(scaler, params, grads)
        scaler.unscale_(optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, [p.detach() for p in params], optimizer.state_dict()["state"]


@each_world
@pytest.mark.parametrize(("unscale", "clip"), [(False, False), (True, False), (True, True)])
def test_scl_01_and_06_training_with_skipped_steps(
    ranks: RankPool, world_size: int, mode: str, unscale: bool, clip: bool
) -> None:
    """An infinite gradient on the last rank alone skips the step on all, which counts for nothing,
    and every rank's scale is torch's."""
    scales, params, state = train_scaled_by_torch(world_size, clip, 50)
    assert [int(s["step"]) for s in state.values()] == [40] * 3
    results = ranks.run(world_size, train_scaled, mode, unscale, clip, 50)
    for result in results:
        assert result[0] == scales
        torch.testing.assert_close(result[1:], (params, state), rtol=1e-5, atol=1e-6)
        assert_same_bits(result, results[0])


@each_mode
def test_scl_06_the_first_counted_step_is_number_one(ranks: RankPool, mode: str) -> None:
    for moved, steps in ranks.run(2, _first_skipped, mode):
        assert moved == pytest.approx(-0.1, abs=1e-6) and steps == [0, 1]


def _first_skipped(rank: Rank, mode: str) -> tuple[float, list[int]]:
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = fusedshard.Adam([param], lr=0.1, process_group=rank.group, mode=mode)
    scaler, steps = new_scaler(), []
    for value in (math.inf if rank.rank else 0.5, 0.5):
        backward(scaler, [param], [torch.tensor([value])])
        scaler.step(optimizer)
        scaler.update()
        steps.append(int(optimizer.state[param]["step"]))
    return param.item(), steps


@each_mode
@pytest.mark.parametrize("unscale", [False, True])
def test_scl_02_gradients_are_unscaled_once(ranks: RankPool, mode: str, unscale: bool) -> None:
    """Gradients 2 and 4: with eps=1 and lr=1 from 0 the step is -3/4."""
    for value in ranks.run(2, _unscaled_once, mode, unscale):
        assert value == pytest.approx(-0.75, abs=1e-6)


def _unscaled_once(rank: Rank, mode: str, unscale: bool) -> float:
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = fusedshard.Adam([param], lr=1.0, eps=1.0, process_group=rank.group, mode=mode)
    scaler = new_scaler()
    backward(scaler, [param], [torch.tensor([2.0 * (rank.rank + 1)])])
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return param.item()


@each_mode
@pytest.mark.parametrize("where", ["everywhere", "on rank 1"])
def test_scl_03_unscale_that_finds_inf_stops_the_step(
    ranks: RankPool, mode: str, where: str
) -> None:
    assert ranks.run(2, _found_by_unscale, mode, where) == [(True, SCALE / 2)] * 2


def _found_by_unscale(rank: Rank, mode: str, where: str) -> tuple[bool, float]:
    (param,) = make_params([(5,)])
    optimizer = fusedshard.AdamW([param], process_group=rank.group, mode=mode)
    before, scaler = param.detach().clone(), new_scaler()
    bad = where == "everywhere" or rank.rank == 1
    backward(scaler, [param], [torch.full((5,), math.nan if bad else 1.0)])
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return torch.equal(param, before), scaler.get_scale()


@each_mode
def test_scl_04_clipping_sees_unscaled_gradients(ranks: RankPool, mode: str) -> None:
    for norm, exp_avg, refusal in ranks.run(2, _clip_unscaled, mode):
        assert norm == pytest.approx(5.0, rel=1e-6)
        assert exp_avg == pytest.approx([0.1 * 0.6, 0.1 * 0.8], rel=1e-5)
        assert "call scaler.unscale_(optimizer) before it" in refusal


def _clip_unscaled(rank: Rank, mode: str) -> tuple[float, list[float], str]:
    """The mean of the ranks' gradients is (3, 4)."""
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = fusedshard.Adam([param], process_group=rank.group, mode=mode)
    scaler = fusedshard.GradScaler("cpu", init_scale=65536.0)
    own = torch.tensor([2.0, 8.0]) if rank.rank else torch.tensor([4.0, 0.0])
    backward(scaler, [param], [own])
    scaler.unscale_(optimizer)
    norm = optimizer.clip_grad_norm_(1.0).item()
    scaler.step(optimizer)
    scaler.update()
    exp_avg = optimizer.full_state_dict()["state"][0]["exp_avg"].tolist()
    backward(scaler, [param], [own])
    optimizer.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError) as error:
        scaler.step(optimizer)
    return norm, exp_avg, str(error.value)


@each_mode
@pytest.mark.parametrize("grad_sync", ["step", "backward"])
def test_torchs_scaler_works_while_ranks_agree(ranks: RankPool, mode: str, grad_sync: str) -> None:
    """It warns once, unless backward has averaged what it looks at."""
    results = ranks.run(2, _plain_scaler, mode, grad_sync, False)
    warned = 0 if (mode, grad_sync) == ("replicated", "backward") else 1
    for values, scale, messages in results:
        assert values == results[0][0] and scale == SCALE / 2
        assert ["use fusedshard.GradScaler" in text for text in messages] == [True] * warned


@pytest.mark.parametrize(
    ("mode", "grad_sync"), [("sharded", "step"), ("replicated", "step"), ("sharded", "backward")]
)
def test_scl_01_torchs_scaler_raises_everywhere_when_ranks_do_not(
    ranks: RankPool, mode: str, grad_sync: str
) -> None:
    for text, unchanged in ranks.run(2, _plain_scaler, mode, grad_sync, True):
        assert "found_inf 0.0 on rank 0" in text and "found_inf 1.0 on rank 1" in text
        assert "use fusedshard.GradScaler" in text and unchanged


def _plain_scaler(rank: Rank, mode: str, grad_sync: str, differ: bool) -> Any:
    """A clean step and one with an infinite gradient, on all ranks or on rank 1 alone."""
    (param,) = make_params([(5,)])
    options: Any = {"process_group": rank.group, "mode": mode, "grad_sync": grad_sync}
    optimizer = fusedshard.AdamW([param], **options)
    scaler = new_scaler(torch.amp.GradScaler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for bad in (False, True):
            grad = torch.full((5,), 1.0 + rank.rank)
            grad[2] = math.inf if bad and (rank.rank == 1 or not differ) else 1.0
            backward(scaler, [param], [grad])
            before = param.detach().clone()
            if bad and differ:
                with pytest.raises(RuntimeError) as error:
                    scaler.step(optimizer)
                return str(error.value), torch.equal(param, before)
            scaler.step(optimizer)
            assert torch.equal(param, before) == bad
            scaler.update()
    texts = [str(w.message) for w in caught if "GradScaler" in str(w.message)]
    return param.tolist(), scaler.get_scale(), texts


@each_mode
def test_a_step_left_out_after_unscale(ranks: RankPool, mode: str) -> None:
    for value in ranks.run(2, _unscale_and_leave_out, mode):
        assert value == pytest.approx(-0.75, abs=1e-6)


def _unscale_and_leave_out(rank: Rank, mode: str) -> float:
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = fusedshard.Adam([param], lr=1.0, eps=1.0, process_group=rank.group, mode=mode)
    scaler = new_scaler()
    for step in range(2):
        optimizer.zero_grad()
        backward(scaler, [param], [torch.tensor([2.0 * (rank.rank + 1)])])
        scaler.unscale_(optimizer)
        if step == 1:
            scaler.step(optimizer)
        scaler.update()
    return param.item()


def test_other_optimizers_are_torchs_business() -> None:
    results = []
    for kind in (fusedshard.GradScaler, torch.amp.GradScaler):
        params = make_params(SHAPES)
        optimizer, scaler = torch.optim.AdamW(params), new_scaler(kind)
        for step in range(6):
            grads = [gradient(p, step, i, 0) for i, p in enumerate(params)]
            if poisoned(step):
                grads[0][0] = math.inf
            backward(scaler, params, grads)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        results.append(([p.detach() for p in params], scaler.state_dict()))
    assert_same_bits(results[0], results[1])


def test_a_disabled_scaler_does_nothing() -> None:
    params, plain = make_params(SHAPES), make_params(SHAPES)
    optimizer, twin = fusedshard.AdamW(params), fusedshard.AdamW(plain)
    scaler = fusedshard.GradScaler("cpu", enabled=False)
    for ps in (params, plain):
        for i, param in enumerate(ps):
            param.grad = gradient(param, 0, i, 0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    twin.step()
    assert_same_bits(list(params), list(plain))


def test_unscaling_twice_raises_as_in_torch() -> None:
    (param,) = make_params([(3,)])
    optimizer, scaler = fusedshard.AdamW([param]), new_scaler()
    backward(scaler, [param], [torch.ones(3)])
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)


def test_ranks_that_step_unequally_often_do_not_meet(ranks: RankPool) -> None:
    """Where rank 0 skips a step, its next one would else be taken for the others' present one."""
    for message in ranks.run(2, _one_skips):
        assert "equally often: calls before this one are 1 on rank 0, 2 on rank 1" in message


def _one_skips(rank: Rank) -> str:
    (param,) = make_params([(3,)])
    optimizer = fusedshard.AdamW([param], process_group=rank.group)
    param.grad = torch.ones(3)
    optimizer.step()
    if rank.rank == 1:
        optimizer._built._turn += 1  # as if it had called once more, alone
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    return str(error.value)
