"""How many ranks hold each element of an array, from the boxes that they hold."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fusedshard.auditing.pieces import Index, Piece
from fusedshard.auditing.report import Region

MOST_REGIONS = 20  # that are named; more are only counted


class Coverage(NamedTuple):
    """Where an array is held by fewer or more ranks than it should be."""

    gaps: tuple[Region, ...]
    overlaps: tuple[Region, ...]
    gap_elements: int
    overlap_elements: int


NOTHING_WRONG = Coverage((), (), 0, 0)


def cover(shape: Index, held: Sequence[tuple[int, Piece]], copies: int) -> Coverage:
    """Compare the boxes of all ranks with ``copies``, the number of ranks that must hold each
    element.

    Args:
        shape: of the array.
        held: ranks, and a piece of each; a rank may have several.
        copies: at least 1.
    """
    if len(held) == copies and all(piece.size == shape for _, piece in held):
        return NOTHING_WRONG
    cuts = [_cuts(dim, shape, held) for dim in range(len(shape))]
    counts = _counts(cuts, held)
    gaps, gap_elements = _regions(cuts, counts < copies, held)
    overlaps, overlap_elements = _regions(cuts, counts > copies, held)
    return Coverage(gaps, overlaps, gap_elements, overlap_elements)


def _cuts(dim: int, shape: Index, held: Sequence[tuple[int, Piece]]) -> list[int]:
    """Where in a dimension the holders may change."""
    cuts = {0, shape[dim]}
    for _, piece in held:
        cuts |= {piece.offset[dim], piece.offset[dim] + piece.size[dim]}
    return sorted(cuts)


def _counts(cuts: Sequence[list[int]], held: Sequence[tuple[int, Piece]]) -> torch.Tensor:
    """How many pieces hold each cell between the cuts: the sums of what changes at its corners."""
    changes = torch.zeros([len(line) for line in cuts], dtype=torch.int64)
    for _, piece in held:
        edges = [
            ((bisect.bisect_left(line, start), 1), (bisect.bisect_left(line, start + size), -1))
            for line, start, size in zip(cuts, piece.offset, piece.size, strict=True)
        ]
        for corner in itertools.product(*edges):
            sign = 1
            for _, change in corner:
                sign *= change
            changes[tuple(place for place, _ in corner)] += sign
    for dim in range(len(cuts)):
        changes = changes.cumsum(dim)
    return changes[tuple(slice(len(line) - 1) for line in cuts)]


def _regions(
    cuts: Sequence[list[int]], wrong: torch.Tensor, held: Sequence[tuple[int, Piece]]
) -> tuple[tuple[Region, ...], int]:
    """The first of the cells that are wrong, neighbours with the same holders as one, and how many
    elements are in all of them."""
    if not bool(wrong.any()):
        return (), 0
    total = int((wrong * _volumes(cuts)).sum())
    regions: list[Region] = []
    for cell in wrong.nonzero().tolist():
        offset = tuple(line[place] for line, place in zip(cuts, cell, strict=True))
        stop = tuple(line[place + 1] for line, place in zip(cuts, cell, strict=True))
        size = tuple(end - start for start, end in zip(offset, stop, strict=True))
        region = Region(offset, size, _holders(offset, held))
        if regions and (joined := _join(regions[-1], region)):
            regions[-1] = joined
        elif len(regions) == MOST_REGIONS:
            break
        else:
            regions.append(region)
    return tuple(regions), total


def _volumes(cuts: Sequence[list[int]]) -> torch.Tensor:
    volumes = torch.ones((), dtype=torch.int64)
    for line in cuts:
        widths = torch.tensor(line).diff()
        volumes = volumes.unsqueeze(-1) * widths
    return volumes


def _holders(index: Index, held: Sequence[tuple[int, Piece]]) -> tuple[int, ...]:
    return tuple(
        sorted(
            rank
            for rank, piece in held
            if all(
                start <= at < start + size
                for at, start, size in zip(index, piece.offset, piece.size, strict=True)
            )
        )
    )


def _join(first: Region, second: Region) -> Region | None:
    """Two boxes as one, where they adjoin and have the same holders."""
    if first.ranks != second.ranks:
        return None
    apart = [
        dim
        for dim, pair in enumerate(zip(first.offset, second.offset, strict=True))
        if pair[0] != pair[1]
    ]
    if len(apart) != 1 or first.offset[apart[0]] + first.size[apart[0]] != second.offset[apart[0]]:
        return None
    dim = apart[0]
    same = all(
        ours == theirs
        for at, (ours, theirs) in enumerate(zip(first.size, second.size, strict=True))
        if at != dim
    )
    size = tuple(n + second.size[dim] if at == dim else n for at, n in enumerate(first.size))
    return Region(first.offset, size, first.ranks) if same else None
