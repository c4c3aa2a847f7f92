"""The ways to save and load an optimizer's state that are compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from runner import TextRunner
from step_variants import FSDP, HYPERPARAMETERS, SHARDED, Build, Built, builders, ours
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import fusedshard

MIXED = "fusedshard sharded, 8-bit"  # of bf16 parameters with masters


def _mixed(model: nn.Module) -> Built:
    return ours(model.bfloat16(), mode="sharded", state_dtype=torch.uint8)


_BUILDERS = builders(HYPERPARAMETERS["lr"])
JOBS: dict[str, Build] = {SHARDED: _BUILDERS[SHARDED], MIXED: _mixed, FSDP: _BUILDERS[FSDP]}

Act = Callable[[TextRunner, Path], None]


class Way(NamedTuple):
    """Of one job to save its optimizer's state at a path that is free, and to load it. Collective;
    the ranks see the same files.

    Attributes:
        base: FSDP2's way that it is compared with.
    """

    job: str
    base: str
    save: Act
    load: Act


def _save_folder(runner: TextRunner, path: Path, **options: Any) -> None:
    found = {"optimizer": get_optimizer_state_dict(runner.model, runner.optimizer)}
    save(found, storage_writer=FileSystemWriter(path, **options))


def _load_folder(runner: TextRunner, path: Path) -> None:
    found = {"optimizer": get_optimizer_state_dict(runner.model, runner.optimizer)}
    load(found, checkpoint_id=path)
    set_optimizer_state_dict(runner.model, runner.optimizer, found["optimizer"])


def full_state(runner: TextRunner, *, rank0_only: bool = True) -> dict[str, Any]:
    """In host memory."""
    if isinstance(runner.optimizer, fusedshard.AdamW):
        return runner.optimizer.full_state_dict(rank0_only=rank0_only)
    options = StateDictOptions(full_state_dict=True, cpu_offload=rank0_only)
    return get_optimizer_state_dict(runner.model, runner.optimizer, options=options)


def _save_file(runner: TextRunner, path: Path) -> None:
    found = full_state(runner)
    if dist.get_rank() == 0:
        torch.save(found, path)


def _load_file(runner: TextRunner, path: Path) -> None:
    if isinstance(runner.optimizer, fusedshard.AdamW):
        runner.optimizer.load_state_dict(torch.load(path, weights_only=True))
        return
    found = torch.load(path, weights_only=True) if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about itself
        set_optimizer_state_dict(runner.model, runner.optimizer, found, options=options)


def _ways(job: str) -> dict[str, Way]:
    return {
        f"{job}: DCP": Way(job, f"{FSDP}: DCP", _save_folder, _load_folder),
        f"{job}: one file": Way(job, f"{FSDP}: one file", _save_file, _load_file),
    }


# What torch writes to a file it keeps until that is done, which matters where it is a copy.
PIECES = f"{MIXED}: DCP, many files"

WAYS: dict[str, Way] = {name: way for job in JOBS for name, way in _ways(job).items()} | {
    PIECES: Way(
        MIXED, f"{FSDP}: DCP", partial(_save_folder, single_file_per_rank=False), _load_folder
    )
}
