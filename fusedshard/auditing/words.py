"""An audit's report in words."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from fusedshard.auditing.pieces import PARAM, Index
from fusedshard.auditing.report import (
    DIFFERENT,
    IDENTICAL,
    MISOWNED,
    MISSING,
    OWNED_ONCE,
    AuditReport,
    Difference,
    ParameterReport,
    PartReport,
    Region,
)

if TYPE_CHECKING:
    from rich.table import Table

MOST_NAMED = 3  # regions or differences of one array in a table


def headline(report: AuditReport) -> str:
    """The finding in one line."""
    if report.ok:
        return _SOUND[report.kind](report)
    found = [(p, part) for p in report.parameters for part in p.parts if not part.ok]
    # What has no owner or too many explains more than what differs.
    found.sort(key=lambda pair: pair[1].verdict != MISOWNED)
    parameter, part = found[0]
    broken = {p.name for p, _ in found}
    finding = finding_in_words(report, part)
    count = f"{len(broken)} of {_counted(len(report.parameters), 'parameter')}"
    return f"{report.kind}: {count}, first {part.part} of {parameter.name}: {finding}"


def _hybrid(report: AuditReport) -> str:
    parts = [part for p in report.parameters for part in p.parts]
    copies = {part.copies for part in parts if part.part != PARAM and part.shape != ()}
    if len(copies) == 1:
        return f"sharded, each element on {copies.pop()} ranks, identical"
    return "in part replicated, identical; in part sharded, each element owned as it should be"


_SOUND: dict[str, Callable[[AuditReport], str]] = {
    "single": lambda report: "one rank: nothing to compare",
    "replicated": lambda report: "replicated, identical",
    "sharded": lambda report: "sharded, each element owned once",
    "hybrid": _hybrid,
}


def finding_in_words(report: AuditReport, part: PartReport) -> str:
    """What was found of one array."""
    if part.verdict == IDENTICAL:
        return f"identical on {_counted(part.copies, 'rank')}"
    if part.verdict == OWNED_ONCE:
        return "each element owned once"
    found = [part.problem] if part.problem else []
    if part.verdict == MISOWNED:
        found += _regions_in_words(report, part.gaps, part.gap_elements, part.copies)
        found += _regions_in_words(report, part.overlaps, part.overlap_elements, part.copies)
    if part.verdict == MISSING and not part.problem:
        found += _regions_in_words(report, part.gaps, part.gap_elements, part.copies)
    if part.verdict == DIFFERENT:
        found += [difference_in_words(report, d) for d in part.differences[:MOST_NAMED]]
        more = len(part.differences) - MOST_NAMED
        found += [f"and {more} more"] if more > 0 else []
    return "; ".join(found)


def difference_in_words(report: AuditReport, found: Difference) -> str:
    """One rank's copy against another's."""
    here, there = report.ranks[found.rank], report.ranks[found.reference]
    others = "most others" if found.has_majority and report.world_size > 2 else there
    index = ", ".join(map(str, found.first_index))
    return (
        f"{here} differs from {others} in {_counted(found.elements, 'element')}, by up to "
        f"{found.max_abs:.3g} ({found.max_rel:.3g} relative), first at ({index}): "
        f"{found.here} for {found.there}"
    )


def _regions_in_words(
    report: AuditReport, regions: Sequence[Region], total: int, copies: int
) -> Iterator[str]:
    wanted = "one owner" if copies == 1 else f"{copies} owners"
    for region in regions[:MOST_NAMED]:
        owners = ", ".join(report.ranks[rank] for rank in region.ranks) or "nobody"
        where = _box(region.offset, region.size)
        yield f"{where} held by {owners}, wanted {wanted}"
    if len(regions) > MOST_NAMED:
        yield f"{_counted(total, 'element')} in all"


def _box(offset: Index, size: Index) -> str:
    """Elements as one would index them."""
    spans = [
        str(start) if length == 1 else f"{start}:{start + length}"
        for start, length in zip(offset, size, strict=True)
    ]
    return f"[{', '.join(spans)}]"


def table(report: AuditReport, *, every: bool = False) -> Table:
    """Rows of parameters that follow each other and are alike in everything are one, unless
    ``every`` is to have its own. Needs rich."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=Text(report.headline), title_justify="left", show_lines=False)
    for column in ("parameters", "elements", "found"):
        shown.add_column(column, justify="right" if column == "elements" else "left")
    for parameters, is_buffer in ((report.parameters, False), (report.buffers, True)):
        for alike in _alike(report, parameters, every=every):
            elements = sum(_numel(p.shape) for p in alike)
            words = "\n".join(_findings(report, alike[0]))
            style = "" if all(p.ok for p in alike) else "yellow" if is_buffer else "bold red"
            name = _group_name(alike) + (" (buffers)" if is_buffer else "")
            shown.add_row(Text(name), f"{elements:,}", Text(words or "empty", style=style))
    return shown


def _findings(report: AuditReport, parameter: ParameterReport) -> Iterator[str]:
    """Of its parts, those with the same one together."""
    parts: dict[str, list[str]] = {}
    for part in parameter.parts:
        parts.setdefault(finding_in_words(report, part), []).append(part.part)
    for finding, names in parts.items():
        yield f"{', '.join(names)}: {finding}"


def _alike(
    report: AuditReport, parameters: Sequence[ParameterReport], *, every: bool
) -> Iterator[list[ParameterReport]]:
    def finding(parameter: ParameterReport) -> object:
        if every or not parameter.ok:
            return parameter.name
        return [(part.part, part.verdict, part.copies) for part in parameter.parts]

    for _, alike in itertools.groupby(parameters, finding):
        yield list(alike)


def _group_name(alike: Sequence[ParameterReport]) -> str:
    if len(alike) == 1:
        return alike[0].name
    return f"{alike[0].name} … {alike[-1].name} ({len(alike)})"


def _numel(shape: Index) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
