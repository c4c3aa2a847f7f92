"""Stretches of memory as boxes of indices, against arrays that hold their own places."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedshard.boxes import boxes_of

SHAPES = st.lists(st.sampled_from([1, 2, 3, 5]), max_size=4)


@st.composite
def stretches(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    """A tensor whose elements are their places in memory, with any order of strides; a stretch."""
    shape = draw(SHAPES)
    order = draw(st.permutations(range(len(shape))))
    memory = torch.arange(math.prod(shape))
    places = [order.index(dim) for dim in range(len(shape))]
    start = draw(st.integers(0, len(memory)))
    length = draw(st.integers(0, len(memory) - start))
    return memory.view([shape[dim] for dim in order]).permute(places), start, length


@settings(deadline=None, max_examples=500)
@given(stretches())
def test_boxes_hold_the_stretch_each_element_once(case: tuple[torch.Tensor, int, int]) -> None:
    whole, start, length = case
    boxes = boxes_of(whole.size(), whole.stride(), start, length)
    assert len(boxes) <= max(1, 2 * whole.dim() - 1)
    stretch = torch.arange(start, start + length)
    seen: list[int] = []
    for box in boxes:
        ends = (offset + size for offset, size in zip(box.offset, box.size, strict=True))
        index = tuple(map(slice, box.offset, ends))
        assert torch.equal(whole[index], box.of(stretch))
        seen += whole[index].flatten().tolist()
    assert sorted(seen) == stretch.tolist()


def test_a_box_is_a_view_of_the_stretch() -> None:
    stretch = torch.zeros(7)
    (first, rows, last) = boxes_of((3, 4), (4, 1), 2, 7)
    assert [box.offset for box in (first, rows, last)] == [(0, 2), (1, 0), (2, 0)]
    assert [box.size for box in (first, rows, last)] == [(1, 2), (1, 4), (1, 1)]
    rows.of(stretch).fill_(1)
    assert stretch.tolist() == [0, 0, 1, 1, 1, 1, 0]
