"""Clipping beside torch's clip of the mean gradients, on ranks and without them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import Rank, RankPool
from sides import HYPER, Side, check_against_torch
from torch.nn.parallel import DistributedDataParallel
from training import (
    AWKWARD,
    GRAD_SYNCS,
    Factor,
    Shapes,
    Variant,
    backward,
    each_external_variant,
    each_variant,
    each_variant_on,
    variants,
)

SHAPES = (*AWKWARD, (5_000,))


def clip_and_train(
    side: Side, shapes: Shapes, clips: list[dict[str, Any]], dtype: torch.dtype, options: Any
) -> list[Any]:
    """A step for each of ``clips``."""
    params, norms, outcomes = side.params(shapes, dtype), [], []
    optimizer = side.build(params, **HYPER, **options)
    for step, clip in enumerate(clips):
        optimizer.zero_grad()
        side.backward(params, step)
        norms.append(side.clip(optimizer, params, **clip))
        optimizer.step()
        outcomes.append(side.outcome(optimizer))
    return [torch.stack(norms).double(), *outcomes]


def check_like_torch(
    ranks: RankPool,
    world_size: int,
    variant: Variant,
    shapes: Shapes,
    clips: list[dict[str, Any]],
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> None:
    args = (shapes, clips, dtype, options)
    check_against_torch(ranks, world_size, variant, clip_and_train, *args)


# Far below the norm and far above it.
EVERY_CLIP = [
    {"max_norm": max_norm, "norm_type": norm_type}
    for norm_type in (1, 2, 3.0, math.inf)
    for max_norm in (0.5, 1e6)
]


@each_variant_on(2, 1, 3, 4)
def test_clp_01_the_norm_of_the_whole(ranks: RankPool, world_size: int, variant: Variant) -> None:
    check_like_torch(ranks, world_size, variant, SHAPES, EVERY_CLIP)


@each_variant
@pytest.mark.parametrize("reduction", ["ordered", "backend"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_clp_01_reductions_and_dtypes(
    ranks: RankPool, variant: Variant, reduction: str, dtype: torch.dtype
) -> None:
    """The backend leaves sums, of which the norm is the mean's all the same; several buckets."""
    shapes, clips = (*SHAPES, (70_000,)), [{"max_norm": 1.0}] * 3
    options: dict[str, Any] = {"reduction": reduction, "bucket_cap_mb": 0.05}
    check_like_torch(ranks, 3, variant, shapes, clips, dtype, **options)


@each_external_variant
@pytest.mark.parametrize("world_size", [2, 4])
def test_clp_02_averaged_gradients_are_counted_once(
    ranks: RankPool, world_size: int, variant: Variant
) -> None:
    check_like_torch(ranks, world_size, variant, SHAPES, [{"max_norm": 1.0}] * 3)
    check_norm(ranks, world_size, variant)


@each_variant_on(2, 4)
def test_clp_02_replicated_gradients_are_counted_once(
    ranks: RankPool, world_size: int, variant: Variant
) -> None:
    check_norm(ranks, world_size, variant)


def check_norm(ranks: RankPool, world_size: int, variant: Variant) -> None:
    """Of 0.8, with nothing to clip, seen twice."""
    for norms, exp_avg in ranks.run(world_size, _norm_of_averaged, variant):
        assert norms == pytest.approx([0.8, 0.8], rel=1e-6)
        assert exp_avg == pytest.approx([0.04] * 4, rel=1e-6)


def _norm_of_averaged(rank: Rank, variant: Variant) -> tuple[list[float], list[float]]:
    model = Factor(4)
    forward: Any = model
    if variant.grad_sync == "external":
        forward = DistributedDataParallel(model, process_group=rank.group)
    optimizer = variant.ours(model.parameters(), rank)
    forward((0.3 + 0.2 * rank.rank) - 0.1 * (rank.world_size - 2)).backward()  # mean 0.4
    norms = [optimizer.clip_grad_norm_(1.0).item() for _ in range(2)]
    optimizer.step()
    return norms, optimizer.full_state_dict()["state"][0]["exp_avg"].tolist()


