"""What the tests on a GPU share: where they run, copies of tensors there, and ranks that use it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import same_state
from torch.utils import _pytree as pytree

from fusedshard import _C
from fusedshard.native import AdamState

DEVICE = "cuda:0"
RANK_PROGRAM = Path(__file__).with_name("gpu_rank.py")
POLL_SECONDS = 0.1


def _missing() -> str:
    """Why nothing can run on a GPU here; empty where it can."""
    build = _C.cuda_build()
    if not torch.cuda.is_available():
        return "no CUDA device"
    return "" if build["built"] else f"fusedshard was built without CUDA: {build['note']}"


def require_gpu() -> None:
    """Skip the module that calls this where nothing can run on a GPU, and say why, once."""
    if _missing():
        pytest.skip(_missing(), allow_module_level=True)


def placed(tensor: torch.Tensor, device: str = DEVICE, offset: int = 0) -> torch.Tensor:
    """A 1-D copy on a device that begins ``offset`` elements into its memory, which is aligned."""
    room = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=device)
    return room[offset:].copy_(tensor)


def placed_state(
    state: AdamState, device: str = DEVICE, offsets: Sequence[int] = (0, 0, 0, 0)
) -> AdamState:
    """``offsets``: of the parameter and the three moments."""

    def put(array: torch.Tensor | None, offset: int = 0) -> Any:
        return None if array is None else placed(array, device, offset)

    moved = zip((state.param, *state.moments), offsets, strict=True)
    param, exp_avg, exp_avg_sq, max_exp_avg_sq = (put(array, offset) for array, offset in moved)
    exponents = tuple(put(array) for array in state.exponents)
    master, checks = put(state.master), put(state.checks)
    moments = exp_avg, exp_avg_sq, max_exp_avg_sq
    return AdamState(param, *moments, master, exponents, state.seed, checks)


def on_host(tree: Any) -> Any:
    """The same lists, dicts and tuples with their tensors in host memory."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), tree)


def equal_on_host(ours: AdamState, theirs: AdamState) -> bool:
    """Whether a state on the device has the bits of one in host memory."""
    return same_state(on_host(ours), theirs)


class NoAnswer(AssertionError):
    """Ranks failed or did not end in time; the message holds what they printed."""


def run_ranks(
    folder: Path, world_size: int, limit: float = 40.0, **settings: Any
) -> list[dict[tuple[str, str], Any]]:
    """Run ``gpu_rank.py`` in ``world_size`` processes, and return what each has saved.

    Raises:
        NoAnswer: within ``limit`` seconds and little more, with no process left behind.
    """
    folder.mkdir()
    answers = [folder / f"rank-{rank}.pt" for rank in range(world_size)]
    log = folder / "log.txt"
    with log.open("wb") as output:
        ranks = [
            _start_rank(settings | _places(folder, rank, world_size, answer), output)
            for rank, answer in enumerate(answers)
        ]
        try:
            _wait(ranks, limit)
        finally:
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):  # it ended as it should
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
    if any(rank.returncode for rank in ranks):
        codes = [rank.returncode for rank in ranks]
        raise NoAnswer(f"exit statuses {codes}\n{log.read_text(errors='replace')}")
    return [torch.load(answer, weights_only=False) for answer in answers]


def _places(folder: Path, rank: int, world_size: int, answer: Path) -> dict[str, Any]:
    store = folder / "store"
    return {"rank": rank, "world_size": world_size, "store": str(store), "answer": str(answer)}


def _start_rank(settings: dict[str, Any], output: Any) -> subprocess.Popen[bytes]:
    environment = {"NCCL_SOCKET_IFNAME": "lo", **os.environ, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return subprocess.Popen(
        [sys.executable, str(RANK_PROGRAM), json.dumps(settings)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], limit: float) -> None:
    """Until all have ended, or one has failed, which the others might wait for, or time is up."""
    end = time.monotonic() + limit
    while time.monotonic() < end and any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            return
        time.sleep(POLL_SECONDS)
