"""How far two copies of one box are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from fusedshard.auditing.pieces import Index
from fusedshard.auditing.report import Difference

# What torch can compare as numbers.
NUMBERS = {
    dtype
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "complex32"),
        *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
    if (dtype := getattr(torch, name, None)) is not None
}
CHUNK_ELEMENTS = 1 << 22  # that are compared at a time, so that no whole copy is made


def chunks_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor's elements in the order of its indices, in host memory, 1-D, a few at a time."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    for start in range(0, flat.numel(), CHUNK_ELEMENTS):
        yield flat[start : start + CHUNK_ELEMENTS].cpu()


def chunk_lengths(numel: int) -> list[int]:
    """Of `chunks_of` a tensor of ``numel`` elements."""
    return [min(CHUNK_ELEMENTS, numel - start) for start in range(0, numel, CHUNK_ELEMENTS)]


class Tally:
    """What differs between a copy and its reference, added up over chunks of both."""

    def __init__(self) -> None:
        self._elements = self._seen = 0
        self._max_abs = self._max_rel = 0.0
        self._first: tuple[int, str, str] | None = None

    def add(self, here: torch.Tensor, there: torch.Tensor) -> None:
        """The next chunk of each: 1-D, of one length and dtype."""
        unlike = (_as_bytes(here) != _as_bytes(there)).any(dim=1)
        places = unlike.nonzero().flatten()
        if len(places) and self._first is None:
            at = int(places[0])
            self._first = self._seen + at, _shown(here[at]), _shown(there[at])
        self._seen += len(here)
        self._elements += len(places)
        if len(places) and here.dtype in NUMBERS:
            self._measure(_wide(here[places]), _wide(there[places]))
        elif len(places):
            self._max_abs = self._max_rel = math.nan

    def _measure(self, here: torch.Tensor, there: torch.Tensor) -> None:
        gap = (here - there).abs()
        gap = gap.masked_fill(here == there, 0.0)  # -0 and 0; equal infinities
        relative = (gap / there.abs()).masked_fill(gap == 0, 0.0)
        self._max_abs = _larger(self._max_abs, float(gap.max()))
        self._max_rel = _larger(self._max_rel, float(relative.max()))

    def found(
        self, rank: int, reference: int, offset: Index, size: Index, *, has_majority: bool
    ) -> Difference | None:
        """As a report has it, of a box of an array; None where nothing differs."""
        if self._first is None:
            return None
        place, here, there = self._first
        index = tuple(o + i for o, i in zip(offset, _unravel(place, size), strict=True))
        return Difference(
            rank,
            reference,
            has_majority,
            self._elements,
            self._max_abs,
            self._max_rel,
            index,
            here,
            there,
        )


def _shown(element: torch.Tensor) -> str:
    """With as many digits as tell it from its neighbours."""
    if element.dtype not in NUMBERS:
        return f"bytes {bytes(_as_bytes(element.view(1))[0].tolist()).hex()}"
    value = element.item()
    digits = 17 if element.dtype in (torch.float64, torch.complex128) else 9
    return str(value) if isinstance(value, int) else f"{value:.{digits}g}"


def _as_bytes(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(torch.uint8).view(len(numbers), -1)


def _wide(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.to(torch.complex128 if numbers.is_complex() else torch.float64)


def _larger(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def _unravel(place: int, size: Sequence[int]) -> Index:
    index = []
    for extent in reversed(size):
        place, at = divmod(place, extent)
        index.append(at)
    return tuple(reversed(index))
