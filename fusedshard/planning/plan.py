"""All ways to train a model beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fusedshard.kernels import MASTER_DTYPES
from fusedshard.options import ParallelOptions
from fusedshard.planning.models import Model
from fusedshard.planning.ours import Ours, masters_of
from fusedshard.planning.sizes import MOST_RANKS
from fusedshard.planning.torchs import FSDP2, ddp, zero_redundancy
from fusedshard.planning.usage import MODEL, STATE, Usage, Way
from fusedshard.precision import Precision

STATES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}

FORMULAS = (
    "Sent by each of N ranks, of B bytes, in rings (ZeRO, arXiv:1910.02054, section 7): "
    "reduce-scatter, all-gather and all-to-all (N-1)/N B, all-reduce twice that; broadcasts of all "
    "ranks' parts (N-1)/N B on the average. FSDP2 gathers blocks twice and the root once.",
    "An all-to-all goes straight between any two ranks: with several ranks a node nearly all of "
    "what each sends leaves the node, where in a ring only one rank's does. Choose --bandwidth by "
    "that.",
    "Time on the wire: sent / bandwidth, none of it hidden behind forward and backward. Time of "
    "the update: moved / memory bandwidth, each array read and written once, gradients read; with "
    "fp32 masters by hand also the casts from and to 16 bits. What packing and averaging gradients "
    "moves is not in it, on either side.",
)
LEGEND = (
    "DDP, ZeroRedundancyOptimizer and FSDP2 are with torch.optim.AdamW(fused=True) (foreach needs "
    "as much again for a while). Its state has the dtype of what it trains: where that is 16 bits, "
    "so are the moments, and there is no master. Views: gradient_as_bucket_view=True.",
    "Sharded and replicated are fusedshard's, named by their state_dtype; remainders are 16 bits "
    "with which a bf16 parameter is an fp32 number. Where ranks hold unequal parts, this is the "
    "fullest.",
    "FSDP2's buffers are at their peak in backward: the root and the largest block gathered, the "
    "next one arriving, the block's gradients, and another's being scattered.",
    "fusedshard's buffers are of the size of a bucket (--bucket-cap-mb), whatever the model's.",
    "Not counted: activations, the model's buffers (as of BatchNorm), tables of segments, and what "
    "CUDA, NCCL and the allocator take for themselves.",
)


@dataclass(frozen=True)
class Question:
    """What to plan for.

    Attributes:
        model: its parameters.
        ranks: on how many.
        states: names in `STATES`, of fusedshard's moments.
        reduction, grad_sync, bucket_cap_mb: as in `fusedshard.Adam`.
        backend: "nccl" or "gloo".
        gpu_memory: bytes of each rank, or None.
        bandwidth: bytes a second that a rank sends, or None.
        memory_bandwidth: bytes a second that a rank's memory moves, or None.
    """

    model: Model
    ranks: int
    states: Sequence[str] = ("fp32",)
    reduction: str = "auto"
    grad_sync: str = "backward"
    bucket_cap_mb: float = 25
    backend: str = "nccl"
    gpu_memory: int | None = None
    bandwidth: float | None = None
    memory_bandwidth: float | None = None


@dataclass(frozen=True)
class Row:
    """A way, and what it takes on the ranks in question.

    Attributes:
        way: which.
        usage: of memory and wire.
        least_ranks: on how many it fits into the memory; None where on none, or that was not asked.
        seconds: of a step: ``"wire"`` and ``"update"``, as far as bandwidths are known.
    """

    way: Way
    usage: Usage
    least_ranks: int | None
    seconds: dict[str, float]


def ways(question: Question) -> tuple[list[Way], list[str]]:
    """Those that can train the model, and why others cannot."""
    model = question.model
    narrow = any(dtype in MASTER_DTYPES for dtype in model.dtypes)
    found = [
        _ddp(model, masters=masters, bucket_view=bucket_view)
        for bucket_view in (False, True)
        for masters in ((False, True) if narrow else (False,))
    ]
    found.append(Way("torch", "ZeroRedundancyOptimizer", partial(zero_redundancy, model), MODEL))
    notes = []
    for mixed in (False, True) if narrow else (False,):
        fsdp = FSDP2(model, mixed=mixed)
        name = "FSDP2, fp32 shards" if mixed else "FSDP2"
        if fsdp.problem:
            notes.append(f"{name} {fsdp.problem}.")
        else:
            found.append(Way("torch", name, fsdp.usage, ()))
    return found + _our_ways(question), notes


def _ddp(model: Model, *, masters: bool, bucket_view: bool) -> Way:
    name = ("DDP, views" if bucket_view else "DDP") + (", fp32 masters" if masters else "")
    usage = partial(ddp, model, masters=masters, bucket_view=bucket_view)
    return Way("torch", name, usage, MODEL + STATE)


def _our_ways(question: Question) -> list[Way]:
    found = []
    for mode in ("sharded", "replicated"):
        for state in question.states:
            for master in masters_of(question.model):
                options = ParallelOptions(
                    mode,
                    None,
                    question.reduction,
                    question.grad_sync,
                    question.bucket_cap_mb,
                    Precision(master, STATES[state], True, 0),
                    0,
                )
                name = f"{mode} {state}{_master_words(question.model, master)}"
                usage = Ours(question.model, options, question.backend).usage
                kept_whole = MODEL if mode == "sharded" else MODEL + STATE
                found.append(Way("fusedshard", name, usage, kept_whole))
    return found


def _master_words(model: Model, master: bool | None) -> str:
    narrow = any(dtype in MASTER_DTYPES for dtype in model.dtypes)
    if not narrow or master is False:
        return " alone" if narrow else ""
    return " + remainders" if master is None and torch.bfloat16 in model.dtypes else " + masters"


def plan(question: Question) -> tuple[list[Row], list[str]]:
    """A row for each way, and why others cannot train the model."""
    found, notes = ways(question)
    rows = []
    for way in found:
        usage, least = way.usage(question.ranks), None
        if question.gpu_memory is not None:
            least = least_ranks(way, question.gpu_memory)
        rows.append(Row(way, usage, least, _seconds(question, usage)))
    return rows, notes


def _seconds(question: Question, usage: Usage) -> dict[str, float]:
    seconds = {}
    if question.bandwidth is not None:
        seconds["wire"] = usage.total_sent / question.bandwidth
    if question.memory_bandwidth is not None:
        seconds["update"] = usage.moved / question.memory_bandwidth
    return seconds


def least_ranks(way: Way, room: int) -> int | None:
    """The least number of ranks on which a way fits into ``room`` bytes of each. (On some more it
    need not: padding differs, and one rank has no wire buffers.) None: on no power of two up to
    `MOST_RANKS`."""

    def fits(ranks: int) -> bool:
        return way.usage(ranks).total <= room

    alone = way.usage(1).memory
    whole = sum(alone[kind] for kind in way.kept_whole)
    shared = sum(alone.values()) - whole
    if whole > room or (whole == room and shared):
        return None
    powers = (1 << power for power in range(MOST_RANKS.bit_length()))
    most = next(filter(fits, powers), None)
    if most is None:
        return None
    # On fewer than the first there would be too little room, even without padding and buffers.
    first = max(1, -(-shared // max(1, room - whole)))
    return next(ranks for ranks in range(min(first, most), most + 1) if fits(ranks))


def as_json(question: Question, rows: Sequence[Row], notes: Sequence[str]) -> dict[str, Any]:
    """All of it, for programs."""
    model = question.model
    return {
        "model": {
            "origin": model.origin,
            "parameters": model.numel,
            "tensors": len(model.parameters),
            "bytes": model.nbytes,
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in model.dtypes],
        },
        "ranks": question.ranks,
        "options": {
            "reduction": question.reduction,
            "grad_sync": question.grad_sync,
            "bucket_cap_mb": question.bucket_cap_mb,
            "backend": question.backend,
        },
        "gpu_memory": question.gpu_memory,
        "bandwidth": question.bandwidth,
        "memory_bandwidth": question.memory_bandwidth,
        "ways": [_row_as_json(question, row) for row in rows],
        "notes": [*notes, *LEGEND],
        "formulas": list(FORMULAS),
    }


def _row_as_json(question: Question, row: Row) -> dict[str, Any]:
    usage = row.usage
    entry: dict[str, Any] = {
        "library": row.way.library,
        "name": row.way.name,
        "memory": {**usage.memory, "buffers": dict(usage.buffers)},
        "total": usage.total,
        "sent": dict(usage.sent),
        "total_sent": usage.total_sent,
        "moved": usage.moved,
        "seconds": row.seconds,
    }
    if question.gpu_memory is not None:
        entry |= {"fits": usage.total <= question.gpu_memory, "least_ranks": row.least_ranks}
    return entry
