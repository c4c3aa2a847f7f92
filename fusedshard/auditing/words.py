"""An audit's report in words."""

from __future__ import annotations

import itertools
import math
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
from fusedshard.display import require_packages

if TYPE_CHECKING:
    from rich.table import Table

MOST_NAMED = 3  # regions or differences of one array in a table


def headline(report: AuditReport) -> str:
    """The finding in one line."""
    if report.ok:
        has_state = any(part.part != PARAM for p in report.parameters for part in p.parts)
        return ("" if has_state else "no optimizer state yet; parameters: ") + _SOUND[report.kind](
            report
        )
    found = [(p, part) for p in _judged(report) for part in p.parts if not part.ok]
    # What has no owner or too many explains more than what differs.
    found.sort(key=lambda pair: pair[1].verdict != MISOWNED)
    parameter, part = found[0]
    broken = sum(not p.ok for p in report.parameters)
    where = f"{broken} of {_counted(len(report.parameters), 'parameter')}"
    finding = finding_in_words(report, part)
    return (
        f"{report.kind}: {where if broken else 'hyperparameters'}; the first: {part.part} of "
        f"{parameter.name}: {finding}"
    )


def _judged(report: AuditReport) -> tuple[ParameterReport, ...]:
    return report.parameters + report.groups


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
    values = f"{found.here} here, {found.there} there"
    if not found.first_index:
        return f"{here} differs from {others}: {values}"
    return (
        f"{here} differs from {others} in {_counted(found.elements, 'element')}, by up to "
        f"{_size(found.max_abs)} ({found.max_rel:.3g} relative), first at {found.first_index}: "
        f"{values}"
    )


def _size(gap: float) -> str:
    return "NaN" if math.isnan(gap) else f"{gap:.3g}"


def _regions_in_words(
    report: AuditReport, regions: Sequence[Region], total: int, copies: int
) -> Iterator[str]:
    wanted = "one owner" if copies == 1 else f"{copies} owners"
    for region in regions[:MOST_NAMED]:
        owners = ", ".join(report.ranks[rank] for rank in region.ranks) or "nobody"
        where = f"{_box(region.offset, region.size)} " if region.size else ""
        yield f"{where}held by {owners}, wanted {wanted}"
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
    """Rows of parameters that follow each other and are alike in what was found are one, unless
    ``every`` is to have its own. Needs rich."""
    require_packages("rich")
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=Text(report.headline), title_justify="left", show_lines=False)
    for column in ("parameters", "elements", "found"):
        shown.add_column(column, justify="right" if column == "elements" else "left")
    sound_groups = all(group.ok for group in report.groups)
    for reports, note in (
        (report.parameters, ""),
        (() if sound_groups else report.groups, " (hyperparameters)"),
        (report.buffers, " (buffers, do not count)"),
    ):
        for alike in _alike(reports, every=every):
            elements = sum(math.prod(p.shape) for p in alike)
            words = "\n".join(_findings(report, alike))
            style = "" if all(p.ok for p in alike) else "yellow" if "not" in note else "bold red"
            name = _group_name(alike) + note
            shown.add_row(Text(name), f"{elements:,}", Text(words or "empty", style=style))
    return shown


def _findings(report: AuditReport, alike: Sequence[ParameterReport]) -> Iterator[str]:
    """Of their parts, those with the same one together."""
    parts: dict[str, list[str]] = {}
    for same in zip(*(parameter.parts for parameter in alike), strict=True):
        finding = finding_in_words(report, same[0])
        if len(same) > 1 and same[0].verdict == DIFFERENT:
            finding = _differences_in_words(report, same)
        parts.setdefault(finding, []).append(same[0].part)
    for finding, names in parts.items():
        yield f"{', '.join(names)}: {finding}"


def _differences_in_words(report: AuditReport, parts: Sequence[PartReport]) -> str:
    """Of arrays that differ on the same ranks."""
    found = [difference for part in parts for difference in part.differences]
    names = ", ".join(report.ranks[rank] for rank in parts[0].differing_ranks)
    largest = max((d.max_abs for d in found), key=lambda gap: (math.isnan(gap), gap))
    elements = _counted(sum(d.elements for d in found), "element")
    return f"differs on {names}, in {elements} in all, by up to {_size(largest)}"


def _alike(
    parameters: Sequence[ParameterReport], *, every: bool
) -> Iterator[list[ParameterReport]]:
    """What follows each other and was found to be the same, but for numbers."""

    def finding(parameter: ParameterReport) -> object:
        stands_alone = any(part.verdict == MISOWNED or part.problem for part in parameter.parts)
        if every or stands_alone:
            return parameter.name
        return [(p.part, p.verdict, p.copies, p.differing_ranks) for p in parameter.parts]

    for _, alike in itertools.groupby(parameters, finding):
        yield list(alike)


def _group_name(alike: Sequence[ParameterReport]) -> str:
    if len(alike) == 1:
        return alike[0].name
    return f"{alike[0].name} … {alike[-1].name} ({len(alike)})"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
