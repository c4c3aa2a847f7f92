"""A usual training script with everything in it, and the lines that fusedshard changes."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest
import torch
from ranks import Rank, RankPool
from torch.nn.parallel import DistributedDataParallel

import fusedshard

STEPS = 100
MICRO_BATCHES = 2

Losses = list[float]


class Changes(NamedTuple):
    """Of the script: the lines that fusedshard takes the place of."""

    optimizer: dict[str, Any] | None = None  # its options, if it is ours
    scaler_and_clip: bool = False
    ddp: bool = False


NONE = Changes()
CHANGES = {
    "optimizer alone": Changes({"grad_sync": "external"}),
    "three lines, sharded": Changes({"mode": "sharded"}, scaler_and_clip=True),
    "three lines, replicated": Changes({"mode": "replicated"}, scaler_and_clip=True),
    "and DDP, sharded": Changes({"mode": "sharded"}, scaler_and_clip=True, ddp=True),
    "and DDP, replicated": Changes({"mode": "replicated"}, scaler_and_clip=True, ddp=True),
    "optimizer and DDP": Changes({"mode": "replicated"}, ddp=True),
}


def script(rank: Rank, changes: Changes) -> tuple[Losses, list[str]]:
    """DDP, AdamW, GradScaler with unscale_, clipping, OneCycleLR and accumulation; losses and the
    last scale."""
    torch.manual_seed(0)
    hidden = torch.nn.Linear(16, 33)
    net = torch.nn.Sequential(hidden, torch.nn.Tanh(), torch.nn.Linear(33, 1))
    hyper: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    model: Any = net if changes.ddp else DistributedDataParallel(net, process_group=rank.group)
    optimizer: Any = torch.optim.AdamW(model.parameters(), **hyper)
    if changes.optimizer is not None:
        options = {**hyper, **changes.optimizer}
        optimizer = fusedshard.AdamW(model.parameters(), process_group=rank.group, **options)
    no_sync = optimizer.no_sync if changes.ddp else model.no_sync
    kind: Any = fusedshard.GradScaler if changes.scaler_and_clip else torch.amp.GradScaler
    scaler = kind("cpu", init_scale=1024.0, growth_interval=10)
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
                with no_sync():
                    scaler.scale(loss).backward()
            else:
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if changes.scaler_and_clip:
            optimizer.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        losses.append(loss.item())
    return losses, [f"scale {scaler.get_scale()}"]


def run_script(rank: Rank, changes: Changes) -> tuple[Losses, list[str], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses, scale = script(rank, changes)
    return losses, scale, [str(w.message) for w in caught if "fusedshard" in str(w.message)]


@pytest.fixture(scope="module", params=[2, 3])
def as_it_was(ranks: RankPool, request: pytest.FixtureRequest) -> list[Any]:
    """By rank, of which there are two or three."""
    return ranks.run(request.param, run_script, NONE)


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_losses_are_those_of_the_script_as_it_was(
    ranks: RankPool, as_it_was: list[Any], changes: Changes
) -> None:
    results = ranks.run(len(as_it_was), run_script, changes)
    for ours, theirs in zip(results, as_it_was, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=0, abs=1e-6, nan_ok=True)
        assert ours[1:] == theirs[1:]
