"""The picture of an audit: what is on it, by its pixels and by what it is drawn from."""

from __future__ import annotations

import dataclasses
import math
import struct
from pathlib import Path

import numpy as np
import pytest

from fusedshard import AuditReport
from fusedshard.auditing import plot, raster
from fusedshard.auditing.report import Difference, ParameterReport, PartReport, Region, Share

Boxes = list[tuple[int, int, tuple[int, ...]]]  # start, length, ranks


def part(
    name: str, numel: int, boxes: Boxes, verdict: str = "owned once", copies: int = 1
) -> PartReport:
    shares = tuple(Share((start,), (length,), ranks) for start, length, ranks in boxes)
    return PartReport(name, verdict, (numel,), "float32", copies, shares)


def report(*parts: PartReport, kind: str = "sharded", ranks: int = 2) -> AuditReport:
    """Of a parameter for each part."""
    parameters = [ParameterReport(f"p{i}", one.shape, (one,)) for i, one in enumerate(parts)]
    return AuditReport(kind, tuple(f"rank {rank}" for rank in range(ranks)), tuple(parameters))


def pixels_of(found: AuditReport) -> np.ndarray:
    return plot.paint_holders(raster.lay_out(found), found.world_size)[0]


def columns_in(colour: str, row: np.ndarray) -> list[int]:
    from matplotlib.colors import to_rgb

    return np.flatnonzero(np.abs(row - to_rgb(colour)).max(axis=1) < 1e-6).tolist()


def test_who_holds_what() -> None:
    found = report(part("exp_avg", 600, [(0, 100, (0,)), (100, 500, (1,))]))
    pixels = pixels_of(found)
    assert pixels.shape == (2, plot.COLUMNS, 3)
    edge = plot.COLUMNS // 6
    assert columns_in(plot.HELD, pixels[0]) == list(range(edge))
    assert columns_in(plot.HELD, pixels[1]) == list(range(edge, plot.COLUMNS))
    assert columns_in("white", pixels[0]) == list(range(edge, plot.COLUMNS))


def test_step_counts_take_no_room() -> None:
    parts = (part("param", 8, []), part("step", 1, []), part("exp_avg", 8, []))
    step = dataclasses.replace(parts[1], shape=())
    parameter = ParameterReport("p", (8,), (parts[0], step, parts[2]))
    line = raster.lay_out(AuditReport("sharded", ("rank 0",), (parameter,)))
    assert [array.part.part for array in line.arrays] == ["exp_avg"] and line.numel == 8


def test_parameters_where_there_is_no_state() -> None:
    line = raster.lay_out(report(part("param", 8, [(0, 8, (0, 1))])))
    assert (line.numel, line.is_state) == (8, False)


def test_a_fault_of_one_element_among_many_is_seen() -> None:
    numel = 10**9
    difference = Difference(1, 0, True, 1, 1e-7, 1e-7, (5,), "1.0", "2.0")
    everywhere: Boxes = [(0, 1, (0, 1))]
    sound = part("exp_avg", numel, [(0, numel, (0, 1))])
    differs = dataclasses.replace(
        part("exp_avg", 1, everywhere, "different", 2), differences=(difference,)
    )
    lost = dataclasses.replace(
        part("exp_avg", 1, [], "misowned"), gaps=(Region((0,), (1,), ()),), gap_elements=1
    )
    doubled = dataclasses.replace(
        part("exp_avg", 1, everywhere, "misowned"), overlaps=(Region((0,), (1,), (0, 1)),)
    )
    pixels = pixels_of(report(sound, differs, sound, lost, sound, doubled, sound))
    quarter = plot.COLUMNS // 4
    assert pixels.shape[0] == 3  # the last row is for elements of too few
    for row, colour, place in (
        (pixels[1], plot.FAULTY, quarter),
        (pixels[2], plot.TOO_FEW, 2 * quarter),
        (pixels[0], plot.TOO_MANY, 3 * quarter),
        (pixels[1], plot.TOO_MANY, 3 * quarter),
    ):
        seen = columns_in(colour, row)
        assert len(seen) >= plot.LEAST and place in seen
        assert max(seen) - min(seen) == len(seen) - 1 <= plot.LEAST
    assert not columns_in(plot.FAULTY, pixels[0])


