"""A picture of an audit: who holds what, and how far copies are apart."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusedshard.auditing.pieces import PARAM
from fusedshard.auditing.report import DIFFERENT, MISSING, AuditReport, PartReport
from fusedshard.display import require_packages

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart with any kind of colour vision.
HELD = "#0072B2"
FAULTY = "#D55E00"
TOO_MANY = "#000000"
TOO_FEW = "#CC79A7"
SAME = "#B7E1CD"
NO_COPY = "#EEEEEE"

COLUMNS = 1200  # pixels of the row of elements
LEAST = 5  # of them that a fault has, however few elements it is
MOST_NUMBERED = 16  # ranks, beyond which cells are too narrow for numbers
MOST_NAMED = 12  # parameters
MOST_TICKS = 24
LONGEST_NAME = 28


def draw(report: AuditReport, path: Path) -> None:
    """Write the figure, 1600 by 1000 pixels."""
    require_packages("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 10), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    headline = textwrap.fill(report.headline, 150, max_lines=2, placeholder=" …")
    figure.suptitle(headline, fontsize=14)
    holders, differences = figure.subplots(2, 1, height_ratios=(3, 2))
    draw_holders(holders, report)
    draw_differences(figure, differences, report)
    figure.savefig(path)


# -- who holds what -------------------------------------------------------------------------------


def draw_holders(axes: Axes, report: AuditReport) -> None:
    """A row a rank; where elements have too few owners, one more that says so."""
    from matplotlib.patches import Patch

    from fusedshard.auditing import raster

    line = raster.lay_out(report)
    pixels, marks = paint_holders(line, report.world_size)
    rows = len(pixels)
    for rank in range(1, report.world_size):
        axes.axhline(rank - 0.5, color="white", linewidth=2 if report.world_size <= 16 else 0.5)
    extent = (0, max(1, line.numel), rows - 0.5, -0.5)
    axes.imshow(pixels, extent=extent, aspect="auto", interpolation="nearest")
    ticks = {rank: shorten(report.ranks[rank]) for rank in _ticks(report.world_size)}
    if rows > report.world_size:
        axes.axhline(rows - 1.5, color="black", linewidth=0.8)
        ticks = {row: name for row, name in ticks.items() if rows - row > rows / MOST_TICKS}
        ticks[rows - 1] = "too few"
    axes.set_yticks(list(ticks), list(ticks.values()))
    places = dict(raster.labels(line, MOST_NAMED))
    axes.set_xticks(list(places), [shorten(name) for name in places.values()], fontsize=9)
    what = "optimizer state" if line.is_state else "parameters (there is no optimizer state)"
    axes.set_title(f"Who holds which of {line.numel:,} elements of {what}", loc="left")
    axes.set_xlabel(
        "all arrays end to end; named: large parameters, and those with faults; paler: some of a "
        "column's elements"
    )
    handles = [Patch(color=colour, label=label) for colour, label in marks.items()]
    axes.legend(
        handles=handles, ncols=len(handles), loc="lower right", bbox_to_anchor=(1, 1), frameon=False
    )


def paint_holders(line: Any, world_size: int) -> tuple[np.ndarray, dict[str, str]]:
    """Red, green and blue of each pixel, and what the colours mean that are there."""
    import numpy as np

    from fusedshard.auditing import raster

    marks = {HELD: "held"}
    pixels = np.ones((world_size, COLUMNS, 3))
    for rank, stretches in enumerate(raster.held(line, world_size)):
        held = raster.coverage(stretches, line.numel, COLUMNS)
        shade = np.sqrt(held.clip(0, 1))[:, None]
        pixels[rank] = 1 - shade * (1 - _rgb(HELD))
        for faults, colour, label in (
            (raster.differing(line, rank), FAULTY, "an array with a difference"),
            (raster.overlaps(line, rank), TOO_MANY, "held by too many"),
        ):
            pixels[rank, raster.touched(faults, line.numel, COLUMNS, LEAST)] = _rgb(colour)
            marks |= {colour: label} if faults else {}
    if gaps := raster.gaps(line):
        strip = np.ones((1, COLUMNS, 3))
        strip[:, raster.touched(gaps, line.numel, COLUMNS, LEAST)] = _rgb(TOO_FEW)
        pixels = np.concatenate([pixels, strip])
        marks[TOO_FEW] = "held by too few"
    return pixels, marks


def _rgb(colour: str) -> np.ndarray:
    import numpy as np
    from matplotlib.colors import to_rgb

    return np.array(to_rgb(colour))


# -- differences ----------------------------------------------------------------------------------


class Cell:
    """All arrays of one part on one rank.

    Attributes:
        compared: arrays of which the rank holds some, and others must have the same.
        single: arrays of which it holds some, alone.
        differing: arrays of which its copy differs.
        lacking: arrays that it should hold.
        unlike: arrays whose shape or dtype is not the same on all ranks.
        largest: absolute difference; NaN where one cannot be told.
    """

    def __init__(self) -> None:
        self.compared = self.single = self.differing = self.lacking = self.unlike = 0
        self.largest = 0.0

    def add(self, part: PartReport, rank: int) -> None:
        is_holder = any(rank in share.ranks for share in part.shares)
        self.compared += is_holder and part.copies > 1
        self.single += is_holder and part.copies == 1
        self.lacking += part.verdict == MISSING and not is_holder
        self.unlike += is_holder and part.verdict == DIFFERENT and bool(part.problem)
        gaps = [found.max_abs for found in part.differences if found.rank == rank]
        self.differing += bool(gaps)
        if any(map(math.isnan, [self.largest, *gaps])):
            self.largest = math.nan
        else:
            self.largest = max([self.largest, *gaps])

    @property
    def is_faulty(self) -> bool:
        return bool(self.differing or self.lacking or self.unlike)

    @property
    def colour(self) -> str:
        if self.is_faulty:
            return FAULTY
        return SAME if self.compared else NO_COPY

    @property
    def logarithm(self) -> float:
        """Of the largest difference, NaN where there is none to show by a colour."""
        is_shown = self.differing and 0 < self.largest < math.inf
        return math.log10(self.largest) if is_shown else math.nan

    @property
    def words(self) -> str:
        found = []
        if self.differing:
            found.append(f"{self.largest:.1e}\nin {self.differing} of {self.compared} arrays")
        if self.lacking:
            found.append(f"lacks {self.lacking}")
        if self.unlike and not self.lacking:
            found.append("other shape\nor dtype")
        if found:
            return "\n".join(found)
        return "same bits" if self.compared else "no copies" if self.single else ""


def collect(report: AuditReport) -> dict[str, list[Cell]]:
    """Cells of all ranks by part, and for buffers."""
    rows: dict[str, list[Cell]] = {}
    for name, part in _parts(report):
        cells = rows.setdefault(name, [Cell() for _ in report.ranks])
        for rank, cell in enumerate(cells):
            cell.add(part, rank)
    return rows


def _parts(report: AuditReport) -> Iterator[tuple[str, PartReport]]:
    for parameter in report.parameters:
        for part in parameter.parts:
            yield ("parameters" if part.part == PARAM else part.part), part
    for buffer in report.buffers:
        for part in buffer.parts:
            yield "buffers\n(do not count)", part


def draw_differences(figure: Figure, axes: Axes, report: AuditReport) -> None:
    """A row a part, a column a rank: green is the same, colours from yellow to red say how far."""
    import numpy as np

    rows = collect(report)
    cells = [cell for row in rows.values() for cell in row]
    title = f"Largest absolute difference from the copy that most ranks have{_summary(cells)}"
    axes.set_title(title, loc="left")
    if not rows:
        axes.set_axis_off()
        return
    ground = np.array([[_rgb(cell.colour) for cell in row] for row in rows.values()])
    axes.imshow(ground, aspect="auto", interpolation="nearest")
    values = np.array([[cell.logarithm for cell in row] for row in rows.values()])
    if not np.isnan(values).all():
        low, high = np.nanmin(values), np.nanmax(values)
        image = axes.imshow(
            values, aspect="auto", interpolation="nearest", cmap="YlOrRd",
            vmin=math.floor(low) - 1, vmax=math.ceil(high) + 1,
        )  # fmt: skip
        figure.colorbar(image, ax=axes, label="log10 of the difference")
    kept = _ticks(report.world_size)
    axes.set_xticks(kept, [shorten(report.ranks[rank]) for rank in kept])
    if report.world_size > 8:
        axes.tick_params(axis="x", rotation=45)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xticks([rank + 0.5 for rank in range(report.world_size - 1)], minor=True)
    axes.set_yticks([row + 0.5 for row in range(len(rows) - 1)], minor=True)
    axes.grid(which="minor", color="white", linewidth=2 if report.world_size <= 16 else 0.5)
    axes.tick_params(which="minor", length=0)
    if report.world_size <= MOST_NUMBERED:
        for y, row in enumerate(rows.values()):
            for x, cell in enumerate(row):
                axes.text(
                    x, y, cell.words, ha="center", va="center", fontsize=9,
                    bbox={"color": "white", "alpha": 0.6, "pad": 1} if cell.is_faulty else None,
                )  # fmt: skip


def _summary(cells: Sequence[Cell]) -> str:
    if any(cell.is_faulty for cell in cells):
        return ""
    if any(cell.compared for cell in cells):
        return ": none, all copies have the same bits"
    return ": there are no copies to compare"


# -- names ----------------------------------------------------------------------------------------


def shorten(text: str, longest: int = LONGEST_NAME) -> str:
    """The end of names such as paths says more than their middle."""
    if len(text) <= longest:
        return text
    kept = longest // 2
    return f"{text[:kept]}…{text[len(text) - longest + kept + 1 :]}"


def _ticks(count: int) -> list[int]:
    return list(range(0, count, -(-count // MOST_TICKS)))
