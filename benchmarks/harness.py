"""Interleaved timing, and the statistics of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from load import CpuUse, Stretch, wait_for_idle
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Samples = dict[str, list[float]]
T = TypeVar("T")


def order_of(names: Sequence[str], turn: int) -> list[str]:
    """`names` in the order of a turn, a row of a Williams square (E. J. Williams, 1949): over as
    many turns as names, twice as many where these are odd, each name stands equally often in every
    place, and behind every other one, whatever that has left in the caches."""
    count = len(names)
    places = [(place + 1) // 2 if place % 2 else -place // 2 for place in range(count)]
    backwards = count % 2 and turn // count % 2
    return [names[(place + turn) % count] for place in (places[::-1] if backwards else places)]


@dataclass
class Timing:
    """Seconds of each variant, round by round, and this process's view of each round's load."""

    samples: Samples
    rounds: list[Stretch]


def interleave(
    variants: Mapping[str, Callable[[], float]],
    repeats: int,
    *,
    before_round: Callable[[], object],
    progress: bool = True,
) -> Timing:
    """Run every variant once a round, each in another order, after one that is not counted.

    Each variant returns the seconds to be counted. With a process group every rank must call this
    with the same variants: they are then called in the same order everywhere.
    """
    timing = Timing({name: [] for name in variants}, [])
    with progress_bar(progress) as bar:
        task = bar.add_task("", total=(repeats + 1) * len(variants))
        for turn in range(repeats + 1):
            before_round()
            start, seconds = CpuUse.now(), {}
            for name in order_of(list(variants), turn):
                bar.update(task, description=name)
                seconds[name] = variants[name]()
                bar.advance(task)
            if turn:
                timing.rounds.append((start, CpuUse.now()))
                for name in variants:
                    timing.samples[name].append(seconds[name])
    return timing


def progress_bar(shown: bool) -> Progress:
    """On a terminal's stderr; without a trace once it is done."""
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    shown = shown and console.is_terminal
    return Progress(*columns, console=console, disable=not shown, transient=True)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles, in the unit of the values."""

    median: float
    lower: float
    upper: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return Spread(values[0], values[0], values[0])
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(median, lower, upper)

    def scaled(self, factor: float) -> Spread:
        return Spread(self.median * factor, self.lower * factor, self.upper * factor)

    def text(self, scale: float = 1.0, digits: int = 2) -> str:
        values = (self.median, self.lower, self.upper)
        median, lower, upper = (f"{value * scale:.{digits}f}" for value in values)
        return f"{median} ({lower}-{upper})"


def ratio(samples: Samples, name: str, base: str) -> Spread:
    """Of samples[name] / samples[base], taken round by round.

    Both numbers of a pair come from one round, so that slow drift of the machine cancels.
    """
    pairs = zip(samples[name], samples[base], strict=True)
    return Spread.of([value / reference for value, reference in pairs])


def rows_beside(samples: Samples, base: str, nbytes: int | None = None) -> list[dict[str, Any]]:
    """What a report says of each contender beside one of them; ``nbytes``: that each reads."""
    found = []
    for name, seconds in samples.items():
        spread = Spread.of(seconds)
        bandwidth = {} if nbytes is None else {"gigabytes_per_second": nbytes / spread.median / 1e9}
        found.append(
            {
                "name": name,
                "seconds": asdict(spread),
                **bandwidth,
                "time_against_base": asdict(ratio(samples, name, base)),
                "samples": seconds,
            }
        )
    return found


def slowest_rank(samples: Samples) -> Samples:
    """Each sample as the slowest rank saw it. Collective."""
    ranks = gather(samples)
    return {
        name: [max(values) for values in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in samples
    }


def gather(value: T) -> list[T]:
    """Every rank's value, in rank order. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def start_round(idle_wait: float) -> None:
    """Wait until the machine is idle, as `wait_for_idle` does, together. Collective."""
    if dist.get_rank() == 0:
        wait_for_idle(idle_wait)
    dist.barrier()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch's number of threads, which fusedshard follows."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
