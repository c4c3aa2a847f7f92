"""What a benchmark leaves behind: where it ran, how busy that was, the bars, and a JSON file."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from harness import Spread
from rich.console import Console
from rich.table import Table

import fusedshard

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
QUICK_RESULTS = HERE / "quick-results"  # which git ignores


@dataclass(frozen=True)
class Bar:
    """A claim about one ratio: `measured.median` is to be at least, or at most, `wanted`."""

    claim: str
    measured: Spread
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool:
        median = self.measured.median
        return (self.at_least is None or median >= self.at_least) and (
            self.at_most is None or median <= self.at_most
        )

    @property
    def wanted(self) -> str:
        return f">= {self.at_least}" if self.at_most is None else f"<= {self.at_most}"

    def as_json(self) -> dict[str, Any]:
        return {
            "claim": self.claim,
            "wanted": self.wanted,
            "measured": asdict(self.measured),
            "met": self.met,
        }


def bars_table(bars: Sequence[Bar], *, quick: bool) -> Table:
    """The bars and whether each is met, which a quick run is too small and too short to tell."""
    table = Table("claim", "wanted", "measured: median (quartiles)", "")
    for bar in bars:
        verdict = "[green]met[/]" if bar.met else "[red]missed[/]"
        verdict = "not judged: --quick" if quick else verdict
        table.add_row(bar.claim, bar.wanted, bar.measured.text(), verdict)
    return table


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Of every benchmark."""
    parser.add_argument("--quick", action="store_true", help="small, only to see that it runs")
    parser.add_argument(
        "--out",
        type=_folder,
        help=f"folder of the JSON and PNG (default: {RESULTS}, with --quick {QUICK_RESULTS})",
    )


def _folder(name: str) -> Path:
    """Made now: not after the measurement should it turn out that it cannot be."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"got {name!r}, wanted a folder: {error}") from None
    return path


def positive(text: str) -> int:
    """An option's value."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted an integer, at least 1")
    return int(text)


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Of those that take times."""
    add_run_options(parser)
    parser.add_argument("--repeats", type=positive, help="rounds that are counted")
    parser.add_argument(
        "--idle-wait",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="begin each round when other processes are idle, after this long at the latest",
    )


def folder_of(args: argparse.Namespace) -> Path:
    """Where the report goes."""
    chosen: Path | None = args.out
    return chosen or (QUICK_RESULTS if args.quick else RESULTS)


def header(benchmark: str, args: argparse.Namespace) -> dict[str, Any]:
    """What every report begins with."""
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "machine": machine(),
        "versions": versions(),
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
    }


def busy(other_cores: float | None) -> str:
    if other_cores is None:
        return "too short to tell how many cores others kept busy"
    return f"others kept {other_cores:.2f} cores busy"


def machine() -> dict[str, Any]:
    cpus = [line for line in _lines("/proc/cpuinfo") if line.startswith(("model name", "CPU part"))]
    memory = [line for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    return {
        "cpu": cpus[0].split(":", 1)[1].strip() if cpus else platform.processor(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(memory[0].split()[1]) * 1024,
        "kernel": platform.release(),
        "transparent_hugepage": _lines("/sys/kernel/mm/transparent_hugepage/enabled"),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("fusedshard", "deepspeed", "torchao"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The commit of these sources, with "-dirty" where they, or the fusedshard that is installed,
    differ from it."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return found if found.endswith("-dirty") or is_installed() else f"{found}-dirty"


def is_installed() -> bool:
    """Whether the fusedshard that is imported has these sources' Python."""
    installed, sources = Path(fusedshard.__file__).parent, HERE.parent / "fusedshard"
    files = (path.relative_to(sources) for path in sources.rglob("*.py"))
    return all(
        (installed / file).is_file()
        and (installed / file).read_bytes() == (sources / file).read_bytes()
        for file in files
    )


def open_console() -> Console:
    """Wide enough for the tables: a narrower terminal breaks their lines, and cuts no number."""
    return Console(width=max(Console().width, 160))


def write(
    report: dict[str, Any], folder: Path, name: str, console: Console, indent: int | None = 1
) -> None:
    """Write `report` as NAME.json, and say where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(report, indent=indent) + "\n")
    console.print(f"written: {path}", soft_wrap=True)
