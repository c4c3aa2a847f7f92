"""Gradients that are exchanged while backward goes on, in all the ways to run backward, beside
torch's optimizer on the means of the ranks' gradients."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Rank, RankPool
from scenarios import SCENARIOS, Net, Turn
from training import assert_close, assert_same_bits

import fusedshard
from fusedshard import layout

STEPS = 5
HYPER: dict[str, Any] = {"lr": 0.1, "eps": 1.0, "weight_decay": 0.1}
# Replicated mode makes p.grad the mean whenever a backward ends, which is collective: as under DDP,
# all ranks must run the same number of them.
UNEQUAL = {
    "synced_on_other_ranks_only",
    "nothing_on_one_rank",
    "failed_and_repeated",
    "thrown_away",
}
CASES = [
    (name, mode)
    for name in SCENARIOS
    for mode in ("sharded", "replicated")
    if mode == "sharded" or name not in UNEQUAL
]


def local_gradients(name: str, net: Net, world_size: int, step: int) -> list[torch.Tensor | None]:
    """The mean over the ranks of what each would have, where any has one."""
    params = list(net.parameters())
    before = [param.requires_grad for param in params]
    sums: list[torch.Tensor | None] = [None] * len(params)
    for rank in range(world_size):
        for param, trains in zip(params, before, strict=True):
            param.grad = None
            param.requires_grad_(trains)
        SCENARIOS[name](Turn(net, rank, step, zero_grad=net.zero_grad))
        for index, param in enumerate(params):
            if param.grad is not None:
                total = sums[index]
                sums[index] = param.grad if total is None else total + param.grad
    return [None if total is None else total / world_size for total in sums]


def reference(name: str, world_size: int) -> Any:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), **HYPER)
    for step in range(STEPS):
        means = local_gradients(name, net, world_size, step)
        for param, mean in zip(net.parameters(), means, strict=True):
            param.grad = mean
        optimizer.step()
    return [param.detach() for param in net.parameters()], optimizer.state_dict()


def train(rank: Rank, name: str, options: dict[str, Any]) -> Any:
    net = Net()
    with mock.patch.object(layout, "MIN_SHARD_BYTES", 128):
        optimizer = fusedshard.AdamW(net.parameters(), process_group=rank.group, **HYPER, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        SCENARIOS[name](Turn(net, rank.rank, step, optimizer.no_sync, optimizer.zero_grad))
        optimizer.step()
    state = optimizer.full_state_dict()
    return [param.detach() for param in net.parameters()], state


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_every_way_to_run_backward(ranks: RankPool, name: str, mode: str) -> None:
    """In many small buckets, so that some are sent long before backward ends."""
    world_size = 3
    want = reference(name, world_size)
    options = {"mode": mode, "bucket_cap_mb": 1e-3}
    results = ranks.run(world_size, train, name, options)
    for ours in results:
        assert_same_bits(ours, results[0])
    assert_close(results[0], want)


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
@pytest.mark.parametrize("reduction", ["ordered", "backend"])
@pytest.mark.parametrize("name", ["accumulated", "used_on_one_rank", "synced_each_time"])
def test_by_either_reduction(ranks: RankPool, name: str, reduction: str, mode: str) -> None:
    want = reference(name, 2)
    for ours in ranks.run(2, train, name, {"mode": mode, "reduction": reduction}):
        assert_close(ours, want)


@pytest.mark.parametrize("name", ["everything", "used_on_one_rank", "frozen_for_a_while"])
def test_backward_and_step_have_the_same_bits(ranks: RankPool, name: str) -> None:
    """Also in both modes, for each bucket size."""
    options: list[dict[str, Any]] = [
        {"grad_sync": "step"},
        {"grad_sync": "backward", "bucket_cap_mb": 1e-3},
        {"grad_sync": "backward", "mode": "replicated"},
    ]
    first, *others = (ranks.run(3, train, name, chosen) for chosen in options)
    for results in others:
        assert_same_bits(results, first)
