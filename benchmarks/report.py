"""README.md's section on performance, written from the reports in results/ alone.

    python benchmarks/report.py [--check]

`--check` changes nothing, and exits with 1 where the section is not what the reports give.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import report_sections
from report_tables import MissingReport, Report, Reports

HERE = Path(__file__).resolve().parent
BEGIN = "<!-- performance: written by benchmarks/report.py -->"
END = "<!-- performance: end -->"


def read(folder: Path) -> Reports:
    """All reports of a folder, by name.

    Raises:
        ValueError: a file is no report, or one of a quick run, which means nothing.
    """
    return Reports((path.stem, _read(path)) for path in sorted(folder.glob("*.json")))


def _read(path: Path) -> Report:
    try:
        report: Report = json.loads(path.read_text())
        quick = report["settings"]["quick"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: is no report: {error!r}") from error
    if quick:
        raise ValueError(f"{path}: is of a --quick run, whose figures mean nothing")
    return report


def render(reports: Reports) -> str:
    """Raises MissingReport."""
    return "\n\n".join(section(reports) for section in report_sections.SECTIONS)


def insert(text: str, section: str) -> str:
    """`text` with what stands between the markers replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README: wanted the lines {BEGIN} and {END}, in this order")
    return f"{before}{begin}\n\n{section}\n\n{end}{after}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="README.md's section on performance.")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="the reports")
    parser.add_argument("--readme", type=Path, default=HERE.parent / "README.md")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    before = args.readme.read_text()
    try:
        after = insert(before, render(read(args.results)))
    except MissingReport as missing:
        print(f"{args.results}: holds no {missing}.json", file=sys.stderr)
        return 2
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.check and after != before:
        print(f"{args.readme}: not up to date: run {HERE.name}/report.py", file=sys.stderr)
        return 1
    if not args.check:
        args.readme.write_text(after)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
