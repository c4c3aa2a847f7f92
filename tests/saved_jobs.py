"""What jobs of several ranks save, for tests of the audit of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import audited
import torch
import torch.distributed.checkpoint as dcp
from ranks import Rank

import fusedshard


def save_all(rank: Rank, folder: Path) -> None:
    """``folder/<job>/rank<number>.pt`` of each job, and what torch.distributed.checkpoint makes of
    that of FSDP2."""
    for job in ("ddp", "zero", "zero_numbered", "fsdp2", "ours", "replicated"):
        place = folder / job
        place.mkdir(exist_ok=True)
        torch.save(globals()[job](rank), place / f"rank{rank.rank}.pt")
    state = {**fsdp2(rank), "epoch": 3, "noise": torch.arange(6.0)}
    dcp.save(  # type: ignore[attr-defined]
        state, checkpoint_id=folder / "folder", process_group=rank.group
    )


def ddp(rank: Rank) -> dict[str, Any]:
    model, optimizer = audited.trained(rank, audited.ddp)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def zero(rank: Rank) -> dict[str, Any]:
    """By name."""
    model, optimizer = audited.trained(rank, audited.zero)
    state = {n: optimizer.optim.state.get(p) for n, p in model.named_parameters()}
    held = {name: parts for name, parts in state.items() if parts}
    groups = [{"params": list(state)}]
    return {"model": model.state_dict(), "optimizer": {"state": held, "param_groups": groups}}


def zero_numbered(rank: Rank) -> dict[str, Any]:
    """As a rank's own optimizer numbers its parameters."""
    _, optimizer = audited.trained(rank, audited.zero)
    numbered: dict[str, Any] = optimizer.optim.state_dict()
    return numbered


def fsdp2(rank: Rank) -> dict[str, Any]:
    model, optimizer = audited.trained(rank, audited.fsdp2)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def ours(rank: Rank) -> dict[str, Any]:
    """The shards that ``optimizer.state`` shows."""
    model, optimizer = audited.trained(rank, audited.ours)
    state = {name: optimizer.state[param] for name, param in model.named_parameters()}
    return {"model": model.state_dict(), "optimizer": {"state": state}}


def replicated(rank: Rank) -> dict[str, Any]:
    model, optimizer = audited.trained(rank, _replicated)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _replicated(rank: Rank) -> audited.Job:
    model = audited.small_model().to(torch.bfloat16)
    return model, fusedshard.AdamW(
        model.parameters(), mode="replicated", state_dtype=torch.bfloat16, process_group=rank.group
    )
