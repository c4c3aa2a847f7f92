"""Moments and master weights of what a rank owns of a flat buffer, in whatever format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from fusedshard.native import CODE_BLOCK
from fusedshard.precision import (
    checks_of,
    decode,
    encode,
    join_master,
    same_bits,
    split_master,
)

# How many elements are converted at a time, whole blocks: so few that it takes little memory, and
# stays in a processor's caches; more on devices, where each call costs as much as many elements.
STRIDE, DEVICE_STRIDE = 64 * CODE_BLOCK, 8192 * CODE_BLOCK

# Zeroed flat memory: elements, dtype.
Allocate = Callable[[int, torch.dtype], torch.Tensor]


class Array(NamedTuple):
    """What is to be allocated, or counted."""

    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def moment_arrays(numel: int, dtype: torch.dtype) -> list[Array]:
    """A moment's values, and behind codes their exponents."""
    exponents = [Array(_blocks(numel), dtype)] if dtype == torch.uint8 else []
    return [Array(numel, dtype), *exponents]


def master_arrays(numel: int, dtype: torch.dtype) -> list[Array]:
    """Copies (fp32), or remainders (int16) and their checks."""
    checks = [Array(_blocks(numel), torch.int32)] if dtype == torch.int16 else []
    return [Array(numel, dtype), *checks]


def _blocks(numel: int) -> int:
    return -(-numel // CODE_BLOCK)


class Piece(NamedTuple):
    """``length`` reals of a parameter that this rank owns, from ``param_start`` in the
    parameter's storage order, ``owned_start`` among what this rank owns of the flat buffer, and
    ``flat_start`` in the whole of it."""

    param_start: int
    owned_start: int
    flat_start: int
    length: int

    def part(self, first: int, count: int) -> Piece:
        """``count`` of its reals, from ``first`` on."""
        param, owned, flat = self.param_start, self.owned_start, self.flat_start
        return Piece(param + first, owned + first, flat + first, count)


class Moment:
    """One of Adam's moments, 1-D.

    Attributes:
        values: fp32, fp64, bf16, or uint8 codes.
        exponents: of codes: uint8, one for each `CODE_BLOCK`; else None.
    """

    def __init__(self, numel: int, dtype: torch.dtype, allocate: Allocate, *, signed: bool) -> None:
        self.values, *exponents = [allocate(*array) for array in moment_arrays(numel, dtype)]
        self.exponents = exponents[0] if exponents else None
        self._signed = signed

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.exponents is None else self.exponents.nbytes)

    def arrays(self, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A stretch of values and exponents; with codes, of whole blocks but at the end."""
        return _stretch(self.values, self.exponents, start, length)

    def read_to(self, start: int, out: torch.Tensor) -> None:
        """Write a stretch as fp32 or fp64 numbers to ``out``, 1-D."""
        for first, count in _strides(out):
            values, exponents = self.arrays(start + first, count)
            if exponents is not None:
                values = decode(values, exponents, signed=self._signed)
            out.narrow(0, first, count).copy_(values)

    def stored(self, start: int, length: int) -> torch.Tensor:
        """A stretch as state dicts of shards have it: the memory itself, but of codes a copy,
        fp32."""
        if self.exponents is None:
            return self.values.narrow(0, start, length)
        numbers = self.values.new_empty(length, dtype=torch.float32)
        self.read_to(start, numbers)
        return numbers

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.values.dtype if self.exponents is None else torch.float32

    def write(self, start: int, numbers: torch.Tensor) -> None:
        """Overwrite a stretch, rounding to the nearest."""
        values, exponents = self.arrays(start, len(numbers))
        if exponents is None:
            values.copy_(numbers)
        else:
            codes, shared = encode(numbers.to(torch.float32), signed=self._signed)
            values.copy_(codes)
            exponents.copy_(shared)

    def copy_(self, other: Moment) -> None:
        self.values.copy_(other.values)
        if self.exponents is not None and other.exponents is not None:
            self.exponents.copy_(other.exponents)


class Masters:
    """The fp32 values behind 16-bit parameters: copies, or remainders beside bf16 ones.

    A master counts where its parameter is what it was rounded to: each copy by itself, remainders
    in blocks of `CODE_BLOCK` elements, which have a check of the parameter's bits. What somebody
    has changed is its own master. Zeros count beside zeros alone, and serve as none.

    Args:
        params: the whole flat buffer's.
        numel: elements that this rank owns.
        dtype: fp32 or int16.
    """

    def __init__(
        self, params: torch.Tensor, numel: int, dtype: torch.dtype, allocate: Allocate
    ) -> None:
        self.values, *checks = [allocate(*array) for array in master_arrays(numel, dtype)]
        self.checks = checks[0] if checks else None
        self._params = params

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.checks is None else self.checks.nbytes)

    def arrays(self, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A stretch of values and checks; with these, of whole blocks but at the end."""
        return _stretch(self.values, self.checks, start, length)

    def read(self, piece: Piece) -> torch.Tensor:
        """A copy, fp32."""
        whole = self.values.new_empty(piece.length, dtype=torch.float32)
        self.read_to(piece, whole)
        return whole

    def read_to(self, piece: Piece, out: torch.Tensor) -> None:
        """Write a copy to ``out``, 1-D."""
        for first, count in _strides(out):
            out.narrow(0, first, count).copy_(self._read(piece.part(first, count)))

    def _read(self, piece: Piece) -> torch.Tensor:
        param = self._params.narrow(0, piece.flat_start, piece.length)
        kept, checks = self.arrays(piece.owned_start, piece.length)
        if checks is None:
            counts = same_bits(kept.to(param.dtype), param)
            return torch.where(counts, kept, param.to(torch.float32))
        valid = (checks_of(param) == checks).repeat_interleave(CODE_BLOCK)[: len(kept)]
        return join_master(param, kept.masked_fill(~valid, 0))

    def write(self, piece: Piece, master: torch.Tensor) -> None:
        """Overwrite by fp32 values, which need not be those of the parameter as it is now: it may
        be loaded later."""
        kept, checks = self.arrays(piece.owned_start, piece.length)
        if checks is None:
            kept.copy_(master)
        else:
            rounded, remainder = split_master(master)
            kept.copy_(remainder)
            checks.copy_(checks_of(rounded))

    def forget(self, piece: Piece) -> None:
        """The parameter itself is all there is."""
        self.values.narrow(0, piece.owned_start, piece.length).zero_()

    def copy_(self, other: Masters) -> None:
        self.values.copy_(other.values)
        if self.checks is not None and other.checks is not None:
            self.checks.copy_(other.checks)


def _stretch(
    values: torch.Tensor, of_blocks: torch.Tensor | None, start: int, length: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if of_blocks is None:
        return values.narrow(0, start, length), None
    first, count = start // CODE_BLOCK, _blocks(length)
    return values.narrow(0, start, length), of_blocks.narrow(0, first, count)


def _strides(out: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Starts and lengths of what is converted at a time."""
    stride = STRIDE if out.device.type == "cpu" else DEVICE_STRIDE
    for first in range(0, len(out), stride):
        yield first, min(stride, len(out) - first)
