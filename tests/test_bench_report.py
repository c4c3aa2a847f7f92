"""README.md's section on performance is what the reports give, and report.py says where not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from bench_tools import BENCHMARKS, load_module

README = BENCHMARKS.parent / "README.md"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_module(monkeypatch, "report")


@pytest.fixture
def copied(tmp_path: Path) -> tuple[Path, list[str]]:
    """A README and reports of its own, and the options that name them."""
    readme, results = tmp_path / "README.md", tmp_path / "results"
    shutil.copy(README, readme)
    shutil.copytree(BENCHMARKS / "results", results, ignore=shutil.ignore_patterns("*.png"))
    return tmp_path, ["--readme", str(readme), "--results", str(results)]


def test_the_section_is_up_to_date(report: ModuleType) -> None:
    assert report.main(["--check"]) == 0, "run benchmarks/report.py"


def test_another_figure_is_another_section(
    report: ModuleType, copied: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, options = copied
    path = folder / "results" / "mixed.json"
    changed = json.loads(path.read_text())
    before = changed["results"][0]["speed_against_torch"]["median"]
    changed["results"][0]["speed_against_torch"]["median"] = before + 1
    path.write_text(json.dumps(changed))
    readme = folder / "README.md"
    assert report.main([*options, "--check"]) == 1
    assert "not up to date" in capsys.readouterr().err
    assert readme.read_text() == README.read_text(), "--check changes nothing"
    assert report.main(options) == 0
    assert f"{before + 1:.2f} with remainders, fp32 moments" in " ".join(readme.read_text().split())
    assert report.main([*options, "--check"]) == 0
    # All else is as it was.
    for part in (0, 2):
        old, new = (
            text.split("<!-- performance")[part]
            for text in (README.read_text(), readme.read_text())
        )
        assert old == new


def test_a_missing_report_is_named(
    report: ModuleType, copied: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, options = copied
    (folder / "results" / "mixed.json").unlink()
    assert report.main(options) == 2
    assert "holds no mixed.json" in capsys.readouterr().err
    assert (folder / "README.md").read_text() == README.read_text()


def test_quick_and_broken_reports_are_refused(
    report: ModuleType, copied: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, options = copied
    path = folder / "results" / "mixed.json"
    whole = json.loads(path.read_text())
    whole["settings"]["quick"] = True
    for text, wanted in ((json.dumps(whole), "is of a --quick run"), ("{", "is no report")):
        path.write_text(text)
        assert report.main(options) == 2
        assert f"{path}: {wanted}" in capsys.readouterr().err
    assert (folder / "README.md").read_text() == README.read_text()


def test_sources_are_told_as_they_are(report: ModuleType) -> None:
    reports = report.read(BENCHMARKS / "results")
    name = "mixed"
    reports[name]["commit"] = f"{'0123456789' * 4}-dirty"
    reports[name]["other_cores"] = None
    reports[name]["machine"] |= {"cpu": "another"}
    (row,) = [
        line for line in report.render(reports).splitlines() if line.startswith(f"| `{name}` | 20")
    ]
    assert row.split(" | ")[2:] == ["`0123456789-dirty`", "not told", "another |"]


def test_missing_markers_are_named(
    report: ModuleType, copied: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, options = copied
    (folder / "README.md").write_text("## Performance\n")
    assert report.main(options) == 2
    assert "performance: end" in capsys.readouterr().err


def test_missed_claims_are_said(report: ModuleType) -> None:
    reports = report.read(BENCHMARKS / "results")
    bars = [bar for found in reports.values() for bar in found.get("bars", ())]
    section = report.render(reports)
    missed = section.partition("These are missed")[2].partition("<details>")[0]
    for bar in bars:
        shown = f"| {bar['claim']} | {bar['wanted']} |"
        assert shown in section and (shown in missed) != bar["met"]
