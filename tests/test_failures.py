"""A rank that fails: the others hear of it, and keep what they had."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import MAX_RANKS, Rank, RankPool, RanksFailed
from sides import HYPER, Side, check_against_torch
from training import (
    Variant,
    assert_same_bits,
    backward,
    each_variant,
    each_variant_on,
    gradient,
    make_params,
    train,
)

SHAPES = [(17, 257), (5,)]


def impatient(rank: Rank, world_size: int) -> Rank | None:
    """The first ranks in a group whose collectives give up after a few seconds; None on others.
    Called by all of the pool, since every rank has to count a new group."""
    timeout = datetime.timedelta(seconds=3)
    group = dist.new_group(list(range(world_size)), timeout=timeout)
    return Rank(rank.rank, world_size, group) if rank.rank < world_size else None


@each_variant_on(2, 3)
def test_dst_07_a_closure_that_raises_on_one_rank(
    ranks: RankPool, world_size: int, variant: Variant
) -> None:
    results = ranks.run(MAX_RANKS, _raise_early, world_size, variant, "closure")
    for rank, (text, before, after) in enumerate(results[:world_size]):
        assert text == ("mine" if rank == 1 else "on rank 1: mine")
        assert_same_bits(before, after)


@each_variant
def test_dst_07_a_pre_hook_that_raises_on_one_rank(ranks: RankPool, variant: Variant) -> None:
    """Of which the others hear nothing: they give up waiting."""
    world_size = 2 if variant.kind == "Adam" else 3
    results = ranks.run(MAX_RANKS, _raise_early, world_size, variant, "pre-hook")
    for rank, (text, before, after) in enumerate(results[:world_size]):
        assert ("mine" in text) == (rank == 1)
        assert_same_bits(before, after)


def _raise_early(everyone: Rank, world_size: int, variant: Variant, where: str) -> Any:
    rank = impatient(everyone, world_size)
    if rank is None:
        return None
    params = make_params(SHAPES)
    optimizer = variant.ours(params, rank)
    train(optimizer, params, range(1), lambda p, t, i: gradient(p, t, i, rank.rank))
    before = [p.detach().clone() for p in params], _local_state(optimizer)

    def fail(*_: Any) -> None:
        if rank.rank == 1:
            raise ValueError("mine")

    if where == "pre-hook":
        optimizer.register_step_pre_hook(fail)
    optimizer.zero_grad()
    backward(params, [gradient(p, 1, i, rank.rank) for i, p in enumerate(params)])
    start = time.monotonic()
    with pytest.raises((RuntimeError, ValueError)) as caught:
        optimizer.step(fail if where == "closure" else None)
    assert time.monotonic() - start < 30
    return (
        str(caught.value),
        before,
        ([p.detach().clone() for p in params], _local_state(optimizer)),
    )


def _local_state(optimizer: torch.optim.Optimizer) -> Any:
    return [{name: v.clone() for name, v in state.items()} for state in optimizer.state.values()]


@pytest.mark.parametrize(
    ("when", "variant"),
    [
        ("in backward", Variant("AdamW", "sharded", "backward")),
        ("in backward", Variant("Adam", "replicated", "step")),
        ("after backward", Variant("AdamW", "replicated", "backward")),
        ("after backward", Variant("Adam", "sharded", "step")),
    ],
)
def test_dst_10_a_rank_dies(ranks: RankPool, tmp_path: Path, when: str, variant: Variant) -> None:
    """And training goes on, on two ranks, from what was saved before."""
    file = tmp_path / "checkpoint.pt"
    pool = RankPool(tmp_path)
    try:
        with pytest.raises(RanksFailed) as caught:
            pool.run(MAX_RANKS, _die, variant, when, file)
    finally:
        pool.stop()
    # Ranks 0 and 1 returned, which they do only after an exception of their own.
    assert str(caught.value) == "rank 2: the process died"
    check_against_torch(ranks, 2, variant, _resume, file)


def _die(everyone: Rank, variant: Variant, when: str, file: Path) -> None:
    rank = impatient(everyone, 3)
    if rank is None:
        return
    params = make_params(SHAPES)
    optimizer = variant.ours(params, rank, **HYPER)
    train(optimizer, params, range(3), lambda p, t, i: gradient(p, t, i, rank.rank))
    saved, state = [p.detach().clone() for p in params], optimizer.full_state_dict()
    if rank.rank == 0:
        torch.save((saved, state), file)
    optimizer.zero_grad()
    if rank.rank == 2 and when == "in backward":
        params[0].register_hook(lambda grad: os._exit(9))
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        backward(params, [gradient(p, 3, i, rank.rank) for i, p in enumerate(params)])
        if rank.rank == 2:
            os._exit(9)
        optimizer.step()
    assert time.monotonic() - start < 60
    assert_same_bits([p.detach() for p in params], saved)


def _resume(side: Side, file: Path) -> list[Any]:
    saved, state = torch.load(file, weights_only=True)
    params = [torch.nn.Parameter(value) for value in saved]
    optimizer = side.build(params)
    optimizer.load_state_dict(state)
    for step in range(3, 5):
        optimizer.zero_grad()
        side.backward(params, step)
        optimizer.step()
    return [side.outcome(optimizer)]
