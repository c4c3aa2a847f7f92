"""A usual training script with everything in it, and the lines that fusedshard changes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from ranks import Rank, RankPool
from torch.nn.parallel import DistributedDataParallel

import fusedshard

STEPS = 100
MICRO_BATCHES = 2

Losses = list[float]


def script(rank: Rank, changes: str) -> tuple[Losses, list[str]]:
    """DDP, AdamW, GradScaler with unscale_, clipping, OneCycleLR and accumulation; losses and
    warnings. ``changes``: none, the optimizer alone, or optimizer, scaler and clipping."""
    torch.manual_seed(0)
    hidden = torch.nn.Linear(16, 33)
    net = torch.nn.Sequential(hidden, torch.nn.Tanh(), torch.nn.Linear(33, 1))
    model = DistributedDataParallel(net, process_group=rank.group)
    hyper: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    optimizer: Any = torch.optim.AdamW(model.parameters(), **hyper)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10)
    if changes == "optimizer":
        optimizer = fusedshard.AdamW(
            model.parameters(), process_group=rank.group, grad_sync="external", **hyper
        )
    elif changes:
        optimizer = fusedshard.AdamW(
            model.parameters(), process_group=rank.group, mode=changes, **hyper
        )
        scaler = fusedshard.GradScaler("cpu", init_scale=1024.0, growth_interval=10)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS)
    data = torch.Generator().manual_seed(rank.rank)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            x = torch.randn(8, 16, generator=data)
            if step == 7 and rank.rank == 1:
                x[0, 0] = torch.inf  # this step is skipped
            loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean() / MICRO_BATCHES
            if micro < MICRO_BATCHES - 1:
                with model.no_sync():
                    scaler.scale(loss).backward()
            else:
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if changes in ("", "optimizer"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            optimizer.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        losses.append(loss.item())
    return losses, [f"scale {scaler.get_scale()}"]


def run_script(rank: Rank, changes: str) -> tuple[Losses, list[str], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses, scale = script(rank, changes)
    return losses, scale, [str(w.message) for w in caught if "fusedshard" in str(w.message)]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("changes", ["optimizer", "sharded", "replicated"])
def test_losses_are_those_of_the_script_as_it_was(
    ranks: RankPool, world_size: int, changes: str
) -> None:
    want = ranks.run(world_size, run_script, "")
    for ours, theirs in zip(ranks.run(world_size, run_script, changes), want, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=0, abs=1e-6, nan_ok=True)
        assert ours[1:] == theirs[1:]
