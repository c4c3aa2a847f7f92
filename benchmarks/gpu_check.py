"""Checks the CUDA part on a machine with a GPU: builds it, tests it, and measures it.

Every stage runs in a process of its own with a time limit, and all of them within eight minutes;
gpu_check.json is written after each. README.md says how to read it. Nothing is downloaded, and the
environment stays as it is: the build goes to a temporary folder.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_runner import Run, Stage, as_json, print_table, write_json

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
TOTAL_SECONDS = 475.0
# Limits in seconds, in the order in which they run. A limit of the tests is for each file of them.
LIMITS = {
    "build": 180,
    "tests": 90,
    "memcheck": 60,
    "racecheck": 60,
    "update": 120,
    "mixed": 60,
    "fingerprint": 30,
    "graph": 40,
    "nccl": 60,
}
NEEDS = ("device", "build")


def all_stages(chosen: Sequence[str], site: Path, *, quick: bool) -> list[Stage]:
    """The chosen stages, behind one that looks for the device."""
    program = (sys.executable, str(HERE / "gpu_stages.py"))
    stages = [Stage("device", (*program, "device"), limit=60)]
    for name in (name for name in LIMITS if name in chosen):
        command: tuple[str, ...] = (*program, name)
        limit = LIMITS[name]
        if name == "build":
            stages.append(Stage(name, (*command, "--site", str(site)), limit, ("device",)))
        elif name == "tests":
            # A process for each file: after an illegal access CUDA refuses all else in a process.
            stages += [
                Stage(f"tests: {path.name}", (*command, "--file", str(path)), limit, NEEDS)
                for path in gpu_tests()
            ]
        else:
            command += ("--quick",) if quick else ()
            stages.append(Stage(name, command, limit, NEEDS))
    return stages


def gpu_tests() -> list[Path]:
    """The files with tests that are marked gpu."""
    return [path for path in sorted(TESTS.glob("test_*.py")) if "mark.gpu" in path.read_text()]


def report_of(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    device = run.outcomes["device"].figures
    build = run.outcomes["build"].figures if "build" in run.outcomes else {}
    built = {"fusedshard": build["fusedshard"]} if build else {}
    return {
        "benchmark": "gpu_check",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": device.get("commit"),
        "machine": device.get("machine", {}),
        "versions": device.get("versions", {}) | built,
        "settings": {"stages": args.stages, "quick": args.quick},
        "stages": as_json(run.outcomes),
    }


def print_summary(run: Run, *, quick: bool) -> None:
    outcomes = run.outcomes.values()
    rows = [(o.name, o.status, f"{o.seconds:.0f}", o.reason) for o in outcomes]
    print_table(("stage", "", "seconds", "reason"), rows)
    bars = [bar for outcome in outcomes for bar in outcome.figures.get("bars", ())]
    if bars:
        print_table(("claim", "wanted", "measured", ""), [bar_row(b, quick=quick) for b in bars])


def bar_row(bar: dict[str, Any], *, quick: bool) -> tuple[str, ...]:
    measured = bar["measured"]
    text = f"{measured['median']:.2f} ({measured['lower']:.2f}-{measured['upper']:.2f})"
    verdict = "met" if bar["met"] else "missed"
    return bar["claim"], bar["wanted"], text, "not judged: --quick" if quick else verdict


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--stages",
        nargs="+",
        choices=LIMITS,
        default=list(LIMITS),
        help="what to run; without build, the fusedshard that is installed is checked",
    )
    parser.add_argument("--quick", action="store_true", help="measure little, to see that it runs")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the JSON")
    parser.add_argument("--keep-build", action="store_true", help="keep the folder of the build")
    return parser.parse_args()


def main() -> int:
    args = parse()
    # So that no stage runs on where this program is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    path = args.out.resolve() / "gpu_check.json"
    scratch = Path(tempfile.mkdtemp(prefix="gpu_check_"))
    site, work = scratch / "site", scratch / "work"
    work.mkdir()
    search_path = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(search_path),
        "PYTHONUNBUFFERED": "1",
    }
    run = Run(work, environment, TOTAL_SECONDS)
    stages = all_stages(args.stages, site, quick=args.quick)
    try:
        run.all(stages, after_each=lambda: report(run, args, path))
    finally:
        if args.keep_build:
            print(f"kept: PYTHONPATH={site}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    if found_device(run):
        print_summary(run, quick=args.quick)
        print(f"written: {path}")
    return int(run.failed)


def found_device(run: Run) -> bool:
    return run.outcomes["device"].status == "passed"


def report(run: Run, args: argparse.Namespace, path: Path) -> None:
    """Unless there is nothing to report: an earlier report is better than that."""
    if found_device(run):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, report_of(run, args))


if __name__ == "__main__":
    sys.exit(main())
