"""Waiting for collectives that were started: in one's own thread, or in another one meanwhile."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol


class Waitable(Protocol):
    def wait(self) -> Any: ...


class Watcher:
    """Waits in a thread of its own, one after the other, for what is handed to it.

    gloo's sends and receives cannot be asked whether they are done, only be waited for; and
    backward must not wait, since the other ranks may be in a collective of the user's. The thread
    starts with the first call and ends with this object.
    """

    def __init__(self) -> None:
        self._handed: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, works: Sequence[Waitable | None]) -> Future[float]:
        """The time of arrival by time.perf_counter(), once all ``works`` are done."""
        if self._thread is None:
            # A daemon: where a rank is lost, the process must end without its answer.
            self._thread = threading.Thread(
                target=_wait_for_all, args=(self._handed,), name="fusedshard", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._handed.put, None)
        arrival: Future[float] = Future()
        self._handed.put((works, arrival))
        return arrival


_Task = tuple[Sequence[Waitable | None], "Future[float]"]


def _wait_for_all(handed: queue.SimpleQueue[_Task | None]) -> None:
    while (task := handed.get()) is not None:
        works, arrival = task
        try:
            _wait(works)
            arrival.set_result(time.perf_counter())
        except Exception as error:
            arrival.set_exception(error)


class Pending:
    """A collective that was started: `wait` returns when its results may be used.

    Args:
        works: what is waited for.
        then: called after that, once.
        watcher: waits elsewhere, where that would hold this thread. None: waiting only orders
            streams, or may not be done elsewhere.
    """

    def __init__(
        self,
        works: Sequence[Waitable | None] = (),
        then: Callable[[], object] | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self._works = works
        self._then = then
        self._watcher = watcher
        self._arrival: Future[float] | None = None

    def watch(self) -> None:
        """From now on `arrived` says whether `wait` would hold this thread."""
        if self._watcher is not None:
            self._arrival = self._watcher.watch(self._works)

    @property
    def arrived(self) -> bool:
        """Whether `wait` returns at once. `watch` was called before."""
        return self._arrival is None or self._arrival.done()

    def wait(self) -> float:
        """Returns the time of arrival by time.perf_counter(), or where this thread did the waiting,
        of the return; with a GPU's collectives it only says when the host went on."""
        arrived = None
        if self._arrival is None:
            _wait(self._works)
        else:  # a second wait for the same gloo work would never return
            arrived = self._arrival.result()
        if self._then is not None:
            self._then()
            self._then = None
        return time.perf_counter() if arrived is None else arrived


@contextmanager
def explaining() -> Iterator[None]:
    """Say what it means where gloo only names a socket."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "process_group: another rank has ended, or did not come to this call within the "
            f"group's timeout; what the ranks share of the optimizer ends with it ({error})"
        ) from error


def _wait(works: Sequence[Waitable | None]) -> None:
    with explaining():
        for work in works:
            if work is not None:
                work.wait()
