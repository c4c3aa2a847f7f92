"""Which elements have no owner or too many, against counting one by one; and tallies of two
copies, against torch."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch

from fusedshard.auditing.coverage import MOST_REGIONS, Coverage, cover
from fusedshard.auditing.details import CHUNK_ELEMENTS, Tally, chunk_lengths, chunks_of
from fusedshard.auditing.pieces import Index, Piece
from fusedshard.auditing.report import Difference, Region

Box = tuple[int, Index, Index]  # rank, offset, size


def covered(shape: Index, boxes: Sequence[Box], copies: int = 1) -> Coverage:
    pieces = [
        (rank, Piece("w", "exp_avg", shape, offset, size, "float32", copies, ()))
        for rank, offset, size in boxes
    ]
    return cover(shape, pieces, copies)


def inside(index: Index, offset: Index, size: Index) -> bool:
    return all(o <= i < o + n for i, o, n in zip(index, offset, size, strict=True))


def test_a_sound_partition() -> None:
    boxes = [(0, (0, 0), (2, 5)), (1, (2, 0), (1, 5)), (2, (3, 0), (4, 3)), (3, (3, 3), (4, 2))]
    assert covered((7, 5), boxes) == Coverage((), (), 0, 0)
    assert covered((), [(3, (), ())]) == Coverage((), (), 0, 0)


def test_a_gap_and_an_overlap_of_stretches() -> None:
    found = covered((100,), [(0, (0,), (40,)), (1, (30,), (20,)), (2, (60,), (40,))])
    assert found == Coverage((Region((50,), (10,), ()),), (Region((30,), (10,), (0, 1)),), 10, 10)


def test_neighbours_with_other_holders_stay_apart() -> None:
    boxes = [(0, (0,), (30,)), (1, (10,), (10,)), (2, (20,), (10,)), (2, (30,), (10,))]
    found = covered((40,), boxes)
    assert found.overlaps == (Region((10,), (10,), (0, 1)), Region((20,), (10,), (0, 2)))


def test_a_rank_that_holds_elements_twice() -> None:
    found = covered((8,), [(1, (0,), (8,)), (1, (2,), (3,))])
    assert found.overlaps == (Region((2,), (3,), (1, 1)),)


def test_nobody_holds_a_scalar() -> None:
    found = covered((), [(0, (), ()), (1, (), ())], copies=3)
    assert (found.gap_elements, found.gaps) == (1, (Region((), (), (0, 1)),))


def test_many_gaps_are_counted_and_the_first_named() -> None:
    boxes = [(0, (2 * i,), (1,)) for i in range(50)]
    found = covered((100,), boxes)
    assert found.gap_elements == 50 and len(found.gaps) == MOST_REGIONS
    assert found.gaps[0] == Region((1,), (1,), ())


@pytest.mark.parametrize("seed", range(40))
def test_random_boxes_against_counting(seed: int) -> None:
    generator = random.Random(seed)
    shape = tuple(generator.randint(1, 6) for _ in range(generator.randint(1, 3)))
    copies = generator.randint(1, 3)
    boxes = []
    for rank in range(generator.randint(1, 6)):
        offset = tuple(generator.randrange(n) for n in shape)
        size = tuple(generator.randint(1, n - o) for n, o in zip(shape, offset, strict=True))
        boxes.append((rank, offset, size))
    found = covered(shape, boxes, copies)
    gaps = overlaps = 0
    for index in itertools.product(*map(range, shape)):
        holders = tuple(rank for rank, offset, size in boxes if inside(index, offset, size))
        gaps += len(holders) < copies
        overlaps += len(holders) > copies
        wrong = [r for r in (*found.gaps, *found.overlaps) if inside(index, r.offset, r.size)]
        if len(holders) == copies:
            assert not wrong
        elif len(found.gaps) < MOST_REGIONS and len(found.overlaps) < MOST_REGIONS:
            assert [region.ranks for region in wrong] == [holders]
    assert (found.gap_elements, found.overlap_elements) == (gaps, overlaps)


def tallied(here: torch.Tensor, there: torch.Tensor, offset: Index = ()) -> Difference | None:
    tally = Tally()
    for ours, theirs in zip(chunks_of(here), chunks_of(there), strict=True):
        tally.add(ours, theirs)
    offset = offset or (0,) * here.dim()
    return tally.found(1, 0, offset, tuple(here.shape), has_majority=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_what_differs(dtype: torch.dtype) -> None:
    there = torch.randn(17, 257, dtype=dtype)
    there[5, 7] = 0.5
    here = there.clone()
    here[16, 3] *= 1.5
    here[5, 7] = 0.75
    found = tallied(here, there, offset=(100, 1000))
    assert found is not None
    gap = (here - there).abs().double()
    assert (found.elements, found.first_index) == (2, (105, 1007))
    assert (complex(found.here), complex(found.there)) == (here[5, 7].item(), there[5, 7].item())
    assert math.isclose(found.max_abs, float(gap.max()), rel_tol=1e-6)
    assert math.isclose(found.max_rel, 0.5, rel_tol=1e-2)


def test_bits_that_are_equal_numbers() -> None:
    found = tallied(torch.tensor([0.0, -0.0, math.inf]), torch.tensor([-0.0, -0.0, math.inf]))
    assert found is not None
    assert (found.elements, found.max_abs, found.max_rel) == (1, 0.0, 0.0)
    assert tallied(torch.tensor([math.nan]), torch.tensor([math.nan])) is None


def test_numbers_that_are_not_finite() -> None:
    nan = tallied(torch.tensor([1.0, math.nan, 5.0]), torch.tensor([1.0, 2.0, 3.0]))
    assert nan is not None and math.isnan(nan.max_abs) and nan.first_index == (1,)
    infinite = tallied(torch.tensor([math.inf, 1.0]), torch.tensor([2.0, 0.0]))
    assert infinite is not None
    assert (infinite.max_abs, infinite.max_rel) == (math.inf, math.inf)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    there = torch.zeros(9, dtype=dtype)
    here = there.clone()
    here[4] = 1
    found = tallied(here, there)
    assert found is not None and (found.elements, found.max_abs) == (1, 1.0)


def test_elements_are_compared_by_index_whatever_their_order_in_memory() -> None:
    there = torch.randn(3, 4, 5, 6)
    here = there.to(memory_format=torch.channels_last)
    assert tallied(here, there) is None
    here[1, 2, 3, 4] += 1
    found = tallied(here, there)
    assert found is not None and found.first_index == (1, 2, 3, 4)


def test_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusedshard.auditing.details.CHUNK_ELEMENTS", 10)
    there = torch.arange(37.0)
    here = there.clone()
    here[[9, 10, 36]] += torch.tensor([1.0, 2.0, 3.0])
    assert [len(chunk) for chunk in chunks_of(there)] == chunk_lengths(37) == [10, 10, 10, 7]
    found = tallied(here, there)
    assert found is not None
    assert (found.elements, found.max_abs, found.first_index) == (3, 3.0, (9,))
    assert CHUNK_ELEMENTS > 10
