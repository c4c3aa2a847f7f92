"""A stretch of a tensor's memory as boxes of its indices: integers alone.

Checkpoints describe parts of a tensor by boxes (an offset and a size in each dimension), whatever
the order of its strides. Consecutive elements of an n-dimensional tensor are at most 2n - 1 boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

Index = tuple[int, ...]


class Box(NamedTuple):
    """Elements ``[offset, offset + size)`` of each dimension, which lie one behind the other.

    Attributes:
        offset, size: one number a dimension.
        order: of the dimensions in memory, the outermost first.
        start: elements of the stretch that lie before it.
    """

    offset: Index
    size: Index
    order: Index
    start: int

    def of(self, stretch: torch.Tensor) -> torch.Tensor:
        """Its elements, as a view of the 1-D stretch with the box's size."""
        mine = stretch.narrow(0, self.start, math.prod(self.size))
        in_memory = mine.view([self.size[dim] for dim in self.order])
        places = sorted(range(len(self.order)), key=self.order.__getitem__)
        return in_memory.permute(places)


def boxes_of(shape: Sequence[int], strides: Sequence[int], start: int, length: int) -> list[Box]:
    """The boxes of elements ``[start, start + length)``, in the order of their memory, of a tensor
    that fills its memory without gaps."""
    order = tuple(sorted(range(len(shape)), key=lambda dim: -strides[dim]))
    boxes, before = [], 0
    for offset, size in _cut(start, start + length, [shape[dim] for dim in order]):
        places = sorted(range(len(order)), key=order.__getitem__)
        first, extent = (tuple(index[at] for at in places) for index in (offset, size))
        boxes.append(Box(first, extent, order, before))
        before += math.prod(size)
    return boxes


def _cut(start: int, stop: int, sizes: Sequence[int]) -> Iterator[tuple[Index, Index]]:
    """Offsets and sizes of elements ``[start, stop)`` of a row-major array."""
    if start == stop:
        return
    if not sizes:
        yield (), ()
        return
    inner = math.prod(sizes[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    if first > last:  # within one row
        yield from _row(last, start, stop, sizes)
        return
    yield from _row(first - 1, start, first * inner, sizes)
    if first < last:
        yield (first, *(0 for _ in sizes[1:])), (last - first, *sizes[1:])
    yield from _row(last, last * inner, stop, sizes)


def _row(row: int, start: int, stop: int, sizes: Sequence[int]) -> Iterator[tuple[Index, Index]]:
    before = row * math.prod(sizes[1:])
    for offset, size in _cut(start - before, stop - before, sizes[1:]):
        yield (row, *offset), (1, *size)
