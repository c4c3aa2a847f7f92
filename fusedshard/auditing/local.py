"""The audit of inventories that are all here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from fusedshard.auditing.details import Tally, chunks_of
from fusedshard.auditing.pieces import Held, Inventory
from fusedshard.auditing.prints import fingerprints_of
from fusedshard.auditing.report import AuditReport, Difference
from fusedshard.auditing.verdicts import (
    Array,
    Box,
    Mismatch,
    holdings_by_array,
    judge,
    mismatches,
    mixed_arrays,
)


def compare(inventories: Sequence[Inventory], names: Sequence[str]) -> AuditReport:
    """Judge them as if each were a rank's.

    Args:
        inventories: one for each rank, of the same parameters.
        names: what the ranks are called.
    """
    pieces = [[item.piece for item in inventory.held] for inventory in inventories]
    by_index = mixed_arrays(pieces)
    prints = [fingerprints_of(inventory.held, by_index) for inventory in inventories]
    arrays = holdings_by_array(pieces, prints)
    held = [boxes_of(inventory.held) for inventory in inventories]
    differences: defaultdict[Array, list[Difference]] = defaultdict(list)
    for mismatch in mismatches(arrays, len(names)):
        differences[mismatch.array] += _differences(mismatch, held)
    return judge(inventories[0], arrays, differences, names)


def boxes_of(held: Sequence[Held]) -> dict[tuple[Array, Box], Held]:
    """By what they are pieces of."""
    return {(item.piece.array, (item.piece.offset, item.piece.size)): item for item in held}


def _differences(
    mismatch: Mismatch, held: Sequence[dict[tuple[Array, Box], Held]]
) -> list[Difference]:
    key = mismatch.array, mismatch.box
    found = []
    for rank in mismatch.ranks:
        tally = Tally()
        pairs = zip(
            chunks_of(held[rank][key].tensor),
            chunks_of(held[mismatch.reference][key].tensor),
            strict=True,
        )
        for here, there in pairs:
            tally.add(here, there)
        difference = tally.found(
            rank, mismatch.reference, *mismatch.box, has_majority=mismatch.has_majority
        )
        found += [difference] if difference else []
    return found
