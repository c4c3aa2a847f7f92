"""Waiting for collectives that were started."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol


class Waitable(Protocol):
    def wait(self) -> Any: ...


class Pending:
    """A collective that was started: `wait` returns when its results may be used.

    Args:
        works: what is waited for.
        then: called after that, once.
        holds_host: whether `wait` holds this thread until the data are there. Else it orders the
            current stream behind them, and returns.
    """

    def __init__(
        self,
        works: Sequence[Waitable | None] = (),
        then: Callable[[], object] | None = None,
        *,
        holds_host: bool = True,
    ) -> None:
        self._works = works
        self._then = then
        self.holds_host = holds_host

    def wait(self) -> float:
        """Returns time.perf_counter() at the end."""
        with explaining():
            for work in filter(None, self._works):
                work.wait()
        if self._then is not None:
            self._then()
            self._then = None
        return time.perf_counter()


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
