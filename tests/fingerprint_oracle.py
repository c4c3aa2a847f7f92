"""Fingerprints written anew with numpy, from their description in fingerprint.h; and copies of one
tensor that differ in little, to be hashed in one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fusedshard.kernels import FingerprintTable

BLOCK = 32 * 64 * 8  # bytes: rounds, lanes, and the bytes of a word
ROUND = 64 * 8
GOLDEN = 0x9E3779B97F4A7C15
FACTOR = np.uint64(0x9FB21C651E98DF25)
MASK = (1 << 64) - 1


def splitmix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def words(*values: int) -> np.ndarray:
    return np.array([value & MASK for value in values], dtype=np.uint64)


def sum_of_blocks(rounds: np.ndarray, first: int) -> int:
    """Of words as (blocks, rounds, lanes), the first of which has that number."""
    lanes = np.tile(splitmix(words(*(GOLDEN * (lane + 1) for lane in range(64)))), (len(rounds), 1))
    for index in range(rounds.shape[1]):
        lanes = lanes ^ rounds[:, index]
        lanes = (lanes ^ (lanes >> np.uint64(35))) * FACTOR
    keys = words(*(GOLDEN * (first + block) for block in range(len(rounds))))
    return int(splitmix(splitmix(lanes).sum(axis=1) + keys).sum())


def oracle(data: bytes) -> int:
    """The fingerprint of some bytes, as torch shows it: a signed number."""
    whole = len(data) // BLOCK
    padded = np.frombuffer(data + bytes(-len(data) % ROUND), dtype="<u8").reshape(-1, 64)
    total = int(splitmix(words(~(GOLDEN * len(data))))[0])
    total += sum_of_blocks(padded[: whole * 32].reshape(-1, 32, 64), 0)
    total += sum_of_blocks(padded[None, whole * 32 :], whole) if len(data) % BLOCK else 0
    total &= MASK
    return total - (1 << 64) if total >> 63 else total


def bytes_in_memory(tensor: torch.Tensor) -> bytes:
    """Of a dense tensor, in storage order."""
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return bytes(flat.view(torch.uint8).numpy())


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + count)
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)


class Copies:
    """Many copies of one 1-D tensor.

    Attributes:
        changed: (count, numel), to be edited; `restore` makes them copies again.
    """

    def __init__(self, original: torch.Tensor, count: int) -> None:
        self._original = original
        self.changed = original.repeat(count, 1)
        self._table = FingerprintTable(list(self.changed))

    def restore(self) -> None:
        self.changed.copy_(self._original)

    def fingerprints(self) -> torch.Tensor:
        return self._table.fingerprints()


def distinct(fingerprints: Sequence[torch.Tensor]) -> bool:
    together = torch.cat(list(fingerprints))
    return len(together.unique()) == len(together)
