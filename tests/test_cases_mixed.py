"""The cases of mixed precision: 16-bit parameters beside torch on fp32 ones."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from mixed import BF16, CODED, FP16, FP32, FP64, NARROW, STATES, fp32_twins
from ranks import Rank, RankPool
from sides import HYPER
from training import (
    Variant,
    assert_same_bits,
    backward,
    each_kind_and_mode,
    each_variant,
    gradient,
)

import fusedshard

narrow = pytest.mark.parametrize("dtype", NARROW, ids=["bf16", "fp16"])
each_world_size = pytest.mark.parametrize("world_size", [1, 2])


def on_ranks(ranks: RankPool, world_size: int, job: Any, *args: Any) -> Any:
    """What the first rank returns, once all are known to return the same."""
    if world_size == 1:
        return job(None, *args)
    results = ranks.run(world_size, job, *args)
    for result in results[1:]:
        assert_same_bits(result, results[0])
    return results[0]


def full(optimizer: Any) -> tuple[dict[int, Any], dict[int, torch.Tensor]]:
    states = optimizer.full_state_dict()["state"]
    masters = {
        i: state.pop("master_weights") for i, state in states.items() if "master_weights" in state
    }
    return states, masters


@each_kind_and_mode
@each_world_size
@pytest.mark.parametrize("master_weights", [None, True])
@narrow
def test_num_04_small_updates_are_not_lost(
    ranks: RankPool, dtype: torch.dtype, master_weights: bool, world_size: int, variant: Variant
) -> None:
    param, master = on_ranks(ranks, world_size, _num_04, variant, dtype, master_weights)
    torch.testing.assert_close(master, torch.full((8,), 0.98999834), rtol=0, atol=1e-6)
    assert_same_bits(param, master.to(dtype))
    if dtype == BF16:
        assert (param == 0.98828125).all()


def _num_04(rank: Rank | None, variant: Variant, dtype: Any, master_weights: Any) -> Any:
    param = torch.nn.Parameter(torch.ones(8, dtype=dtype))
    options = {"lr": 1e-4, "weight_decay": 0.0, "master_weights": master_weights}
    optimizer = variant.ours([param], rank, **options)
    for _ in range(100):
        optimizer.zero_grad()
        backward([param], [torch.full_like(param, 0.5)])
        optimizer.step()
    return param.detach().clone(), full(optimizer)[1][0]


@each_kind_and_mode
def test_num_04_without_a_master_only_stochastic_rounding_moves_them(
    ranks: RankPool, variant: Variant
) -> None:
    """On average by as much as fp32 ones move: 0.01 in 100 steps."""
    stuck, moved = on_ranks(ranks, 2, _without_master, variant)
    assert (stuck == 1).all()
    assert moved.to(FP64).mean().item() == pytest.approx(0.99, abs=5e-4)


def _without_master(rank: Rank, variant: Variant) -> Any:
    outcomes = []
    for rounding in (False, True):
        param = torch.nn.Parameter(torch.ones(10_000, dtype=BF16))
        options = {"lr": 1e-4, "weight_decay": 0.0, "master_weights": False}
        optimizer = variant.ours([param], rank, stochastic_rounding=rounding, **options)
        for _ in range(100):
            optimizer.zero_grad()
            backward([param], [torch.full_like(param, 0.5)])
            optimizer.step()
        outcomes.append(param.detach().clone())
    return outcomes


@pytest.mark.parametrize(("world_size", "value"), [(2, 40_000.0), (4, 30_000.0)])
@each_variant
def test_num_09_a_mean_is_finite_where_the_fp16_sum_is_not(
    ranks: RankPool, variant: Variant, world_size: int, value: float
) -> None:
    param, states, skipped = on_ranks(ranks, world_size, _num_09, variant, value)
    assert param.isfinite().all() and not skipped
    expected = torch.full((4096,), 0.1 * value)
    torch.testing.assert_close(states[0]["exp_avg"], expected, rtol=1e-3, atol=0)
    assert states[0]["step"] == 1


def _num_09(rank: Rank, variant: Variant, value: float) -> Any:
    param = torch.nn.Parameter(torch.ones(4096, dtype=FP16))
    optimizer = variant.ours([param], rank)
    scaler = fusedshard.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    backward([param], [torch.full_like(param, value)])
    scaler.step(optimizer)
    scaler.update()
    return param.detach().clone(), full(optimizer)[0], scaler.get_scale() < 1


@each_variant
def test_shp_12_several_dtypes_in_one_group(ranks: RankPool, variant: Variant) -> None:
    results = ranks.run(2, _shp_12, variant)
    for result in results[1:]:
        assert_same_bits(result, results[0])
    params, (states, masters) = results[0]
    twins = fp32_twins(_interleaved())
    reference = variant.torchs(twins, **HYPER)
    for step in range(5):
        for index, (twin, param) in enumerate(zip(twins, _interleaved(), strict=True)):
            both = [gradient(param, step, index, rank).to(twin.dtype) for rank in range(2)]
            twin.grad = (both[0] + both[1]) / 2
        reference.step()
    for index, (param, start, twin) in enumerate(zip(params, _interleaved(), twins, strict=True)):
        assert param.dtype == start.dtype
        precise = masters.get(index, param)
        torch.testing.assert_close(precise, twin.detach(), rtol=0, atol=1e-6)
        for name in ("exp_avg", "exp_avg_sq"):
            wanted = reference.state[twin][name]
            torch.testing.assert_close(states[index][name], wanted, rtol=0, atol=1e-6)
        if param.dtype == BF16:
            tie = precise.view(torch.int32) & 0xFFFF == 0x8000
            assert torch.equal(param[~tie], precise.to(BF16)[~tie])
            assert tie.float().mean() < 0.01


def _interleaved() -> list[torch.nn.Parameter]:
    kinds = itertools.cycle([(BF16, (17, 257)), (FP32, (257,)), (BF16, (8, 33)), (FP64, (33,))])
    generator = torch.Generator().manual_seed(3)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for dtype, shape in itertools.islice(kinds, 6)
    ]


def _shp_12(rank: Rank, variant: Variant) -> Any:
    params = _interleaved()
    optimizer = variant.ours(params, rank, **HYPER)
    for step in range(5):
        optimizer.zero_grad()
        own = [gradient(p, step, index, rank.rank) for index, p in enumerate(params)]
        backward(params, own)
        optimizer.step()
    return [p.detach().clone() for p in params], full(optimizer)


@each_variant
@each_world_size
def test_clp_04_a_norm_that_fp16_cannot_hold(
    ranks: RankPool, world_size: int, variant: Variant
) -> None:
    norm, states = on_ranks(ranks, world_size, _clp_04, variant)
    assert norm.dtype == FP32
    assert norm.item() == pytest.approx(128_000, rel=1e-3)
    expected = torch.full((4096,), 0.1 * 2000 / 128_000)
    torch.testing.assert_close(states[0]["exp_avg"], expected, rtol=1e-3, atol=0)


def _clp_04(rank: Rank | None, variant: Variant) -> Any:
    param = torch.nn.Parameter(torch.ones(4096, dtype=FP16))
    optimizer = variant.ours([param], rank)
    backward([param], [torch.full_like(param, 2000.0)])
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    return norm, full(optimizer)[0]


@pytest.mark.parametrize("state_dtype", STATES, ids=["fp32", "bf16", "codes"])
@each_variant
def test_ckp_04_fp32_state_of_16_bit_weights_survives(
    ranks: RankPool, variant: Variant, state_dtype: torch.dtype
) -> None:
    for saved, loaded, went_on, resumed in ranks.run(2, _ckp_04, variant, state_dtype):
        assert_same_bits(loaded, saved)
        assert_same_bits(resumed, went_on)
        states, masters = saved
        arrays = [state[name] for state in states.values() for name in ("exp_avg", "exp_avg_sq")]
        assert len(arrays) == 6 and len(masters) == 3
        assert {array.dtype for array in (*arrays, *masters.values())} == {FP32}
        # Otherwise a loader that cast them would pass.
        assert any(not torch.equal(m, m.to(BF16).to(FP32)) for m in masters.values())


def _ckp_04(rank: Rank, variant: Variant, state_dtype: torch.dtype) -> Any:
    shapes = [((70, 130), BF16), ((17, 257), FP16), ((5,), BF16)]
    params = [torch.nn.Parameter(torch.ones(s).to(dtype)) for s, dtype in shapes]
    optimizer = variant.ours(params, rank, state_dtype=state_dtype, **HYPER)

    def steps(optimizer: Any, params: Any, which: range) -> Any:
        for step in which:
            optimizer.zero_grad()
            backward(params, [gradient(p, step, i, rank.rank) for i, p in enumerate(params)])
            optimizer.step()
        return [p.detach().clone() for p in params], full(optimizer)

    saved = steps(optimizer, params, range(5))[1]
    state_dict = optimizer.full_state_dict()
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    twin = variant.ours(twins, rank, state_dtype=state_dtype, **HYPER)
    twin.load_state_dict(state_dict)
    loaded = full(twin)
    later = range(5, 8)
    return saved, loaded, steps(optimizer, params, later), steps(twin, twins, later)


SCALERS = {"ours": fusedshard.GradScaler, "torch's": torch.amp.GradScaler}


@pytest.mark.parametrize("unscale", [False, True], ids=["in the step", "unscale_"])
@pytest.mark.parametrize("kind", SCALERS)
@each_variant
def test_scl_05_fp16_weights_with_a_scaler(
    ranks: RankPool, variant: Variant, kind: str, unscale: bool
) -> None:
    """Ten steps, one of them with an infinite gradient on every rank, beside torch on fp32 masters
    and the means of the true gradients."""
    if kind == "torch's" and unscale:
        for message in ranks.run(2, _torchs_unscale, variant):
            assert "unscale FP16 gradients" in message
        return
    results = ranks.run(2, _scl_05, variant, kind, unscale)
    for result in results[1:]:
        assert_same_bits(result, results[0])
    (states, masters), scale = results[0]
    twin = torch.nn.Parameter(torch.ones(17, 257))
    reference = variant.torchs([twin], **HYPER)
    for step in range(10):
        if step != 4:
            both = [_scaled(step, rank, 1024.0 if step < 4 else 512.0) for rank in range(2)]
            twin.grad = (both[0].float() + both[1].float()) / 2
            twin.grad /= 1024.0 if step < 4 else 512.0
            reference.step()
    assert scale == 512.0 and states[0]["step"] == 9
    torch.testing.assert_close(masters[0], twin.detach(), rtol=0, atol=1e-6)
    wanted = reference.state[twin]["exp_avg"]
    torch.testing.assert_close(states[0]["exp_avg"], wanted, rtol=0, atol=1e-6)


def _scaled(step: int, rank: int, scale: float) -> torch.Tensor:
    own = gradient(torch.empty(17, 257), step, 0, rank) * scale
    return (own if step != 4 else own * float("inf")).to(FP16)


def _scl_05(rank: Rank, variant: Variant, kind: str, unscale: bool) -> Any:
    param = torch.nn.Parameter(torch.ones(17, 257, dtype=FP16))
    optimizer = variant.ours([param], rank, **HYPER)
    scaler = SCALERS[kind]("cpu", init_scale=1024.0, growth_interval=1000)
    scaler.scale(torch.ones(()))
    for step in range(10):
        optimizer.zero_grad()
        backward([param], [_scaled(step, rank.rank, scaler.get_scale())])
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return full(optimizer), scaler.get_scale()


def _torchs_unscale(rank: Rank, variant: Variant) -> str:
    param = torch.nn.Parameter(torch.ones(5, dtype=FP16))
    optimizer = variant.ours([param], rank)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    backward([param], [torch.ones_like(param)])
    with pytest.raises(ValueError) as error:
        scaler.unscale_(optimizer)
    return str(error.value)


@narrow
@pytest.mark.parametrize("state_dtype", STATES, ids=["fp32", "bf16", "codes"])
def test_an_infinite_gradient_of_one_rank_skips_the_step_on_all(
    ranks: RankPool, state_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    for before, after, scale in ranks.run(3, _one_infinite, state_dtype, dtype):
        assert_same_bits(after, before)
        assert scale == 32.0


def _one_infinite(rank: Rank, state_dtype: torch.dtype, dtype: torch.dtype) -> Any:
    param = torch.nn.Parameter(torch.ones(70, 130, dtype=dtype))
    optimizer = fusedshard.AdamW([param], process_group=rank.group, state_dtype=state_dtype)
    scaler = fusedshard.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    outcomes = []
    for value in (1.0, float("inf") if rank.rank == 1 else 1.0):
        optimizer.zero_grad()
        backward([param], [torch.full_like(param, value)])
        scaler.step(optimizer)
        scaler.update()
        outcomes.append((param.detach().clone(), full(optimizer)))
    return *outcomes, scaler.get_scale()


def test_bf16_without_a_scaler_is_divided_by_nothing(ranks: RankPool) -> None:
    states = on_ranks(ranks, 2, _plain_bf16)
    assert states[0]["exp_avg"].tolist() == [pytest.approx(0.05)] * 4100


def _plain_bf16(rank: Rank) -> Any:
    param = torch.nn.Parameter(torch.ones(4100, dtype=BF16))
    optimizer = fusedshard.AdamW([param], process_group=rank.group)
    backward([param], [torch.full_like(param, 0.5)])
    optimizer.step()
    return full(optimizer)[0]


def test_8_bit_moments_of_large_parameters_alone() -> None:
    """Below 4096 elements codes and their blocks would save nothing worth the error."""
    shapes = [(4096,), (4095,), (64, 64)]
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    double = torch.nn.Parameter(torch.ones(5000, dtype=FP64))
    optimizer = fusedshard.AdamW([*params, double], state_dtype=CODED)
    for param in (*params, double):
        param.grad = torch.ones_like(param)
    optimizer.step()
    dtypes = [optimizer.state[p]["exp_avg_sq"].dtype for p in (*params, double)]
    assert dtypes == [CODED, FP32, CODED, FP64]
