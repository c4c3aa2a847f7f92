"""GradScaler: one decision for all ranks; beside torch's scaler and optimizer on the means."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from ranks import Rank, RankPool
from sides import HYPER, Side, check_against_torch
from training import (
    GRAD_SYNCS,
    Variant,
    assert_same_bits,
    backward,
    each_variant,
    each_variant_on,
    gradient,
    make_params,
    variants,
)

import fusedshard

SHAPES = [(1,), (17, 25), (300,)]
SCALE = 1024.0


def new_scaler(kind: Any = fusedshard.GradScaler, **options: Any) -> Any:
    return kind("cpu", init_scale=SCALE, growth_interval=4, **options)


def scaled_backward(scaler: Any, optimizer: Any, params: Any, grads: Any) -> None:
    """Of a scaled loss with these gradients."""
    optimizer.zero_grad()
    backward(params, grads, scaler.scale(torch.ones(())))


def poisoned(step: int) -> bool:
    """Every fifth step has an infinite gradient, the first among them."""
    return step % 5 == 0


def train_scaled(side: Side, unscale: bool, clip: bool, steps: int) -> list[Any]:
    params, scales = side.params(SHAPES), []
    optimizer = side.build(params, **HYPER)
    scaler = new_scaler(fusedshard.GradScaler if side.ours else torch.amp.GradScaler)

    def snapshot() -> list[torch.Tensor]:
        """What this rank has; state comes with the first step, even if that is skipped."""
        state = [value for state in optimizer.state.values() for value in state.values()]
        return [tensor.detach().clone() for tensor in (*params, *state)]

    for step in range(steps):
        grads = [side.gradient(p, step, i) for i, p in enumerate(params)]
        if poisoned(step) and (side.number == side.world_size - 1 or not side.ours):
            grads[1][3, 7] = math.inf
        scaled_backward(scaler, optimizer, params, grads)
        if unscale:
            scaler.unscale_(optimizer)
        if clip:
            side.clip(optimizer, params, 1.0)
        before = snapshot()
        scaler.step(optimizer)
        if poisoned(step):
            assert_same_bits(snapshot()[: len(before)], before)
        scaler.update()
        scales.append(scaler.get_scale())
    return [torch.tensor(scales), side.outcome(optimizer)]


@each_variant_on(2, 1, 3)
@pytest.mark.parametrize(("unscale", "clip"), [(False, False), (True, False), (True, True)])
def test_scl_01_and_06_training_with_skipped_steps(
    ranks: RankPool, world_size: int, variant: Variant, unscale: bool, clip: bool
) -> None:
    """An infinite gradient on the last rank alone skips the step on all, which counts for nothing,
    and every rank's scale is torch's."""
    args = (unscale, clip, 50)
    scales, (_, state) = check_against_torch(ranks, world_size, variant, train_scaled, *args)
    assert scales[0] == 512.0
    assert [int(s["step"]) for s in state["state"].values()] == [40] * 3


@each_variant
def test_scl_06_the_first_counted_step_is_number_one(ranks: RankPool, variant: Variant) -> None:
    for moved, steps in ranks.run(2, _first_skipped, variant):
        assert moved == pytest.approx(-0.1, abs=1e-6) and steps == [0, 1]


def _first_skipped(rank: Rank, variant: Variant) -> tuple[float, list[int]]:
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = variant.ours([param], rank, lr=0.1, weight_decay=0.0)
    scaler, steps = new_scaler(), []
    own = 0.25 + 0.5 * rank.rank
    for value in (math.inf if rank.rank else own, own):
        scaled_backward(scaler, optimizer, [param], [torch.tensor([value])])
        scaler.step(optimizer)
        scaler.update()
        steps.append(int(optimizer.state[param]["step"]))
    return param.item(), steps


@each_variant
@pytest.mark.parametrize("unscale", [False, True])
def test_scl_02_gradients_are_unscaled_once(
    ranks: RankPool, variant: Variant, unscale: bool
) -> None:
    """Gradients 2 and 4: with eps=1 and lr=1 from 0 the step is -3/4."""
    for rank, (value, grad) in enumerate(ranks.run(2, _unscaled_once, variant, unscale)):
        assert value == pytest.approx(-0.75, abs=1e-6)
        # The factor goes into the update: what loggers see is scaled.
        assert grad == SCALE * (3.0 if variant.mode == "replicated" else 2.0 * (rank + 1))


def _unscaled_once(rank: Rank, variant: Variant, unscale: bool) -> tuple[float, float]:
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = variant.ours([param], rank, lr=1.0, eps=1.0, weight_decay=0.0)
    scaler = new_scaler()
    scaled_backward(scaler, optimizer, [param], [torch.tensor([2.0 * (rank.rank + 1)])])
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert param.grad is not None
    return param.item(), param.grad.item()


@each_variant
@pytest.mark.parametrize("where", ["everywhere", "on rank 1"])
def test_scl_03_unscale_that_finds_inf_stops_the_step(
    ranks: RankPool, variant: Variant, where: str
) -> None:
    assert ranks.run(2, _found_by_unscale, variant, where) == [(True, 512.0)] * 2


def _found_by_unscale(rank: Rank, variant: Variant, where: str) -> tuple[bool, float]:
    (param,) = make_params([(5,)])
    optimizer = variant.ours([param], rank)
    before, scaler = param.detach().clone(), new_scaler()
    bad = where == "everywhere" or rank.rank == 1
    scaled_backward(scaler, optimizer, [param], [torch.full((5,), math.inf if bad else 1.0)])
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return torch.equal(param, before), scaler.get_scale()


@each_variant
def test_a_mean_that_overflows_skips_the_step(ranks: RankPool, variant: Variant) -> None:
    """Though each rank's gradient is finite."""
    assert ranks.run(2, _overflow, variant) == [(True, 512.0)] * 2


