"""What happens to gradients while backward goes on: hooks that send buckets as they fill."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn.parallel import DistributedDataParallel

from fusedshard.exchange import GradientExchange
from fusedshard.native import BACKENDS

_engine: Any = torch.autograd.Variable._execution_engine

# Who has a gradient of which backward, until it ends; one that fails leaves its entry.
_taking_part: dict[int, list[weakref.ref[BackwardHooks]]] = {}


class BackwardHooks:
    """Starts the exchange of each bucket when all its gradients are there, in bucket order.

    Nothing here waits for another rank, which may itself be waiting in a collective of the user's
    inside its backward: where a parameter is not used, its bucket and those behind it are left to
    the end of backward, and what would have to wait for a lane to `complete`. (A backend whose
    waiting only orders streams has lanes enough.) Where means overwrite gradients, nothing is sent
    before the end of backward, when hooks of the user's have seen them, too.

    Args:
        number: of the optimizer, the same on every rank.
        exchange: where the gradients go. Autograd holds this object by weak reference only.
        device: of all parameters.
        ended: a method to call when a backward has ended, instead of sending the rest.
    """

    def __init__(
        self,
        number: int,
        exchange: GradientExchange,
        device: torch.device,
        ended: weakref.WeakMethod[Any] | None,
    ) -> None:
        self.syncing = True
        self.number = number
        self._exchange = exchange
        self._device, self._backend = device, BACKENDS[device.type]
        self._ended = ended
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._tasks: set[int] = set()  # backwards of this cycle
        self._lock = threading.RLock()  # several may go on at once
        self._missing: list[int] = []  # gradients that each bucket waits for
        self._arrived: set[int] = set()  # in this cycle
        self._usual: set[int] | None = None  # those that ever came; at first all are waited for
        self._streams: set[Any] = set()  # on which gradients were made
        self._wrapped: bool | None = None  # in DDP, which averages too
        weakref.finalize(self, _remove, self._handles)

    def attach(self) -> None:
        """Hear of every parameter that has a bucket and trains."""
        exchange, ready = self._exchange, weakref.WeakMethod(self._ready)
        for index in sorted(exchange.spans.keys() - exchange.hooked):
            param = exchange.params[index]
            if param.requires_grad:
                hook = functools.partial(_call, ready, index)
                self._handles.append(param.register_post_accumulate_grad_hook(hook))
                exchange.hooked.add(index)
                if self._usual is not None:
                    self._usual.add(index)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backwards inside are only accumulated."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def next_cycle(self) -> None:
        """The next backward sends all buckets once more."""
        if self._arrived:
            self._usual = self._arrived | (self._usual or set())
        self._arrived, self._missing = set(), []
        self._tasks.clear()
        self._streams.clear()

    def _ready(self, index: int, _: torch.Tensor) -> None:
        """A gradient was accumulated."""
        with self._lock:
            self._note(index)

    def _note(self, index: int) -> None:
        exchange = self._exchange
        if not exchange.is_home(index):
            return  # moved away, perhaps into another optimizer
        exchange.note_change(index)
        if not self.syncing:
            return
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._tasks.add(task)
            self._begin(task)
        if self._wrapped or index in self._arrived:
            return
        self._arrived.add(index)
        self._backend.note_stream(self._device, self._streams)
        for number in exchange.spans[index]:
            self._missing[number] -= 1
        self._send_filled()

    @torch.compiler.disable
    def _begin(self, task: int) -> None:
        """Of a backward, at its first gradient."""
        exchange = self._exchange
        if self._wrapped is None:
            self._wrapped = _is_in_ddp(exchange.params)
        others = _taking_part.setdefault(task, [])
        if not others:
            _engine.queue_callback(functools.partial(_end_all, task))
        others.append(weakref.ref(self))
        if len(self._missing) < len(exchange.members):
            self._missing = [self._expected(members) for members in exchange.members]

    def _expected(self, members: Iterable[int]) -> int:
        """How many gradients a bucket waits for: of parameters that train, and came before."""
        usual, params = self._usual, self._exchange.params
        return sum(
            params[i].requires_grad and i not in self._arrived and (usual is None or i in usual)
            for i in members
        )

    def end(self) -> None:
        """Of a backward."""
        if self._wrapped:
            return
        with self._lock:
            if self._ended is not None:
                _call(self._ended)
            elif not _inside_function(sys._getframe()):
                self._missing = [0] * len(self._missing)
                self._send_filled()

    def _send_filled(self) -> None:
        """Start all buckets whose turn it is and that wait for nothing."""
        exchange = self._exchange
        if exchange.in_place or not self._is_filled():
            return
        if not exchange.reducer.overlaps(self._device):
            return
        if self._backend.capturing():
            return  # a replay would repeat it without the step
        with torch.no_grad(), torch.inference_mode(False), exchange.stats.phase("exchange"):
            self._backend.wait_for_streams(self._device, self._streams)
            try:
                while self._is_filled() and exchange.try_send():
                    pass
            except Exception as error:  # autograd could not tell the other ranks
                exchange.note_error(error)

    def _is_filled(self) -> bool:
        number = self._exchange.next
        return number < len(self._missing) and self._missing[number] <= 0


def _end_all(task: int) -> None:
    """In an order that is the same on all ranks, since each may wait for the other ranks'."""
    alive = [hooks for ref in _taking_part.pop(task) if (hooks := ref()) is not None]
    for hooks in sorted(alive, key=lambda hooks: hooks.number):
        hooks.end()


def _call(method: weakref.WeakMethod[Any], *args: Any) -> None:
    alive = method()
    if alive is not None:
        alive(*args)


def _remove(handles: Iterable[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _inside_function(frame: FrameType | None) -> bool:
    """Whether this backward was started by a custom function's, as reentrant checkpointing does:
    then its end is not that of the whole."""
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False


def _is_in_ddp(params: Iterable[torch.Tensor]) -> bool:
    """Whether a DistributedDataParallel averages these parameters' gradients, too. It then changes
    them while backward goes on, so that they must be left alone until the step."""
    ours = set(map(id, params))
    for found in gc.get_objects():
        if issubclass(type(found), DistributedDataParallel) and not ours.isdisjoint(
            map(id, found.parameters())
        ):
            warnings.warn(
                "the model is wrapped in DistributedDataParallel, which averages its gradients: "
                'pass grad_sync="external", or they are averaged twice (which changes nothing)',
                stacklevel=2,
            )
            return True
    return False
