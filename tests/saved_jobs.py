"""What jobs of several ranks save, and ways to spoil it, for tests of the audit of files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import audited
import torch
import torch.distributed.checkpoint as dcp
from ranks import Rank

import fusedshard
from fusedshard import AuditReport
from fusedshard.auditing.files.saved import read
from fusedshard.auditing.local import compare
from fusedshard.auditing.report import PartReport

WEIGHT = "2.weight"  # 17 x 16, of the first linear layer
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]
RANKS = 3


def save_all(rank: Rank, folder: Path) -> None:
    """``folder/<job>/rank<number>.pt`` of each job, and what torch.distributed.checkpoint makes of
    that of FSDP2."""
    jobs = ["ddp", "zero", "zero_numbered", "ours", "replicated"]
    for job in [*jobs, *(["fsdp2"] if audited.FSDP_ON_CPUS else [])]:
        place = folder / job
        place.mkdir(exist_ok=True)
        torch.save(globals()[job](rank), place / f"rank{rank.rank}.pt")
    if not audited.FSDP_ON_CPUS:
        return
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


def files_of(folder: Path) -> list[Path]:
    return [folder / f"rank{rank}.pt" for rank in range(RANKS)]


def audit(*paths: Path) -> AuditReport:
    return compare(*read(paths))


def change(path: Path, how: Callable[[Any], Any]) -> None:
    content = torch.load(path, weights_only=True)
    how(content)
    torch.save(content, path)


def part_of(report: AuditReport, name: str, part: str) -> PartReport:
    found = next(p for p in report.parameters if p.name == name)
    return next(p for p in found.parts if p.part == part)


def faults(report: AuditReport) -> set[tuple[str, str]]:
    return {(p.name, part.part) for p in report.parameters for part in p.parts if not part.ok}


def flip(content: Any) -> None:
    number = NAMES.index(WEIGHT)
    content["optimizer"]["state"][number]["exp_avg"].view(torch.int32)[3, 5] ^= 1


def optimizer_dict(**options: Any) -> dict[str, Any]:
    state = {number: {"step": 4, "exp_avg": torch.arange(6.0) + number} for number in range(2)}
    return {"state": state, "param_groups": [{"params": [0, 1], "lr": 0.1, **options}]}


def entries(**shapes: Sequence[int]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(*shape) for name, shape in shapes.items()}
