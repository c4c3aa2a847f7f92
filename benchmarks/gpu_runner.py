"""Runs programs one after another, each within its own time, and keeps what they report.

A stage is a program. It exits with 0 where it passed, with `SKIPPED` where it cannot run here, and
otherwise has failed; its last line of output says why. It may write figures, a JSON object, to the
file that the environment variable STAGE_RESULT names, as often as it likes: the last ones count
even where it fails or runs out of time.

Needs Python's own library alone, so that nothing can keep it from reporting; rich draws the tables
where it is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SKIPPED = 77  # as automake has it
RESULT = "STAGE_RESULT"
TAIL_LINES = 40
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Stage:
    """A program with a time limit.

    Attributes:
        needs: stages that must not have failed or been skipped before it, where they are run.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    needs: tuple[str, ...] = ()


@dataclass
class Outcome:
    """What became of a stage: passed, failed, skipped or timeout, and why."""

    name: str
    status: str
    seconds: float = 0.0
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    output: list[str] = field(default_factory=list)

    @property
    def bad(self) -> bool:
        return self.status in ("failed", "timeout")


class Run:
    """Stages run in order, in a folder that is theirs.

    Args:
        folder: working directory of all stages.
        environment: of all stages.
        seconds: after which no stage runs on.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], seconds: float) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._folder, self._environment = folder, environment
        self._end = time.monotonic() + seconds

    def all(self, stages: Sequence[Stage], after_each: Callable[[], object]) -> None:
        for stage in stages:
            self.outcomes[stage.name] = outcome = self._one(stage)
            after_each()
            if outcome.status == "skipped" and not outcome.seconds and stage.needs:
                continue  # the stage that it needs has said why
            print(f"{stage.name}: {outcome.status} after {outcome.seconds:.0f} s", end="")
            print(f": {outcome.reason}" if outcome.reason else "", flush=True)

    @property
    def failed(self) -> bool:
        return any(outcome.bad for outcome in self.outcomes.values())

    def _one(self, stage: Stage) -> Outcome:
        for name in stage.needs:
            needed = self.outcomes.get(name)
            if needed is not None and needed.status != "passed":
                # Of a chain of these the first reason is the true one.
                reason = needed.reason if needed.status == "skipped" else f"{name}: {needed.reason}"
                return Outcome(stage.name, "skipped", reason=reason)
        limit = min(stage.limit, self._end - time.monotonic())
        if limit <= 0:
            return Outcome(stage.name, "skipped", reason="no time was left for it")
        print(f"{stage.name}: {limit:.0f} s at most", flush=True)
        return self._run(stage, limit)

    def _run(self, stage: Stage, limit: float) -> Outcome:
        result, log = self._folder / "result.json", self._folder / "output.txt"
        result.unlink(missing_ok=True)
        start = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                stage.command,
                cwd=self._folder,
                env={**self._environment, RESULT: str(result)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                lines = _follow(process, log, start + limit)
                code = process.poll()
            finally:
                _end_group(process)
        figures = json.loads(result.read_text()) if result.exists() else {}
        status, reason = _verdict(code, lines, limit)
        seconds = time.monotonic() - start
        return Outcome(stage.name, status, seconds, reason, figures, lines[-TAIL_LINES:])


def _follow(process: subprocess.Popen[bytes], log: Path, end: float) -> list[str]:
    """Print the lines of a log until the process ends or its time does, and return them."""
    lines: list[str] = []
    rest, ended = "", False
    with log.open(errors="replace") as file:
        while not ended:
            ended = process.poll() is not None or time.monotonic() > end
            *whole, rest = (rest + file.read()).split("\n")
            whole += [rest] if ended and rest else []
            for line in whole:
                print(f"  {line}", flush=True)
            lines += whole
            time.sleep(0 if ended else POLL_SECONDS)
    return lines


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what the process has left behind, and itself if it still runs."""
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _verdict(code: int | None, lines: Sequence[str], limit: float) -> tuple[str, str]:
    """Status and reason."""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    if code is None:
        return "timeout", f"it ran longer than {limit:.0f} s; last: {last}"
    if code == 0:
        return "passed", ""
    if code == SKIPPED:
        return "skipped", last
    how = f"exit status {code}" if code > 0 else signal.Signals(-code).name
    return "failed", f"{how}: {last}"


def write_json(path: Path, value: Any) -> None:
    """All of it or nothing, whenever this process is stopped."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value, indent=1) + "\n")
    new.replace(path)


def as_json(outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    return [asdict(outcome) for outcome in outcomes.values()]


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """By rich where it is installed, else in plain columns."""
    try:
        table_module = importlib.import_module("rich.table")
        console = importlib.import_module("rich.console").Console(width=None if _wide() else 160)
    except ImportError:
        widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
        for row in [columns, *rows]:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print("  ".join(cells).rstrip())
        return
    table = table_module.Table(*columns)
    escape = importlib.import_module("rich.markup").escape
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    console.print(table)


def _wide() -> bool:
    return os.isatty(1)
