"""Both modes against torch.optim, and against each other to the bit, on 1 to 4 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Rank, RankPool
from training import (
    AWKWARD,
    assert_close,
    assert_same_bits,
    make_params,
    train_ours,
    train_reference,
)

import fusedshard

# About 10 KiB: several buckets even for small parameters, on few ranks.
TINY_BUCKETS = 0.01


@pytest.mark.parametrize(
    ("world_size", "kind"), [(1, "Adam"), (2, "Adam"), (2, "AdamW"), (3, "Adam"), (4, "AdamW")]
)
@pytest.mark.parametrize("eps", [1.0, 1e-8])
def test_sharded_equals_replicated_and_torch(
    ranks: RankPool, world_size: int, eps: float, kind: str
) -> None:
    # The last two outgrow a bucket. With eps=1e-8 the smallest of 100,000 second moments turn a
    # rounding into 1e-6: torch's own fused and foreach differ by as much there.
    shapes = [*AWKWARD, (300, 301), (257, 511)] if eps == 1.0 else AWKWARD
    hyper: dict[str, Any] = {"lr": 1e-2, "eps": eps, "weight_decay": 0.1}
    sharded = ranks.run(world_size, _train, kind, shapes, hyper, "sharded")
    replicated = ranks.run(world_size, _train, kind, shapes, hyper, "replicated")
    for rank in range(world_size):
        assert_same_bits(sharded[rank], sharded[0], f"sharded rank {rank}")
        assert_same_bits(replicated[rank], sharded[0], f"replicated rank {rank}")
    assert_close(sharded[0], train_reference(world_size, kind, shapes, 50, **hyper))


def _train(rank: Rank, kind: str, shapes: Any, hyper: dict[str, Any], mode: str) -> Any:
    return train_ours(
        rank, kind, shapes, 50, mode=mode, reduction="ordered", bucket_cap_mb=TINY_BUCKETS, **hyper
    )


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
@pytest.mark.parametrize(
    "options",
    [
        {"amsgrad": True},
        {"maximize": True, "weight_decay": 0.1},
        {"betas": (0.0, 0.9)},
        {"betas": (0.9, 0.0), "eps": 0.1},
        {"lr": torch.tensor(0.05, dtype=torch.float64)},
    ],
    ids=["amsgrad", "maximize", "beta1=0", "beta2=0", "tensor-lr"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_options(ranks: RankPool, mode: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    options = {"lr": 1e-2, **options}
    results = ranks.run(3, _train_options, dtype, mode, options)
    for result in results:
        assert_same_bits(result, results[0])
    reference = train_reference(3, "AdamW", AWKWARD, 10, dtype, **options)
    assert_close(results[0], reference, 1e-6 if dtype == torch.float32 else 1e-12)


def _train_options(rank: Rank, dtype: torch.dtype, mode: str, options: dict[str, Any]) -> Any:
    return train_ours(rank, "AdamW", AWKWARD, 10, dtype, mode=mode, **options)


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_backend_reduction_equals_torch(ranks: RankPool, mode: str, world_size: int) -> None:
    results = ranks.run(world_size, _train_backend, mode)
    for result in results:
        assert_same_bits(result, results[0])
    assert_close(results[0], train_reference(world_size, "Adam", AWKWARD, 20, eps=1.0, lr=0.1))


def _train_backend(rank: Rank, mode: str) -> Any:
    return train_ours(rank, "Adam", AWKWARD, 20, mode=mode, reduction="backend", eps=1.0, lr=0.1)


def test_ordered_result_does_not_depend_on_the_bucket_size(ranks: RankPool) -> None:
    shapes = [*AWKWARD, (300, 301)]
    results = [ranks.run(4, _train_bucket, shapes, cap)[0] for cap in (TINY_BUCKETS, 25)]
    assert_same_bits(results[0], results[1])


def _train_bucket(rank: Rank, shapes: Any, cap: float) -> Any:
    return train_ours(rank, "AdamW", shapes, 5, bucket_cap_mb=cap)


def test_amsgrad_switched_on_just_before_saving(ranks: RankPool) -> None:
    """The third moment that no step has made yet has the whole parameter's shape, as the others."""
    for state in ranks.run(2, _amsgrad_before_saving):
        assert_same_bits(state["max_exp_avg_sq"], torch.zeros(9, 40))


def _amsgrad_before_saving(rank: Rank) -> Any:
    (param,) = make_params([(9, 40)])
    optimizer = fusedshard.Adam([param], process_group=rank.group)
    param.grad = torch.ones(9, 40)
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    return optimizer.full_state_dict()["state"][0]
