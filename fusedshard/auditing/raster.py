"""Who holds what, as a picture's pixels: a row a rank, elements from left to right."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from fusedshard.auditing.pieces import PARAM, Index
from fusedshard.auditing.report import DIFFERENT, AuditReport, ParameterReport, PartReport


class Stretch(NamedTuple):
    """Elements in a row, ``density`` of which are meant: less than 1 for the columns of a matrix,
    which lie between those of others."""

    start: float
    stop: float
    density: float = 1.0


class Placed(NamedTuple):
    """An array, and where its first element is in the row."""

    parameter: str
    part: PartReport
    start: int


class Line(NamedTuple):
    """Arrays laid end to end.

    Attributes:
        arrays: in the report's order.
        numel: elements of all.
        is_state: else there is none, and these are the parameters.
    """

    arrays: Sequence[Placed]
    numel: int
    is_state: bool


def lay_out(report: AuditReport) -> Line:
    """All state but step counts."""
    arrays = [(p, part) for p in report.parameters for part in p.parts if part.part != PARAM]
    state = [pair for pair in arrays if not _is_count(*pair)] or arrays
    chosen = state or [(p, part) for p in report.parameters for part in p.parts]
    edges = [0, *accumulate(math.prod(part.shape) for _, part in chosen)]
    placed = [Placed(p.name, part, start) for (p, part), start in zip(chosen, edges, strict=False)]
    return Line(placed, edges[-1], bool(state))


def _is_count(parameter: ParameterReport, part: PartReport) -> bool:
    return part.shape == () and parameter.shape != ()


def held(line: Line, world_size: int) -> list[list[Stretch]]:
    """By rank."""
    found: list[list[Stretch]] = [[] for _ in range(world_size)]
    for array in line.arrays:
        for share in array.part.shares:
            stretch = stretch_of(array, share.offset, share.size)
            for rank in share.ranks:
                found[rank].append(stretch)
    return found


def overlaps(line: Line, rank: int) -> list[Stretch]:
    return [
        stretch_of(array, region.offset, region.size)
        for array in line.arrays
        for region in array.part.overlaps
        if rank in region.ranks
    ]


def gaps(line: Line) -> list[Stretch]:
    return [
        stretch_of(array, region.offset, region.size)
        for array in line.arrays
        for region in array.part.gaps
    ]


def differing(line: Line, rank: int) -> list[Stretch]:
    """All of each array of which a rank has another copy than most, or of another form."""
    return [
        Stretch(array.start, array.start + math.prod(array.part.shape))
        for array in line.arrays
        if array.part.verdict == DIFFERENT
        and (rank in array.part.differing_ranks or array.part.problem)
    ]


def stretch_of(array: Placed, offset: Index, size: Index) -> Stretch:
    """Of a box: from its first to its last row, in the dimension where it is more than one."""
    shape = array.part.shape
    if len(shape) != len(offset):  # of ranks that disagree about the form
        return Stretch(array.start, array.start + math.prod(shape))
    start, inner = array.start, math.prod(shape)
    for dim, (at, length) in enumerate(zip(offset, size, strict=True)):
        inner //= max(1, shape[dim])
        start += at * inner
        if length != 1:
            held, all_of_them = math.prod(size[dim + 1 :]), max(1, math.prod(shape[dim + 1 :]))
            return Stretch(start, start + length * inner, held / all_of_them)
    return Stretch(start, start + 1)


def coverage(stretches: Sequence[Stretch], numel: int, columns: int) -> np.ndarray:
    """How much of each column's elements they are, from 0 to 1 (more where they overlap)."""
    edges = np.linspace(0, max(1, numel), columns + 1)
    if not stretches:
        return np.zeros(columns)
    starts, stops, densities = np.array(stretches, dtype=float).T
    places = np.concatenate([starts, stops])
    order = np.argsort(places, kind="stable")
    slopes = np.cumsum(np.concatenate([densities, -densities])[order])
    places = places[order]
    areas = np.concatenate([[0], np.cumsum(slopes[:-1] * np.diff(places))])
    return np.diff(np.interp(edges, places, areas)) / np.diff(edges)


def touched(stretches: Sequence[Stretch], numel: int, columns: int, least: int) -> np.ndarray:
    """Columns that hold any of their elements, and as many beside them as make it ``least``."""
    found = np.zeros(columns, dtype=bool)
    scale = columns / max(1, numel)
    for stretch in stretches:
        first, last = int(stretch.start * scale), math.ceil(stretch.stop * scale)
        room = max(0, least - (last - first))
        first = max(0, min(first - room // 2, columns - least))
        found[first : max(last, first + least)] = True
    return found


def labels(line: Line, most: int) -> Iterator[tuple[float, str]]:
    """Middles and names, in their order, of the parameters with faults, and of those that take most
    room."""
    extents: dict[str, tuple[int, int]] = {}
    faulty = set()
    for array in line.arrays:
        start, _ = extents.get(array.parameter, (array.start, 0))
        extents[array.parameter] = start, array.start + math.prod(array.part.shape)
        faulty |= set() if array.part.ok else {array.parameter}
    sizes = {name: stop - start for name, (start, stop) in extents.items()}
    chosen = sorted(sizes, key=lambda name: (name not in faulty, -sizes[name]))[:most]
    room, last = line.numel / 25, -math.inf
    for name, (start, stop) in extents.items():
        middle = (start + stop) / 2
        if name in chosen and (name in faulty or sizes[name] >= room) and middle - last >= room:
            yield middle, name
            last = middle
