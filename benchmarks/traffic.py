"""What one step sends, by the profiler and by the machine's own count, and how often it waits for a
GPU."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

BACKENDS = ("gloo", "nccl")
# Bytes that a rank sends for each byte that it hands over, on n ranks: what the algorithm needs.
VOLUME: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "broadcast": lambda n: (n - 1) / n,  # one of n ranks sends to all others
    "send": lambda n: 1,
}
ITEM_BYTES = {
    "double": 8,
    "long int": 8,
    "float": 4,
    "int": 4,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "unsigned char": 1,
    "signed char": 1,
    "bool": 1,
}


class Call(NamedTuple):
    """One collective, as the backend does it, and the bytes that this rank handed over."""

    kind: str
    nbytes: int


def backend_calls(step: Callable[[], object]) -> list[Call]:
    """What the backends were asked to do during a step, whoever asked: gloo and NCCL report each
    call to the profiler, those that C++ makes, too."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    calls = []
    for event in profiler.profiler.kineto_results.events():
        backend, _, name = event.name().partition(":")
        kind = name.strip("_").removesuffix("_base")
        if backend in BACKENDS and kind != "recv":
            calls.append(Call(kind, _bytes_of(event.shapes(), event.dtypes())))
    return calls


def _bytes_of(shapes: list[list[int]], dtypes: list[str]) -> int:
    total = 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        total += torch.Size(shape).numel() * ITEM_BYTES[dtype]
    return total


def volume(calls: list[Call], ranks: int) -> dict[str, float | None]:
    """Bytes that each kind of call puts on the wire, a rank; None where that is not known."""
    handed_over: Counter[str] = Counter()
    for call in calls:
        handed_over[call.kind] += call.nbytes
    return {
        kind: VOLUME[kind](ranks) * nbytes if kind in VOLUME else None
        for kind, nbytes in handed_over.items()
    }


def sent_bytes(found: Mapping[str, Any]) -> float | None:
    """Of all kinds together, given what `traffic` found; None where some are not known."""
    volumes = found["algorithm_bytes"].values()
    return None if None in volumes else sum(volumes)


def collectives(calls: list[Call], ranks: int) -> dict[str, float]:
    """Calls by kind. Where a rank sends to each other, that is one exchange."""
    counts = dict[str, float](Counter(call.kind for call in calls))
    if "send" in counts:
        counts["exchange by pairs"] = counts.pop("send") / (ranks - 1)
    return counts


def loopback_bytes() -> int:
    """Sent over the loopback interface by all processes, ever, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise RuntimeError("/proc/net/dev: no loopback interface")


def on_one_machine() -> bool:
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) == dist.get_world_size()


def traffic(step: Callable[[], object], device: str) -> dict[str, Any]:
    """What one step of this rank sends. Collective.

    Over gloo on one machine also what went over its loopback meanwhile, for each rank.
    """
    ranks = dist.get_world_size()
    counted = device == "cpu" and ranks > 1 and on_one_machine()
    dist.barrier()
    before = loopback_bytes() if counted else 0
    dist.barrier()
    calls = backend_calls(step)
    dist.barrier()
    return {
        "collectives": collectives(calls, ranks),
        "algorithm_bytes": volume(calls, ranks),
        "loopback_bytes": (loopback_bytes() - before) / ranks if counted else None,
        "host_synchronizations": None if device == "cpu" else host_synchronizations(step),
    }


def host_synchronizations(step: Callable[[], object]) -> int:
    """How often the host waits for the device in a step."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
