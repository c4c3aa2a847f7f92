"""What a rank spent and sent: counters that tests, benchmarks and the demo read."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import record_function


class Stats:
    """Counters of one rank since construction or the last `reset`.

    Attributes:
        seconds: host time by phase: ``"exchange"`` (packing, sending and averaging gradients),
            ``"status"`` (the small all-gather), ``"update"`` (the fused kernel), ``"gather"``
            (waiting for parameters), ``"audit"``. Host time: work that a device still has to do
            when the call returns is not in it.
        calls: collectives by name.
        sent_bytes: bytes this rank puts on the wire, by collective. The volume that the
            algorithm needs, whatever the backend does below: for a buffer of B bytes on N ranks
            (N-1)/N * B for an all-to-all, reduce-scatter or all-gather, twice that for an
            all-reduce.
        exchanges: ``(started, arrived)`` of each bucket of gradients exchanged since the last
            update, by time.perf_counter(), in the order of exchange. ``arrived`` is when
            the wait for it ended, which may be long after; on GPUs when the host went on.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()
        self.exchanges: list[tuple[float, float]] = []

    def reset(self) -> None:
        self.seconds.clear()
        self.calls.clear()
        self.sent_bytes.clear()
        self.exchanges.clear()

    def count(self, name: str, sent_bytes: int) -> None:
        """Note one collective."""
        self.calls[name] += 1
        self.sent_bytes[name] += sent_bytes

    def __repr__(self) -> str:
        seconds = {name: round(spent, 6) for name, spent in self.seconds.items()}
        calls, sent_bytes = dict(self.calls), dict(self.sent_bytes)
        return f"Stats(seconds={seconds}, calls={calls}, sent_bytes={sent_bytes})"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to ``seconds[name]``, labelled for torch.profiler too."""
        start = time.perf_counter()
        with record_function(f"fusedshard.{name}"):
            yield
        self.seconds[name] += time.perf_counter() - start
