"""Ranks that start apart, end backward in another order, form groups of their own, or are alone."""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, RankPool
from sides import HYPER, Side, check_against_torch, compare, on_rank
from torch._C import _distributed_c10d as distributed_c10d
from training import (
    AWKWARD,
    Shapes,
    Variant,
    assert_same_bits,
    backward,
    each_variant,
    each_variant_on,
    make_params,
    variants_on,
)


def train(side: Side, shapes: Shapes, steps: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    """With clipping: the norms and the outcome."""
    params, norms = side.params(shapes, dtype), []
    optimizer = side.build(params, **HYPER)
    for step in range(steps):
        optimizer.zero_grad()
        side.backward(params, step)
        norms.append(side.clip(optimizer, params, 1.0))
        optimizer.step()
    return [side.outcome(optimizer), torch.stack(norms).double()]


@each_variant_on(2, 3)
def test_dst_01_all_ranks_start_from_the_first_ranks_weights(
    ranks: RankPool, world_size: int, variant: Variant
) -> None:
    check_against_torch(ranks, world_size, variant, train, [(5, 7), (3,)], 1)
    check_against_torch(ranks, world_size, variant, _dst_01_one_element)


def _dst_01_one_element(side: Side) -> list[Any]:
    params = make_params([(5, 7), (3,)])
    if side.number == 1:
        params[0].data[4, 6] += 1.0
    optimizer = side.build(params, **HYPER)
    side.backward(params, 0)
    optimizer.step()
    return [side.outcome(optimizer)]


class Branches(torch.nn.Module):
    """Two of different sizes, that have nothing in common."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Sequential(
            torch.nn.Linear(3, 17), torch.nn.Tanh(), torch.nn.Linear(17, 1)
        )
        self.b = torch.nn.Linear(5, 2)


def _branch_loss(branch: torch.nn.Module, width: int, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(97 * step + rank)
    loss: torch.Tensor = branch(torch.randn(4, width, generator=generator)).square().mean()
    return loss


@each_variant_on(2, 3)
def test_dst_05_backward_ends_in_another_order_on_each_rank(
    ranks: RankPool, world_size: int, variant: Variant
) -> None:
    check_against_torch(ranks, world_size, variant, _dst_05)


def _dst_05(side: Side) -> list[Any]:
    model, outcomes = Branches(), []
    optimizer = side.build(model.parameters(), **HYPER)
    losses = [partial(_branch_loss, model.a, 3), partial(_branch_loss, model.b, 5)]
    for step in range(10):
        optimizer.zero_grad()
        for loss in losses if side.number % 2 == 0 else losses[::-1]:
            side.descend(partial(loss, step))
        optimizer.step()
        outcomes.append(side.outcome(optimizer))
    return outcomes


@each_variant
def test_dst_06_nan_on_one_rank_stays_in_its_element(ranks: RankPool, variant: Variant) -> None:
    (nan, clean), *_ = check_against_torch(ranks, 2, variant, _dst_06)
    assert nan[0].nonzero().flatten().tolist() == clean[0].nonzero().flatten().tolist() == [2]


def _dst_06(side: Side) -> list[Any]:
    """After a step with a NaN and after a clean one: where NaN is, and what the others are."""
    (param,) = side.params([(5,)])
    optimizer = side.build([param], **HYPER)
    masks, outcomes = [], []
    for step in range(2):
        optimizer.zero_grad()
        grad = side.gradient(param, step, 0)
        if step == 0 and (side.number == 1 or not side.ours):
            grad[2] = torch.nan
        backward([param], [grad])
        optimizer.step()
        (value,), state = side.outcome(optimizer)
        masks.append([value.isnan()])
        moments = {name: t.nan_to_num() for name, t in state["state"][0].items()}
        assert moments["exp_avg"][2] == 0.0
        outcomes.append(([value.nan_to_num()], {**state, "state": {0: moments}}))
    return [masks, *outcomes]


@each_variant
def test_dst_08_groups_without_global_rank_0(ranks: RankPool, variant: Variant) -> None:
    """Ranks 0 and 2 train another model, and for more steps, than ranks 1 and 3."""
    results = ranks.run(4, _dst_08, variant)
    for first in (0, 1):
        assert_same_bits(results[first + 2], results[first])
        reference = Side(variant, 2, None, ours=False)
        compare(results[first], _dst_08_job(reference, first))


def _dst_08(rank: Rank, variant: Variant) -> list[Any]:
    groups = [dist.new_group(members) for members in ([0, 2], [1, 3])]
    inner = Rank(rank.rank // 2, 2, groups[rank.rank % 2])
    return _dst_08_job(Side(variant, 2, inner, ours=True), rank.rank % 2)


def _dst_08_job(side: Side, which: int) -> list[Any]:
    return save_and_load(side, [[(5,), (7, 3)], [(11,), (2, 2), (1,)]][which], [3, 5][which])


def save_and_load(side: Side, shapes: Shapes, steps: int) -> list[Any]:
    """Clipped steps, a save, a load, and two steps more."""
    params, norms = side.params(shapes), []
    optimizer = side.build(params, **HYPER)
    for step in range(steps + 2):
        if step == steps:
            state = side.full_state(optimizer)
            params = [torch.nn.Parameter(p.detach().clone()) for p in params]
            optimizer = side.build(params, **HYPER)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        side.backward(params, step)
        norms.append(side.clip(optimizer, params, 1.0))
        optimizer.step()
    if side.ours and side.world_size == 1:
        assert optimizer.stats.calls == {}
    return [side.outcome(optimizer), torch.stack(norms).double()]


ALONE: Shapes = [(17, 257), (5,), (), (0,)]


@each_variant
def test_dst_09_without_torch_distributed_it_is_a_plain_optimizer(
    ranks: RankPool, variant: Variant
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_against_torch(ranks, 1, variant, save_and_load, ALONE, 10)
    assert caught == []


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@each_variant
@pytest.mark.usefixtures("world_of_one")
def test_dst_09_a_world_of_one(ranks: RankPool, variant: Variant) -> None:
    check_against_torch(ranks, 1, variant, save_and_load, ALONE, 10)


@each_variant
def test_dst_09_a_group_of_one(ranks: RankPool, variant: Variant) -> None:
    (ours,) = ranks.run(1, on_rank, variant, save_and_load, ALONE, 10)
    compare(ours, save_and_load(Side(variant, 1, None, ours=False), ALONE, 10))


@each_variant
def test_dst_12_all_ranks_hold_the_same_bits_at_once(ranks: RankPool, variant: Variant) -> None:
    """Hash, output and file of the model, taken after each step before any rank waits."""
    results = ranks.run(3, _dst_12, variant)
    for seen, outcome in results:
        assert len(seen) == 20 and len(set(seen)) == 20
        assert seen == results[0][0]
        assert_same_bits(outcome, results[0][1])
    _, wanted = _dst_12_job(Side(variant, 3, None, ours=False))
    compare(results[0][1], wanted)


def _dst_12(rank: Rank, variant: Variant) -> Any:
    return _dst_12_job(Side(variant, rank.world_size, rank, ours=True))


def _dst_12_job(side: Side) -> tuple[list[tuple[str, str, str]], list[Any]]:
    model, seen = Branches(), []
    optimizer = side.build(model.parameters(), **HYPER)
    for step in range(20):
        optimizer.zero_grad()
        side.descend(partial(_branch_loss, model.a, 3, step))
        side.descend(partial(_branch_loss, model.b, 5, step))
        optimizer.step()
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        with torch.no_grad():
            output = model.a(torch.ones(1, 3)).numpy().tobytes() + model.b.bias.numpy().tobytes()
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        hashes = [hashlib.sha256(data).hexdigest() for data in (weights, output, file.getvalue())]
        seen.append((hashes[0], hashes[1], hashes[2]))
    return seen, [side.outcome(optimizer)]


@pytest.fixture(scope="module")
def debugged_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Fresh ranks whose torch.distributed checks and logs all it can."""
    pool = RankPool(tmp_path_factory.mktemp("debugged"), fresh=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
        pool.run(1, _check_debug_level)
    yield pool
    pool.stop()


def _check_debug_level(rank: Rank) -> None:
    assert distributed_c10d.get_debug_level() == distributed_c10d.DebugLevel.DETAIL


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_dst_13_under_debug(debugged_ranks: RankPool, variant: Variant, dtype: torch.dtype) -> None:
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    args = (AWKWARD, 5, dtype)
    check_against_torch(debugged_ranks, 2, variant, train, *args, tolerance=tolerance)


@pytest.fixture(scope="module")
def launches(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What two sets of processes give, by world size and variant; the second are fresh."""
    fresh = RankPool(tmp_path_factory.mktemp("launch"), fresh=True)
    try:
        return [
            {
                (world_size, variant): pool.run(world_size, on_rank, variant, _deterministic)
                for world_size, variant in variants_on(2, 4)
            }
            for pool in (ranks, fresh)
        ]
    finally:
        fresh.stop()


def _deterministic(side: Side) -> list[Any]:
    torch.use_deterministic_algorithms(True)
    try:
        return train(side, [*AWKWARD, (300, 301)], 20)
    finally:
        torch.use_deterministic_algorithms(False)


@each_variant_on(2, 4)
def test_cmp_03_deterministic_mode(
    launches: list[dict[Any, Any]], world_size: int, variant: Variant
) -> None:
    """Weights, moments and norms have the same bits in both launches."""
    first, second = (launch[world_size, variant] for launch in launches)
    assert_same_bits(first, second)
    for result in first:
        assert_same_bits(result, first[0])
    compare(first[0], _deterministic(Side(variant, world_size, None, ours=False)))
