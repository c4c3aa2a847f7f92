"""Random changes of tensors, and whether fingerprints tell them: one bit that flips, and two
elements that change places. Many copies of one tensor, each with a change of its own, are hashed in
one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fusedshard.kernels import FingerprintTable

Make = Callable[[int, torch.Generator], torch.Tensor]

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.uint8: torch.uint8}
COPIES = 256
SMALL_BYTES = (1000, 37_000)  # within a block of 16 KiB; of three blocks, the last of them cut
ROUNDS = 32  # of flips and of exchanges with the same contents
# Between elements that change places, in bytes: neighbours, words, and what meets in one lane of
# the hash. As many more are any distance apart.
DISTANCES = (4, 8, 16, 504, 512, 1024, 16_384)


def _plus_and_minus(numel: int, generator: torch.Generator) -> torch.Tensor:
    return 0.37 * (2 * torch.randint(0, 2, (numel,), generator=generator) - 1)


def _integers(low: int, high: int) -> Make:
    return lambda numel, generator: torch.randint(low, high, (numel,), generator=generator)


FLOATS: dict[str, Make] = {
    "normal": lambda numel, generator: torch.randn(numel, generator=generator),
    "ones and zeros": _integers(0, 2),
    "x and -x": _plus_and_minus,
    "small integers": _integers(-8, 9),
}
CODES: dict[str, Make] = {
    "random codes": _integers(0, 256),
    "ones and zeros": _integers(0, 2),
    "small integers": _integers(0, 9),
}


class Case(NamedTuple):
    """Tensors of a dtype and of so many bytes that are filled in one way."""

    dtype: torch.dtype
    content: str
    nbytes: int

    def make(self, generator: torch.Generator) -> torch.Tensor:
        """A tensor as integers of its elements' size."""
        contents = CODES if self.dtype == torch.uint8 else FLOATS
        values = contents[self.content](self.nbytes // self.dtype.itemsize, generator)
        return values.to(self.dtype).view(INTEGERS[self.dtype])


SMALL_CASES = [
    Case(dtype, content, nbytes)
    for dtype in INTEGERS
    for content in (CODES if dtype == torch.uint8 else FLOATS)
    for nbytes in SMALL_BYTES
]


@dataclass
class Tally:
    """Changes that were made, those that were not seen, and exchanges of equal elements that were
    taken for a change."""

    flips: int = 0
    exchanges: int = 0
    unseen_flips: int = 0
    unseen_exchanges: int = 0
    false_alarms: int = 0

    @property
    def changes(self) -> int:
        return self.flips + self.exchanges

    @property
    def wrong(self) -> int:
        return self.unseen_flips + self.unseen_exchanges + self.false_alarms


class _Batch:
    """Copies of a tensor; each call changes each copy, and undoes that."""

    def __init__(self, case: Case, copies: int, generator: torch.Generator) -> None:
        self._generator = generator
        self._original = case.make(generator)
        self._copies = self._original.repeat(copies, 1)
        self._rows = torch.arange(copies)
        self._table = FingerprintTable(list(self._copies))
        self._unchanged = FingerprintTable([self._original]).fingerprints()

    def _below(self, limit: int) -> torch.Tensor:
        return torch.randint(0, limit, (len(self._rows),), generator=self._generator)

    def _seen(self) -> torch.Tensor:
        return self._table.fingerprints() != self._unchanged

    def flip(self, tally: Tally) -> None:
        memory = self._copies.view(torch.uint8)
        places = self._rows, self._below(memory.shape[1])
        flips = (1 << self._below(8)).to(torch.uint8)
        memory[places] ^= flips
        seen = self._seen()
        memory[places] ^= flips
        tally.flips += len(seen)
        tally.unseen_flips += int((~seen).sum())

    def exchange(self, tally: Tally) -> None:
        original, numel = self._original, len(self._original)
        distances = torch.tensor(DISTANCES) // original.itemsize
        steps = distances[self._below(len(DISTANCES))].clamp(min=1)
        steps = torch.where(self._below(2) == 0, steps, self._below(numel))
        first = self._below(numel)
        second = (first + steps) % numel
        self._copies[self._rows, first] = original[second]
        self._copies[self._rows, second] = original[first]
        seen = self._seen()
        for places in (first, second):
            self._copies[self._rows, places] = original[places]
        differ = original[first] != original[second]
        tally.exchanges += int(differ.sum())
        tally.unseen_exchanges += int((differ & ~seen).sum())
        tally.false_alarms += int((seen & ~differ).sum())


def fuzz(case: Case, changes: int, copies: int, seed: int) -> Tally:
    """At least so many changes of tensors of a case, about half of each kind."""
    generator = torch.Generator().manual_seed(seed)
    tally = Tally()
    while tally.changes < changes:
        batch = _Batch(case, copies, generator)
        for _ in range(ROUNDS):
            if tally.changes < changes:
                batch.flip(tally)
                batch.exchange(tally)
    return tally