@pytest.mark.parametrize("chosen", [[0], [2, 5], []], ids=str)
@pytest.mark.parametrize("variant", variants([*GRAD_SYNCS, "external"]), ids="-".join)
def test_a_subset_is_counted_and_scaled_alone(
    ranks: RankPool, variant: Variant, chosen: list[int]
) -> None:
    clips = [{"max_norm": 0.1, "chosen": chosen}] * 3
    check_like_torch(ranks, 2, variant, SHAPES, clips)


@each_variant_on(2, 1, 3)
def test_clp_03_an_infinite_norm(ranks: RankPool, world_size: int, variant: Variant) -> None:
    """As torch: finite gradients become 0, the infinite one NaN; or an error, and nothing."""
    for message, moments, unchanged in ranks.run(world_size, _infinite_norm, variant):
        assert "norm of order 2.0 for gradients is inf" in message
        assert unchanged
        assert moments[:2] == [0.0, 0.0] and math.isnan(moments[2])


def _infinite_norm(rank: Rank, variant: Variant) -> tuple[str, list[float], bool]:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = variant.ours([param], rank, weight_decay=0.0)
    last = rank.rank == rank.world_size - 1
    backward([param], [torch.tensor([1.0, 2.0, math.inf if last else 3.0])])
    with pytest.raises(RuntimeError) as error:
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert param.grad is not None
    seen_inf = last or variant.mode == "replicated"
    third = math.inf if seen_inf else 3.0
    unchanged = bool((param == 1).all()) and param.grad.tolist() == [1.0, 2.0, third]
    unchanged = unchanged and not optimizer.state
    assert optimizer.clip_grad_norm_(1.0).item() == math.inf
    optimizer.step()
    moments = optimizer.full_state_dict()["state"][0]["exp_avg"].tolist()
    return str(error.value), moments, unchanged


@each_variant
def test_clp_05_padding_never_enters_the_norm(ranks: RankPool, variant: Variant) -> None:
    """Of 5 and 1 elements on 3 ranks, twice, after memory full of NaN was freed."""
    norms, *_ = check_against_torch(ranks, 3, variant, _padded)
    assert norms.tolist() == pytest.approx([math.sqrt(6.0)] * 2, rel=1e-6)


def _padded(side: Side) -> list[Any]:
    torch.use_deterministic_algorithms(True)
    try:
        del [torch.full((1 << 20,), math.nan) for _ in range(4)][:]
        params, norms = side.params([(5,), (1,)]), []
        optimizer = side.build(params, **HYPER)
        for _ in range(2):
            optimizer.zero_grad()
            backward(params, [torch.full_like(p, side.own([0.0, 1.0, 2.0])) for p in params])
            norms.append(side.clip(optimizer, params, 1.0))
            optimizer.step()
        return [torch.stack(norms).double(), side.outcome(optimizer)]
    finally:
        torch.use_deterministic_algorithms(False)


@each_variant
def test_a_norm_of_huge_gradients_is_finite(ranks: RankPool, variant: Variant) -> None:
    """Whose squares are not, in fp32."""
    for norm, moments in ranks.run(2, _huge, variant):
        assert norm == pytest.approx(2e20 * math.sqrt(1000), rel=1e-6)
        assert moments == pytest.approx([0.1 / math.sqrt(1000)] * 1000, rel=1e-5)


def _huge(rank: Rank, variant: Variant) -> tuple[float, list[float]]:
    param = torch.nn.Parameter(torch.zeros(1000))
    optimizer = variant.ours([param], rank)
    backward([param], [torch.full((1000,), 1e20 if rank.rank else 3e20)])
    norm = optimizer.clip_grad_norm_(1.0).item()
    optimizer.step()
    return norm, optimizer.full_state_dict()["state"][0]["exp_avg"].tolist()
