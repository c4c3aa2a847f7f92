"""What the sections of report_sections.py are made of: numbers, paragraphs and tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]

WIDTH = 120  # columns of a paragraph


class MissingReport(LookupError):
    """Its argument is the report's name."""


class Reports(dict[str, Report]):
    """By name."""

    def __missing__(self, name: str) -> Report:
        raise MissingReport(name)


def paragraph(*sentences: str) -> str:
    return textwrap.fill(" ".join(sentences), WIDTH, break_long_words=False, break_on_hyphens=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plural(count: int, what: str) -> str:
    return f"{count} {what}" + "s" * (count != 1)


def rows_of(report: Report) -> dict[str, Report]:
    """The rows of a report's results, by name."""
    return {row["name"]: row for row in report["results"]}


def median(row: Report | None, key: str, digits: int = 2, scale: float = 1.0) -> str:
    """Of a spread in a row; empty where there is no such row, or no such figure in it."""
    return f"{row[key]['median'] * scale:.{digits}f}" if row and row.get(key) else ""


def elements(count: int) -> str:
    """1024 is 1 Ki."""
    for unit, size in (("Mi", 1 << 20), ("Ki", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count // size} {unit}"
    return f"{count:,}"


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.{0 if nbytes >= 1e7 else 1}f}"


def volume(nbytes: float) -> str:
    """With its unit."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes / 1e3:.3g} kB"


def processor(report: Report) -> str:
    machine = report["machine"]
    memory = machine["memory_bytes"] / 2**30
    return f"{plural(machine['cores'], 'core')} of {machine['cpu']}, {memory:.0f} GiB of memory"


def busiest(report: Report) -> str:
    """Cores that others kept busy while it was made."""
    measured = [report, *report.get("results", ())]
    known = [found["other_cores"] for found in measured if found.get("other_cores") is not None]
    return f"{max(known):.2f}" if known else "not told"


def commit(report: Report) -> str:
    """Abbreviated; with a mark where the sources differed from it."""
    name, _, dirty = (report["commit"] or "none").partition("-")
    return f"{name[:10]}-{dirty}" if dirty else name[:10]
