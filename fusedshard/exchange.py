"""Which gradients were sent to be averaged, and which must be sent (again).

A cycle lasts from one update to the next. What has changed since it was sent is sent again by the
step, once the ranks have agreed on that. Where backward takes part, every rank sends every bucket
once in a cycle, in the same order, whatever its own graph did: while backward goes on
(`fusedshard.backward`), and the rest by `complete`, which comes before anything else that the ranks
do together.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from fusedshard.dense import is_plain
from fusedshard.flat import BucketMemory
from fusedshard.gradients import GradientReducer
from fusedshard.params import (
    check_gradient,
    dense_gradient,
    form_of,
    store_gradient,
    version_of,
)
from fusedshard.stats import Stats
from fusedshard.tables import StepTables

# Which tensor a gradient was, where it lay, and its version. A weak reference, since a new tensor
# may get the number and place of an old one.
Mark = tuple["weakref.ref[torch.Tensor] | None", int, int]
NO_GRADIENT: Mark = None, 0, 0


class Outlook(NamedTuple):
    """What became of the gradients that were sent.

    Attributes:
        stale: for each bucket whether it must be sent (again).
        changed: whether any gradient is another one than was sent.
        edited: the parameters among them where sending again would not do, since this rank alone
            cannot tell what was meant.
    """

    stale: list[bool]
    changed: bool
    edited: list[int]


class GradientExchange:
    """The gradients of one optimizer on their way to their means.

    Args:
        stats: where time is noted.
        grad_sync: as in `fusedshard.Adam`; ``"external"`` where nothing is ever sent.
        in_place: whether means overwrite ``p.grad``.
    """

    def __init__(self, stats: Stats, reducer: GradientReducer, grad_sync: str, in_place: bool):
        self.stats = stats
        self.reducer = reducer
        self.in_place = in_place
        self.overlapped = grad_sync == "backward"
        self._sends = grad_sync != "external"
        self.params: Sequence[torch.nn.Parameter] = []
        self._homes: dict[int, Any] = {}  # place and form of the parameters that have a bucket
        self.spans: dict[int, range] = {}  # and the buckets in which they lie
        self.members: list[list[int]] = []  # the parameters of each bucket
        self.hooked: set[int] = set()  # those that backward tells of
        self.next = 0  # the bucket that this cycle sends next, where overlapped
        self._buckets: list[BucketMemory] = []
        self._marks: dict[int, Mark] = {}  # of gradients when they were sent
        self._sent: dict[int, torch.Tensor] = {}  # memory that is still in use
        self._means: dict[int, torch.Tensor] = {}  # of parameters without a gradient here
        self._dirty: set[int] = set()  # to be sent again
        self._error: Exception | None = None

    def take(
        self,
        params: Sequence[torch.nn.Parameter],
        labels: Sequence[str],
        buckets: Sequence[BucketMemory],
        packing: StepTables,
    ) -> None:
        """The buckets as they are now: those it knows, and new ones behind them. Nothing may be on
        its way."""
        self.params, self._labels, self._packing = params, labels, packing
        self._empty = [index for index, param in enumerate(params) if not param.numel()]
        known, self._buckets = len(self._buckets), list(buckets)
        for number, bucket in enumerate(self._buckets[known:], known):
            self.members.append(list(dict.fromkeys(segment.param for segment in bucket.segments)))
            for index in self.members[-1]:
                first = self.spans[index].start if index in self.spans else number
                self.spans[index] = range(first, number + 1)
                self._homes[index] = _home_of(params[index])

    def try_send(self) -> bool:
        """Start to exchange this cycle's next bucket, unless that had to wait."""
        if not self.reducer.has_room():
            return False
        self._send(self.next, None)
        self.next += 1
        return True

    def complete(self) -> Exception | None:
        """Exchange what this cycle has not yet sent, and wait for all of it. Collective.

        Returns:
            What is wrong with this rank's gradients, of which zeros were sent.
        """
        if self.overlapped:
            with self.stats.phase("exchange"):
                rest = range(self.next, len(self._buckets))
                self._separate(rest)
                for number in rest:
                    self._send(number, None)
                self.next = len(self._buckets)
                self.reducer.finish()
                self._deliver()
        error, self._error = self._error, None
        return error

    def run(self, numbers: Sequence[int], used: Sequence[int]) -> None:
        """Exchange these buckets from ``p.grad``, as it is now, and wait for them. Collective.

        Args:
            numbers: of the buckets, the same on every rank: all that are stale on any, but for
                those without a used parameter.
            used: 1 for each parameter that has a gradient on any rank, else 0.
        """
        with self.stats.phase("exchange"):
            self._fill(used)
            self._separate(numbers)
            for number in numbers:
                self._send(number, used)
            self.next = len(self._buckets)
            self.reducer.finish()
            self._deliver()
            self._fill(used)
            for index in self._empty if self.in_place else ():
                if used[index] and self.params[index].grad is None:
                    self.params[index].grad = torch.zeros_like(self.params[index])
        self._dirty.clear()
        self.note_present()

    def outlook(self) -> Outlook:
        """How the gradients compare with what was sent."""
        marks, params = self._marks, self.params
        if not marks and not self._sends:
            return Outlook([False] * len(self.members), True, [])
        changed = {i for i in self.spans if not is_marked(marks.get(i), params[i].grad)}
        stale, edited = set[int](), set[int]()
        if self.overlapped:
            # Without its hook nobody has told of a backward.
            stale = self._dirty | (changed - self.hooked)
            if not self.in_place:
                stale |= {index for index in changed if self.params[index].grad is None}
                edited = changed - stale
        elif self._sends:
            stale = changed
        flags = [not stale.isdisjoint(members) for members in self.members]
        return Outlook(flags, bool(changed or stale), sorted(edited))

    def is_home(self, index: int) -> bool:
        """Whether a parameter is where and what it was when it got its bucket."""
        return _home_of(self.params[index]) == self._homes[index]

    def note_change(self, index: int) -> None:
        """A gradient of this cycle has changed, and is to be sent again if it was sent."""
        if self.spans[index].start < self.next:
            self._dirty.add(index)

    def note_error(self, error: Exception) -> None:
        """Something failed where it cannot be raised: `complete` returns it."""
        self._error = self._error or error

    def note_present(self, indices: Iterable[int] | None = None) -> None:
        """Gradients (all of them, unless named) are what they are meant to be."""
        for index in self.spans if indices is None else indices:
            self._marks[index] = mark_of(self.params[index].grad)

    def forget(self) -> None:
        """What was sent is of no use, but the cycle goes on: other ranks may not forget."""
        self._error = None
        if self.overlapped:
            self._dirty.update(*self.members[: self.next])
        else:
            self._marks.clear()

    def next_cycle(self) -> None:
        """The means were used."""
        self.next = 0
        self._marks.clear()
        self._dirty.clear()

    def _send(self, number: int, used: Sequence[int] | None) -> None:
        if not self._marks:
            self.stats.exchanges.clear()
        bucket = self._buckets[number]
        addresses = {}
        for index in self.members[number]:
            if self.spans[index].start == number:  # a change between two buckets shows, too
                self._marks[index] = mark_of(self.params[index].grad)
            grad = self._take_gradient(index, used)
            addresses[index] = 0 if grad is None else grad.data_ptr()
        bucket.packing.point_at(addresses)
        self._packing.upload(bucket.packing)
        self.reducer.start(bucket)

    def _take_gradient(self, index: int, used: Sequence[int] | None) -> torch.Tensor | None:
        """What to send of a parameter, and in place to overwrite: None counts as zero."""
        if index in self._sent:  # by another bucket
            return self._sent[index]
        param, grad = self.params[index], None
        if not self.is_home(index):
            return None  # as the step will say
        try:
            check_gradient(self._labels[index], param)
            grad = dense_gradient(param)
        except Exception as error:  # the other ranks wait for this bucket
            self.note_error(error)
            self._dirty.add(index)
            return None
        if grad is None and self.in_place and (used is None or used[index]):
            grad = torch.zeros_like(param)
        if grad is not None and (self.in_place or grad is not param.grad):
            self._sent[index] = grad
        return grad

    def _separate(self, numbers: Iterable[int]) -> None:
        """In place, give each parameter a gradient of its own where two share one tensor."""
        if not self.in_place:
            return
        taken = set[int]()
        for index in sorted({index for number in numbers for index in self.members[number]}):
            grad = self.params[index].grad
            if grad is not None and is_plain(grad):
                address = grad.untyped_storage().data_ptr()
                if address in taken:
                    self.params[index].grad = grad.clone()
                taken.add(address)

    def _deliver(self) -> None:
        """Give ``p.grad`` the means that came, in place; and let go of what was sent."""
        for index, mean in self._sent.items() if self.in_place else ():
            if self._marks[index][0] is None:
                self._means[index] = mean
            elif mean is not self.params[index].grad:
                store_gradient(self.params[index], mean)
        self._sent.clear()

    def _fill(self, used: Sequence[int]) -> None:
        """Give parameters that had no gradient here the mean of the other ranks'."""
        for index, mean in self._means.items():
            if used[index]:
                grad = self.params[index].grad
                store_gradient(self.params[index], mean if grad is None else grad + mean)
        self._means.clear()


def _home_of(param: torch.Tensor) -> Any:
    return param.data_ptr(), *form_of(param)


def mark_of(grad: torch.Tensor | None) -> Mark:
    """What tells whether a gradient is still the one it was."""
    if grad is None:
        return NO_GRADIENT
    return weakref.ref(grad), *_place_of(grad)


def is_marked(mark: Mark | None, grad: torch.Tensor | None) -> bool:
    """Whether a gradient is the one that was marked, as it was."""
    if mark is None or grad is None:
        return mark is not None and mark[0] is None
    return mark[0] is not None and mark[0]() is grad and mark[1:] == _place_of(grad)


def _place_of(grad: torch.Tensor) -> tuple[int, int]:
    try:
        address = grad.data_ptr()
    except RuntimeError:  # a sparse one, or a wrapper, which the step will refuse
        address = 0
    return address, version_of(grad)
