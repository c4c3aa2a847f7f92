"""Memory of a rank: how much work needs at its peak, and how much there is."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

# What `variants_at_once` leaves to activations, to other processes, and to error.
SHARE = 0.8
# Copies of all parameters that a variant keeps between its turns at most: they themselves, both
# moments and DDP's buckets; and that the one whose turn it is needs beside them: gradients, and
# what an update makes meanwhile.
KEPT, MOMENTARY = 4, 2


def peak_bytes(work: Callable[[], object], device: str) -> int:
    """By how much `work` raised this process's memory at its peak: resident, or of the GPU."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before
    # Free memory that the allocator keeps would be used without being counted.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    before = _status_bytes("VmRSS")
    work()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def available_bytes(device: str) -> int:
    """Of this rank: its part of the machine's memory, or its GPU's."""
    if device != "cpu":
        return torch.cuda.mem_get_info()[0]
    (line,) = (
        line
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return int(line.split()[1]) * 1024 // ranks


def variants_at_once(model_bytes: int, available: int) -> int:
    """How many of one model fit together, but no less than a pair."""
    room = SHARE * available - MOMENTARY * model_bytes
    return max(2, int(room // (KEPT * model_bytes)))


def groups(names: Sequence[str], reference: str, at_once: int) -> list[list[str]]:
    """All names in groups of at most so many, the reference in each."""
    others, size = [name for name in names if name != reference], at_once - 1
    return [[reference, *others[i : i + size]] for i in range(0, len(others), size)]
