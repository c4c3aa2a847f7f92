"""The audit of a running job: each rank tells the others what it holds, by fingerprints first."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fusedshard.auditing.details import Tally, chunk_lengths, chunks_of
from fusedshard.auditing.inventory import take
from fusedshard.auditing.local import boxes_of
from fusedshard.auditing.pieces import Inventory, Piece, dtype_of
from fusedshard.auditing.prints import fingerprints_of
from fusedshard.auditing.report import AuditReport, Difference
from fusedshard.auditing.verdicts import (
    Array,
    Holding,
    Mismatch,
    holdings_by_array,
    judge,
    mismatches,
    mixed_arrays,
)
from fusedshard.comm import Communicator, describe_error, raise_shared
from fusedshard.state import ShardedOptimizer


@torch.compiler.disable
@torch.no_grad()
def audit(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> AuditReport:
    """Compare the ranks' optimizer state and parameters: are they what they should be?

    Collective over the process group; call it between steps. Every rank gets the same report.
    Each tensor's bits are read once, for a fingerprint of 8 bytes, which is all that is sent of
    it; where copies differ they are sent and measured. Fingerprints of different bits are equal
    with a probability of about 2^-64, and never where only one element differs. On a GPU it waits
    for the device. Nothing is changed.

    Args:
        optimizer: `fusedshard.Adam` or `AdamW`; any torch.optim.Optimizer whose state is tensors
            and numbers, as under DDP; torch's ZeroRedundancyOptimizer; or any of torch's over the
            DTensor parameters of FSDP2.
        model: gives parameters their names, and adds those that the optimizer does not have, and
            buffers.
        process_group: the data-parallel ranks. None: the optimizer's own, or the default group;
            without torch.distributed, one rank.

    Raises:
        TypeError, ValueError: on every rank, where an argument of any rank is not of that kind (a
            ``process_group`` that is none: there alone), or the ranks have parameters of different
            names or shapes, as in model parallelism: these cannot be compared, only each of their
            data-parallel groups can.
    """
    comm, error = _communicator(optimizer, process_group)
    inventory, prints = Inventory((), ()), []
    try:
        if error is not None:
            raise error
        inventory = take(optimizer, model, comm.ranks)
        prints = fingerprints_of(inventory.held)
    except Exception as caught:  # the other ranks must learn of it
        error = caught
    pieces = _agree_on_pieces(comm, error, inventory)
    by_index = mixed_arrays(pieces)
    if by_index:
        prints = fingerprints_of(inventory.held, by_index)
    arrays = holdings_by_array(pieces, _gather_prints(comm, prints, pieces))
    differences = _measure(comm, inventory, mismatches(arrays, comm.world_size), arrays)
    return judge(inventory, arrays, differences, [f"rank {r}" for r in range(comm.world_size)])


def _communicator(
    optimizer: Any, process_group: dist.ProcessGroup | None
) -> tuple[Communicator, Exception | None]:
    """Over the ranks to compare, and what is wrong with them."""
    if not isinstance(optimizer, ShardedOptimizer):
        return Communicator.for_audit(process_group), None
    own = optimizer._built.comm.process_group
    comm = Communicator.for_audit(process_group if process_group is not None else own)
    error = None
    if comm.ranks != Communicator.for_audit(own).ranks:
        error = ValueError(
            f"process_group: got one of ranks {comm.ranks}, wanted the optimizer's own, or None"
        )
    return comm, error


def _agree_on_pieces(
    comm: Communicator, error: Exception | None, inventory: Inventory
) -> list[list[Piece]]:
    """What each rank holds: told in full only where it is not the same on all.

    Raises on every rank where one of them has an error, or other parameters than rank 0.
    """
    params = [tuple(info) for info in inventory.params]
    pieces = [item.piece for item in inventory.held]
    answers = comm.gather_objects((describe_error(error), _digest(params), _digest(pieces)))
    raise_shared(error, [failure for failure, _, _ in answers])
    if len({of_params for _, of_params, _ in answers}) > 1:
        raise ValueError(_first_difference(comm.gather_objects(params)))
    if len({of_pieces for _, _, of_pieces in answers}) == 1:
        return [pieces] * comm.world_size
    return comm.gather_objects(pieces)


def _digest(items: Sequence[Any]) -> str:
    return hashlib.sha256(repr([tuple(item) for item in items]).encode()).hexdigest()


def _first_difference(by_rank: Sequence[Sequence[tuple[Any, ...]]]) -> str:
    for rank, params in enumerate(by_rank):
        for place in range(max(len(params), len(by_rank[0]))):
            ours, theirs = (
                f"{p[place][0]!r} of shape {p[place][1]}" if place < len(p) else "none"
                for p in (params, by_rank[0])
            )
            if ours != theirs:
                return (
                    f"optimizer: the ranks have different parameters: number {place} is {ours} on "
                    f"rank {rank} and {theirs} on rank 0: audit the ranks of one data-parallel "
                    "group (process_group=)"
                )
    return "optimizer: the ranks have different parameters: requires_grad is not the same on all"


def _gather_prints(
    comm: Communicator, prints: Sequence[int], pieces: Sequence[Sequence[Piece]]
) -> list[list[int]]:
    if comm.world_size == 1:
        return [list(prints)]
    row = torch.zeros(max(map(len, pieces)), dtype=torch.int64, device="cpu")
    row[: len(prints)] = torch.tensor(prints, dtype=torch.int64, device="cpu")
    rows = comm.gather_fingerprints(row).tolist()
    return [of_rank[: len(ours)] for of_rank, ours in zip(rows, pieces, strict=True)]


def _measure(
    comm: Communicator,
    inventory: Inventory,
    found: Sequence[Mismatch],
    arrays: Mapping[Array, Sequence[Holding]],
) -> dict[Array, list[Difference]]:
    """What is behind mismatches, on every rank. Collective: the reference's copies go to all."""
    held, mine = boxes_of(inventory.held), []
    for mismatch in found:
        piece = next(h.piece for h in arrays[mismatch.array] if h.rank == mismatch.reference)
        item = held.get((mismatch.array, mismatch.box))
        chunks = chunks_of(item.tensor) if item is not None else iter(())
        tally = Tally()
        for length in chunk_lengths(piece.numel):
            chunk = next(chunks, torch.empty(length, dtype=dtype_of(piece.dtype), device="cpu"))
            there = chunk if comm.rank == mismatch.reference else torch.empty_like(chunk)
            comm.broadcast_(there.view(torch.uint8), mismatch.reference)
            if comm.rank in mismatch.ranks:
                tally.add(chunk, there)
        place = (comm.rank, mismatch.reference, *mismatch.box)
        mine.append(tally.found(*place, has_majority=mismatch.has_majority))
    differences: defaultdict[Array, list[Difference]] = defaultdict(list)
    for of_rank in comm.gather_objects(mine) if found else ():
        for mismatch, difference in zip(found, of_rank, strict=True):
            differences[mismatch.array] += [difference] if difference else []
    return differences