def _overflow(rank: Rank, variant: Variant) -> tuple[bool, float]:
    (param,) = make_params([(5,)])
    optimizer = variant.ours([param], rank)
    before, scaler = param.detach().clone(), new_scaler()
    scaled_backward(scaler, optimizer, [param], [torch.full((5,), 3e38 / SCALE)])
    assert param.grad is not None
    assert bool(param.grad.isfinite().all()) != averages_in_backward(variant)
    scaler.step(optimizer)
    scaler.update()
    return torch.equal(param, before), scaler.get_scale()


@each_variant
def test_scl_04_clipping_sees_unscaled_gradients(ranks: RankPool, variant: Variant) -> None:
    for norm, exp_avg, refusal in ranks.run(2, _clip_unscaled, variant):
        assert norm == pytest.approx(5.0, rel=1e-6)
        assert exp_avg == pytest.approx([0.1 * 0.6, 0.1 * 0.8], rel=1e-5)
        assert "call scaler.unscale_(optimizer) before it" in refusal


def _clip_unscaled(rank: Rank, variant: Variant) -> tuple[float, list[float], str]:
    """The mean of the ranks' gradients is (3, 4)."""
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = variant.ours([param], rank)
    scaler = fusedshard.GradScaler("cpu", init_scale=65536.0)
    own = torch.tensor([2.0, 8.0]) if rank.rank else torch.tensor([4.0, 0.0])
    scaled_backward(scaler, optimizer, [param], [own])
    scaler.unscale_(optimizer)
    norm = optimizer.clip_grad_norm_(1.0).item()
    scaler.step(optimizer)
    scaler.update()
    exp_avg = optimizer.full_state_dict()["state"][0]["exp_avg"].tolist()
    scaled_backward(scaler, optimizer, [param], [own])
    optimizer.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError) as error:
        scaler.step(optimizer)
    return norm, exp_avg, str(error.value)


@each_variant
def test_torchs_scaler_works_while_ranks_agree(ranks: RankPool, variant: Variant) -> None:
    """It warns once, unless backward has averaged what it looks at."""
    warned = 0 if averages_in_backward(variant) else 1
    results = ranks.run(2, _plain_scaler, variant, False)
    for values, scale, messages in results:
        assert values == results[0][0] and scale == 512.0
        assert ["use fusedshard.GradScaler" in text for text in messages] == [True] * warned


def test_scales_that_differ_are_told(ranks: RankPool) -> None:
    """Also where the scaler has seen to found_inf: one rank has loaded another state."""
    for text in ranks.run(2, _other_scales):
        assert "scale 1024.0, found_inf 0.0 on rank 0, scale 2048.0" in text


def _other_scales(rank: Rank) -> str:
    (param,) = make_params([(5,)])
    optimizer = fusedshard.AdamW([param], process_group=rank.group)
    scaler = fusedshard.GradScaler("cpu", init_scale=SCALE * (1 + rank.rank))
    scaled_backward(scaler, optimizer, [param], [torch.ones(5)])
    with pytest.raises(RuntimeError) as error:
        scaler.step(optimizer)
    return str(error.value)


def averages_in_backward(variant: Variant) -> bool:
    return (variant.mode, variant.grad_sync) == ("replicated", "backward")


@pytest.mark.parametrize(
    "variant", [v for v in variants(GRAD_SYNCS) if not averages_in_backward(v)], ids="-".join
)
def test_scl_01_torchs_scaler_raises_everywhere_when_ranks_do_not(
    ranks: RankPool, variant: Variant
) -> None:
    for text, unchanged in ranks.run(2, _plain_scaler, variant, True):
        assert "found_inf 0.0 on rank 0" in text and "found_inf 1.0 on rank 1" in text
        assert "use fusedshard.GradScaler" in text and unchanged


def _plain_scaler(rank: Rank, variant: Variant, differ: bool) -> Any:
    """A clean step and one with an infinite gradient, on all ranks or on rank 1 alone."""
    (param,) = make_params([(5,)])
    optimizer = variant.ours([param], rank)
    scaler = new_scaler(torch.amp.GradScaler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for bad in (False, True):
            grad = torch.full((5,), 1.0 + rank.rank)
            grad[2] = math.inf if bad and (rank.rank == 1 or not differ) else 1.0
            scaled_backward(scaler, optimizer, [param], [grad])
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


@each_variant
def test_a_step_left_out_after_unscale(ranks: RankPool, variant: Variant) -> None:
    for value in ranks.run(2, _unscale_and_leave_out, variant):
        assert value == pytest.approx(-0.75, abs=1e-6)


def _unscale_and_leave_out(rank: Rank, variant: Variant) -> float:
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = variant.ours([param], rank, lr=1.0, eps=1.0, weight_decay=0.0)
    scaler = new_scaler()
    for step in range(2):
        scaled_backward(scaler, optimizer, [param], [torch.tensor([2.0 * (rank.rank + 1)])])
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
            scaled_backward(scaler, optimizer, params, grads)
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
    scaled_backward(scaler, optimizer, [param], [torch.ones(3)])
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


def test_it_scales_wherever_it_is() -> None:
    """torch's own is for a GPU by default, and off without one."""
    scaler = fusedshard.GradScaler(init_scale=4.0)
    assert scaler.is_enabled() and scaler.get_scale() == 4.0
    assert not fusedshard.GradScaler(enabled=False).is_enabled()
