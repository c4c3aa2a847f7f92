"""What the stages of gpu_check.py share: how they report, and device time.

harness.py and record.py draw with rich, which need not be installed here.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from gpu_runner import RESULT, SKIPPED, write_json

RICH = ("rich", "rich.console", "rich.progress", "rich.table")


class _Nothing(ModuleType):
    def __getattr__(self, name: str) -> None:
        """Any name can be imported from here."""


@contextmanager
def _rich_or_nothing() -> Iterator[None]:
    """Let modules that import rich for their tables be imported without it."""
    try:
        importlib.import_module("rich")
    except ImportError:
        sys.modules.update({name: _Nothing(name) for name in RICH})
        yield
        for name in RICH:
            del sys.modules[name]
    else:
        yield


with _rich_or_nothing():
    from harness import Samples, Spread, order_of, ratio, rows_beside
    from record import Bar, git_commit, machine, versions

__all__ = [
    "Bar",
    "Samples",
    "Spread",
    "git_commit",
    "machine",
    "order_of",
    "ratio",
    "rows_beside",
    "versions",
]

Work = Callable[[], object]

LEAD_SECONDS = 1e-3
TICKS_PER_SECOND = 2_000_000_000  # about, of the clock that torch.cuda._sleep counts


def save(figures: Mapping[str, Any]) -> None:
    """Report figures; they replace what was reported before."""
    path = os.environ.get(RESULT)
    if path:
        write_json(Path(path), figures)
    else:  # run by hand
        print(json.dumps(figures))


def skip(reason: str) -> NoReturn:
    print(reason, flush=True)
    sys.exit(SKIPPED)


class DeviceClock:
    """Measures what a GPU needs for some work, without the time that the host takes to queue it.

    Before each measurement the L2 cache is filled with other data, and the device kept waiting, so
    that the work is queued as a whole before it begins.
    """

    def __init__(self) -> None:
        nbytes = max(256 << 20, 2 * torch.cuda.get_device_properties(0).L2_cache_size)
        self._other_data = torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def seconds(self, work: Work, lead: float = LEAD_SECONDS) -> float:
        """Of the device. ``lead``: how long it waits, in seconds; more than queueing takes."""
        self._other_data.zero_()
        torch.cuda._sleep(int(lead * TICKS_PER_SECOND))
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def interleaved(variants: Mapping[str, Callable[[], float]], repeats: int) -> Samples:
    """Samples of every variant once a round, each in another order, after one that is not
    counted."""
    samples: Samples = {name: [] for name in variants}
    for turn in range(repeats + 1):
        for name in order_of(list(variants), turn):
            value = variants[name]()
            if turn:
                samples[name].append(value)
    return samples
