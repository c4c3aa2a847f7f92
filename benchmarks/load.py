"""How busy others keep the machine: what decides whether a timing means anything."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
SHORTEST = 10 / TICKS_A_SECOND  # seconds of which their use can be told


@dataclass(frozen=True)
class CpuUse:
    """A reading of clocks, in seconds from arbitrary starts: the wall's, the processors' time for
    all processes, for this one, and what other virtual machines took of our turns."""

    wall: float
    everybody: float
    own: float
    stolen: float

    @staticmethod
    def now() -> CpuUse:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _, _, _, _, stolen = (int(field) / TICKS_A_SECOND for field in fields)
        return CpuUse(time.monotonic(), user + nice + system, time.process_time(), stolen)


Stretch = tuple[CpuUse, CpuUse]


def other_cores(ranks: Sequence[Stretch]) -> float:
    """Cores that processes other than the ranks, and other virtual machines, kept busy over a
    stretch of time that all ranks spent together."""
    start, end = ranks[0]
    own = sum(end.own - start.own for start, end in ranks)
    others = end.everybody - start.everybody - own + end.stolen - start.stolen
    return max(0.0, others / (end.wall - start.wall))


def median_other_cores(ranks: Sequence[Sequence[Stretch]]) -> float | None:
    """The median over rounds, given the rounds of every rank; None where rounds are so short that
    the processors' clocks, which tick a hundred times a second, cannot tell."""
    lengths = [end.wall - start.wall for start, end in ranks[0]]
    if statistics.median(lengths) < SHORTEST:
        return None
    return statistics.median(other_cores(stretches) for stretches in zip(*ranks, strict=True))


def wait_for_idle(limit: float, period: float = 0.1, tolerated: float = 0.2) -> None:
    """Sleep until others have kept no more than `tolerated` cores busy for a `period`, but no
    longer than `limit` seconds."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        start = CpuUse.now()
        time.sleep(period)
        if other_cores([(start, CpuUse.now())]) <= tolerated:
            return
