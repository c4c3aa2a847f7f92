"""Arrays that are in no cache when their turn comes: so many copies that other data has replaced
each of them since it was used, which also leaves enough calls to time where one is short."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from fusedshard import kernels
from fusedshard.native import CODE_BLOCK

T = TypeVar("T")

CACHES = 4  # times the last-level cache that go through it between two uses of a copy
UNKNOWN_CACHE = 64 << 20
MOST_CALLS = 512  # in a sample


class Arrays(NamedTuple):
    """What an update works on: 1-D tensors of one length, fp32 but for references."""

    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class Rotation:
    """Whose turn it is among copies. Contenders that work on the same ones share it."""

    def __init__(self, copies: int) -> None:
        self.copies = copies
        self.calls = min(copies, MOST_CALLS)
        self._next = 0

    def take(self, updates: Sequence[T]) -> list[T]:
        """Those of the copies that were used longest ago, as many as a sample calls."""
        taken = [updates[(self._next + call) % self.copies] for call in range(self.calls)]
        self._next = (self._next + self.calls) % self.copies
        return taken


def last_level_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the largest cache that the first core uses."""
    sizes = [path.read_text().strip() for path in folder.glob("index*/size")]
    found = [int(size[:-1]) << 10 for size in sizes if size.endswith("K")]
    return max(found, default=UNKNOWN_CACHE)


def copies_needed(elements: int, bytes_an_element: int, cold_bytes: int) -> int:
    return max(1, -(-cold_bytes // (elements * bytes_an_element)))


def stride(elements: int) -> int:
    """From one copy to the next, in one long array: every format begins a block there."""
    return -(-elements // CODE_BLOCK) * CODE_BLOCK


def allocate(elements: int, copies: int, *, flat: bool, device: str = "cpu") -> list[Arrays]:
    """The same values each time, in fusedshard's flat memory or in torch's.

    Gradients are positive, so that the roofline loop, which adds them to everything, never makes
    a second moment negative.
    """
    total, where = stride(elements) * copies, torch.device(device)

    def new() -> torch.Tensor:
        if flat:
            return kernels.flat_memory(total, torch.float32, where)
        return torch.zeros(total, device=where)

    whole = Arrays(*(new() for _ in Arrays._fields))
    generator = torch.Generator(where).manual_seed(0)
    whole.param.normal_(generator=generator)
    whole.grad.uniform_(0.5, 1.5, generator=generator)
    return [
        Arrays(*(array[start : start + elements] for array in whole))
        for start in range(0, total, stride(elements))
    ]