@pytest.mark.parametrize(
    ("shape", "offset", "size", "expected"),
    [
        ((4, 6), (1, 0), (2, 6), (6, 18, 1.0)),  # rows
        ((4, 6), (0, 2), (4, 3), (0, 24, 0.5)),  # columns: half of each row
        ((4, 6), (2, 1), (1, 3), (13, 16, 1.0)),  # in a row
        ((4, 6), (3, 5), (1, 1), (23, 24, 1.0)),
        ((), (), (), (0, 1, 1.0)),
        ((2, 3, 4), (1, 1, 0), (1, 2, 4), (16, 24, 1.0)),
    ],
)
def test_where_a_box_is_in_the_row(
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    size: tuple[int, ...],
    expected: tuple[int, int, float],
) -> None:
    placed = raster.Placed("p", PartReport("exp_avg", "", shape, "float32", 1, ()), 100)
    start, stop, density = raster.stretch_of(placed, offset, size)
    assert (start - 100, stop - 100, density) == expected
    indices = np.arange(math.prod(shape)).reshape(shape)
    inside = indices[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
    # As many as there are, and none outside.
    assert (stop - start) * density == inside.size
    assert start - 100 <= inside.min() and inside.max() < stop - 100


def test_coverage_counts_elements() -> None:
    draw = np.random.default_rng(3)
    numel, columns = 840, 24
    counts = np.zeros(numel)
    stretches = []
    for _ in range(50):
        start, stop = np.sort(draw.integers(0, numel + 1, 2))
        stretches.append(raster.Stretch(start, stop, 0.5))
        counts[start:stop] += 0.5
    expected = counts.reshape(columns, -1).mean(axis=1)
    assert np.allclose(raster.coverage(stretches, numel, columns), expected)
    assert not raster.coverage([], numel, columns).any()


def test_cells() -> None:
    """Of three ranks: what is compared, what is not, and what is wrong."""
    same = part("exp_avg", 8, [(0, 8, (0, 1, 2))], "identical", 3)
    gaps = {1: 1e-3, 2: math.nan}
    differs = dataclasses.replace(
        same,
        verdict="different",
        differences=tuple(
            Difference(r, 0, True, 1, gap, 1, (0,), "", "") for r, gap in gaps.items()
        ),
    )
    missing = part("exp_avg_sq", 8, [(0, 8, (0, 2))], "missing", 3)
    shape = dataclasses.replace(same, part="sum", verdict="different", problem="other shapes")
    single = part("square_avg", 8, [(0, 8, (1,))])
    rows = plot.collect(report(same, differs, missing, shape, single, ranks=3))
    assert [cell.words for cell in rows["exp_avg"]] == [
        "same bits",
        "1.0e-03\nin 1 of 2 arrays",
        "nan\nin 1 of 2 arrays",
    ]
    assert [cell.logarithm for cell in rows["exp_avg"][:2]] == pytest.approx(
        [math.nan, -3], nan_ok=True
    )
    assert [cell.colour for cell in rows["exp_avg"]] == [plot.SAME, plot.FAULTY, plot.FAULTY]
    assert [cell.words for cell in rows["exp_avg_sq"]] == ["same bits", "lacks 1", "same bits"]
    assert {cell.words for cell in rows["sum"]} == {"other shape\nor dtype"}
    assert [cell.words for cell in rows["square_avg"]] == ["", "no copies", ""]
    assert [cell.colour for cell in rows["square_avg"]] == [plot.NO_COPY] * 3


def drawn(found: AuditReport, folder: Path) -> np.ndarray:
    from matplotlib.image import imread

    found.plot(folder / "audit.png")
    data = (folder / "audit.png").read_bytes()
    assert struct.unpack(">II", data[16:24]) == (1600, 1000)
    image: np.ndarray = imread(folder / "audit.png")[:, :, :3]
    return image


def pixels_in(colour: str, image: np.ndarray) -> int:
    from matplotlib.colors import to_rgb

    return int((np.abs(image - to_rgb(colour)).max(axis=2) < 0.01).sum())


def test_the_picture_of_a_difference(tmp_path: Path) -> None:
    same = part("exp_avg", 800, [(0, 800, (0, 1))], "identical", 2)
    difference = Difference(1, 0, False, 1, 1e-3, 1, (0,), "", "")
    differs = dataclasses.replace(same, verdict="different", differences=(difference,))
    image = drawn(report(same, same, kind="replicated"), tmp_path)
    assert pixels_in(plot.SAME, image) > 10_000 and pixels_in(plot.FAULTY, image) == 0
    image = drawn(report(same, differs, kind="diverged"), tmp_path)
    assert pixels_in(plot.FAULTY, image) > 10_000  # half of a row
    assert pixels_in(plot.HELD, image) > 100_000


def test_pictures_of_little_and_of_much(tmp_path: Path) -> None:
    drawn(report(ranks=1, kind="single"), tmp_path)
    long = AuditReport("single", ("a/" * 60 + "rank0.pt",), (ParameterReport("n" * 200, (0,), ()),))
    drawn(long, tmp_path)
    ranks = 64
    boxes: Boxes = [(rank * 10, 10, (rank,)) for rank in range(ranks)]
    arrays = [part("exp_avg", 10 * ranks, boxes) for _ in range(500)]
    lost = dataclasses.replace(arrays[0], verdict="misowned", gaps=(Region((0,), (10,), ()),))
    image = drawn(report(*arrays, lost, kind="misowned", ranks=ranks), tmp_path)
    assert pixels_in(plot.TOO_FEW, image) > 10
    assert pixels_in(plot.NO_COPY, image) > 10_000
