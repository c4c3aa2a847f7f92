"""A rank that fails: the others hear of it, and keep what they had."""

from __future__ import annotations

import datetime
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, RankPool, RanksFailed
from training import assert_same_bits, gradient, make_params

import fusedshard

MODES = ("sharded", "replicated")
SHAPES = [(17, 257), (5,)]


def impatient(rank: Rank) -> Any:
    """A group whose collectives give up after a few seconds."""
    return dist.new_group(list(range(rank.world_size)), timeout=datetime.timedelta(seconds=4))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["closure", "pre-hook"])
def test_dst_07_one_rank_raises_before_the_collective(
    ranks: RankPool, mode: str, where: str
) -> None:
    results = ranks.run(4, _raise_early, mode, where)
    for rank, (text, before, after) in enumerate(results):
        if where == "closure":  # of which the others are told
            assert text == ("mine" if rank == 1 else "on rank 1: mine")
        assert ("mine" in text) == (rank == 1 or where == "closure")
        assert_same_bits(before, after)


def _raise_early(rank: Rank, mode: str, where: str) -> Any:
    params = make_params(SHAPES)
    optimizer = fusedshard.AdamW(params, mode=mode, process_group=impatient(rank))
    for index, param in enumerate(params):
        param.grad = gradient(param, 0, index, rank.rank)
    optimizer.step()
    before = [p.detach().clone() for p in params], _local_state(optimizer)

    def fail(*_: Any) -> None:
        if rank.rank == 1:
            raise ValueError("mine")

    if where == "pre-hook":
        optimizer.register_step_pre_hook(fail)
    start = time.monotonic()
    with pytest.raises((RuntimeError, ValueError)) as caught:
        optimizer.step(fail if where == "closure" else None)
    assert time.monotonic() - start < 30
    return (
        str(caught.value),
        before,
        ([p.detach().clone() for p in params], _local_state(optimizer)),
    )


def _local_state(optimizer: fusedshard.AdamW) -> Any:
    return [{name: v.clone() for name, v in state.items()} for state in optimizer.state.values()]


@pytest.mark.parametrize("when", ["in backward", "after backward"])
def test_dst_10_a_rank_dies(tmp_path: Any, when: str) -> None:
    pool = RankPool(tmp_path)
    try:
        with pytest.raises(RanksFailed) as caught:
            pool.run(3, _die, when)
    finally:
        pool.stop()
    # Ranks 0 and 1 returned, which they do only after an exception of their own.
    assert str(caught.value).startswith("rank 2: the process died")


def _die(rank: Rank, when: str) -> None:
    params = make_params(SHAPES)
    optimizer = fusedshard.AdamW(params, process_group=impatient(rank))
    if rank.rank == 2 and when == "in backward":
        params[0].register_hook(lambda grad: os._exit(9))
    sum((p * p).sum() for p in params).backward()  # type: ignore[union-attr]
    if rank.rank == 2:
        os._exit(9)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert time.monotonic() - start < 60
    assert not optimizer.state


def test_dst_09_without_torch_distributed_it_is_a_plain_optimizer() -> None:
    for make in (fusedshard.AdamW, torch.optim.AdamW):
        params = make_params(SHAPES)
        optimizer = make(params, lr=0.1, eps=1.0)
        for step in range(10):
            for index, param in enumerate(params):
                param.grad = gradient(param, step, index, 0)
            optimizer.step()
        state = optimizer.state_dict()
        results = [p.detach() for p in params], state["state"]
        if make is fusedshard.AdamW:
            ours = results
    for a, b in zip(ours[0], results[0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    for index, moments in results[1].items():
        for name, value in moments.items():
            torch.testing.assert_close(ours[1][index][name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_dst_09_a_group_of_one(ranks: RankPool, mode: str) -> None:
    (calls,) = ranks.run(1, _alone, mode)
    assert calls == {}


def _alone(rank: Rank, mode: str) -> dict[str, int]:
    params = make_params(SHAPES)
    optimizer = fusedshard.AdamW(params, mode=mode, process_group=rank.group)
    for index, param in enumerate(params):
        param.grad = gradient(param, 0, index, 0)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return dict(optimizer.stats.calls)
