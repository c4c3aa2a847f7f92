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
    gradient,
    make_params,
    mean_gradient,
    train_ours,
    train_reference,
)

import fusedshard

# About 10 KiB: several buckets even for small parameters, on few ranks.
TINY_BUCKETS = 0.01


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("eps", [1.0, 1e-8])
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
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


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_num_10_mean_is_taken_once(ranks: RankPool, mode: str) -> None:
    for values in ranks.run(3, _num_10, mode):
        assert values == pytest.approx((-0.75, 0.3), abs=1e-6)


def _num_10(rank: Rank, mode: str) -> tuple[float, float]:
    param = torch.nn.Parameter(torch.zeros(1))
    options: dict[str, Any] = {"lr": 1.0, "eps": 1.0, "mode": mode, "process_group": rank.group}
    optimizer = fusedshard.Adam([param], **options)
    param.grad = torch.tensor([[1.0], [2.0], [6.0]][rank.rank])
    optimizer.step()
    state = optimizer.full_state_dict()["state"][0]
    return param.item(), state["exp_avg"].item()


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_shp_03_more_ranks_than_elements(
    ranks: RankPool, mode: str, shape: tuple[int, ...]
) -> None:
    results = ranks.run(4, _shp_03, mode, shape)
    for result in results:
        assert_same_bits(result, results[0])
    assert_close(results[0], train_reference(4, "AdamW", [shape], 5, eps=1.0))


def _shp_03(rank: Rank, mode: str, shape: tuple[int, ...]) -> Any:
    params = make_params([shape])
    optimizer = fusedshard.AdamW(params, eps=1.0, mode=mode, process_group=rank.group)
    for step in range(5):
        if step == 3:  # save and load
            state = optimizer.full_state_dict()
            params = [torch.nn.Parameter(p.detach().clone()) for p in params]
            optimizer = fusedshard.AdamW(params, eps=1.0, mode=mode, process_group=rank.group)
            optimizer.load_state_dict(state)
        params[0].grad = gradient(params[0], step, 0, rank.rank)
        optimizer.step()
    return [p.detach().clone() for p in params], optimizer.full_state_dict()


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_shp_04_and_05_groups_keep_their_own_values(ranks: RankPool, mode: str) -> None:
    results = ranks.run(3, _groups, mode)
    for result in results:
        assert_same_bits(result, results[0])
    params = make_params(_GROUP_SHAPES)
    optimizer = torch.optim.AdamW(_param_groups(params))
    for step in range(5):
        for index, param in enumerate(params):
            param.grad = mean_gradient(param, step, index, 3)
        optimizer.step()
        optimizer.param_groups[1]["lr"] *= 0.5
        optimizer.param_groups[0]["weight_decay"] = 0.3
    assert_close(results[0], ([p.detach() for p in params], optimizer.state_dict()))


_GROUP_SHAPES = [(5,), (7,), (1,), (13,), (1,), (1,)]


def _param_groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": params[::2], "lr": 0.1, "weight_decay": 0.0, "eps": 1.0},
        {"params": params[1::2], "lr": 0.01, "weight_decay": 0.5, "betas": (0.8, 0.9)},
    ]


def _groups(rank: Rank, mode: str) -> Any:
    params = make_params(_GROUP_SHAPES)
    optimizer = fusedshard.AdamW(_param_groups(params), mode=mode, process_group=rank.group)
    for step in range(5):
        for index, param in enumerate(params):
            param.grad = gradient(param, step, index, rank.rank)
        optimizer.step()
        optimizer.param_groups[1]["lr"] *= 0.5
        optimizer.param_groups[0]["weight_decay"] = 0.3
    return [p.detach().clone() for p in params], optimizer.full_state_dict()


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_shp_06_strides_are_kept_and_followed_by_index(ranks: RankPool, mode: str) -> None:
    for params, state, strides in ranks.run(2, _shp_06, mode):
        assert strides == [(12, 1, 6, 3), (1, 5), (12, 4, 2, 1)]
        reference = [torch.nn.Parameter(p.clone().contiguous()) for p in _strided()]
        optimizer = torch.optim.AdamW(reference, lr=0.1, eps=1.0)
        for param in reference:
            param.grad = 1.5 * torch.arange(param.numel()).view(param.shape)
        optimizer.step()
        for index, param in enumerate(reference):
            torch.testing.assert_close(params[index], param.detach(), rtol=0, atol=1e-6)
            expected = optimizer.state[param]["exp_avg"]
            torch.testing.assert_close(state[index]["exp_avg"], expected, rtol=0, atol=1e-6)


def _strided() -> list[torch.Tensor]:
    image = torch.arange(48.0).view(4, 3, 2, 2)
    return [
        image.to(memory_format=torch.channels_last),
        torch.arange(15.0).view(3, 5).t(),
        image.clone(),
    ]


def _shp_06(rank: Rank, mode: str) -> Any:
    params = [torch.nn.Parameter(p) for p in _strided()]
    options: dict[str, Any] = {"lr": 0.1, "eps": 1.0, "mode": mode, "process_group": rank.group}
    optimizer = fusedshard.AdamW(params, **options)
    for index, param in enumerate(params):
        grad = (rank.rank + 1.0) * torch.arange(param.numel()).view(param.shape)
        if index == 2:  # a gradient of other strides than its parameter
            grad = grad.to(memory_format=torch.channels_last)
        param.grad = grad
    optimizer.step()
    state = optimizer.full_state_dict()["state"]
    return [p.detach().contiguous() for p in params], state, [p.stride() for p in params]


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_dst_06_nan_on_one_rank_stays_in_its_element(ranks: RankPool, mode: str) -> None:
    results = ranks.run(2, _dst_06, mode)
    assert torch.equal(results[0].isnan(), results[1].isnan())
    assert results[0].isnan().nonzero().flatten().tolist() == [2]
    assert torch.equal(results[0].nan_to_num(), results[1].nan_to_num())


def _dst_06(rank: Rank, mode: str) -> torch.Tensor:
    (param,) = make_params([(5,)])
    optimizer = fusedshard.AdamW([param], mode=mode, process_group=rank.group)
    for step in range(2):
        param.grad = gradient(param, step, 0, rank.rank)
        if step == 0 and rank.rank == 1:
            param.grad[2] = torch.nan
        optimizer.step()
    return param.detach().clone()


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
