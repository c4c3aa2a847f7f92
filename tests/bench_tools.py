"""What the tests of the benchmarks share: runs of their quick form, and what every report holds."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def load_module(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """Import one of the benchmarks' modules, as the scripts do."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


def run(folder: Path, *command: str) -> str:
    """Run a benchmark in its quick form, and return what it printed."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    result = subprocess.run(
        [sys.executable, *command, "--quick", "--out", str(folder)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def only_reports(folder: Path, *names: str) -> list[dict[str, Any]]:
    """The reports, of which no other were written, each with its chart."""
    assert {path.name for path in folder.glob("*.json")} == {f"{name}.json" for name in names}
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
    return [_report(folder / f"{name}.json") for name in names]


def only_report(folder: Path, name: str) -> dict[str, Any]:
    (report,) = only_reports(folder, name)
    return report


def _report(path: Path) -> dict[str, Any]:
    """One that was written, with what every report begins with checked."""
    report: dict[str, Any] = json.loads(path.read_text())
    assert report["machine"]["cpu"] and report["machine"]["cores"] >= 1
    assert report["machine"]["memory_bytes"] > 2**28
    assert {"python", "torch", "fusedshard"} <= set(report["versions"])
    assert report["settings"]["quick"] is True
    assert "commit" in report and report["date"].endswith("+00:00")
    return report


def check_spread(spread: dict[str, float], *, positive: bool = True) -> None:
    assert spread["lower"] <= spread["median"] <= spread["upper"]
    assert spread["lower"] > 0 or not positive


def check_bars(report: dict[str, Any], printed: str, *, positive: bool = True) -> None:
    """``positive``: what is measured cannot be anything else."""
    for bar in report["bars"]:
        check_spread(bar["measured"], positive=positive)
        relation, limit = bar["wanted"].split()
        measured = bar["measured"]["median"]
        assert bar["met"] == (
            measured >= float(limit) if relation == ">=" else measured <= float(limit)
        )
        assert bar["claim"] in printed
