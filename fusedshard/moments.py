"""Moments and master weights of what a rank owns of a flat buffer, in whatever format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from fusedshard.native import CODE_BLOCK
from fusedshard.precision import decode, encode, join_master, same_bits, split_master

# Zeroed flat memory: elements, dtype.
Allocate = Callable[[int, torch.dtype], torch.Tensor]


class Piece(NamedTuple):
    """``length`` reals of a parameter that this rank owns, from ``param_start`` in the
    parameter's storage order, ``owned_start`` among what this rank owns of the flat buffer, and
    ``flat_start`` in the whole of it."""

    param_start: int
    owned_start: int
    flat_start: int
    length: int


class Moment:
    """One of Adam's moments, 1-D.

    Attributes:
        values: fp32, fp64, bf16, or uint8 codes.
        exponents: of codes: uint8, one for each `CODE_BLOCK`; else None.
    """

    def __init__(self, numel: int, dtype: torch.dtype, allocate: Allocate, *, signed: bool) -> None:
        self.values = allocate(numel, dtype)
        coded = dtype == torch.uint8
        self.exponents = allocate(-(-numel // CODE_BLOCK), dtype) if coded else None
        self._signed = signed

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.exponents is None else self.exponents.nbytes)

    def arrays(self, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A stretch of values and exponents; with codes, of whole blocks but at the end."""
        values = self.values.narrow(0, start, length)
        if self.exponents is None:
            return values, None
        blocks = start // CODE_BLOCK, -(-length // CODE_BLOCK)
        return values, self.exponents.narrow(0, *blocks)

    def read(self, start: int, length: int) -> torch.Tensor:
        """A stretch as fp32 or fp64 numbers."""
        values, exponents = self.arrays(start, length)
        if exponents is not None:
            return decode(values, exponents, signed=self._signed)
        return values.to(torch.float32) if values.dtype == torch.bfloat16 else values

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

    A parameter that somebody has changed counts, not the master that it was the rounding of. The
    kernel sees that by itself where the master is a copy. A remainder is of use with the very
    parameter that it was split from, so it is dropped where the version that autograd counts has
    changed.

    Args:
        params: the whole flat buffer's.
        numel: elements that this rank owns.
        dtype: fp32 or int16.
    """

    def __init__(
        self, params: torch.Tensor, numel: int, dtype: torch.dtype, allocate: Allocate
    ) -> None:
        self.values = allocate(numel, dtype)
        self._params = params
        self._is_remainder = dtype == torch.int16
        self._versions: dict[int, int] = {}
        self._loaded: dict[int, list[tuple[Piece, torch.Tensor]]] = {}

    def read(self, piece: Piece) -> torch.Tensor:
        """A copy, fp32."""
        param, kept = self._arrays(piece)
        if self._is_remainder:
            return join_master(param, kept)
        return torch.where(same_bits(kept.to(param.dtype), param), kept, param.to(torch.float32))

    def load(self, index: int, pieces: Sequence[Piece], masters: Sequence[torch.Tensor]) -> None:
        """Take over what was saved of parameter ``index``. It counts where the parameter is its
        rounding at the next update: a user may load parameters before their optimizer, or after."""
        self._loaded[index] = list(zip(pieces, masters, strict=True))
        self._take_loaded(index)

    def reset(self, index: int, pieces: Sequence[Piece]) -> None:
        """Parameter ``index`` itself is all there is."""
        self._loaded.pop(index, None)
        for piece in pieces:
            param, kept = self._arrays(piece)
            if self._is_remainder:
                kept.zero_()
            else:
                kept.copy_(param)

    def is_stale(self, versions: Mapping[int, int]) -> bool:
        """Whether `refresh` has anything to do."""
        return not self._loaded.keys().isdisjoint(versions) or any(
            self._was_changed(index, version) for index, version in versions.items()
        )

    def refresh(
        self, versions: Mapping[int, int], pieces: Mapping[int, Sequence[Piece]], *, keep: bool
    ) -> None:
        """Before masters are used: drop those of changed parameters.

        Args:
            versions: of the parameters in question.
            pieces: of all parameters.
            keep: whether what was loaded may still be compared with parameters loaded later.
        """
        for index, version in versions.items():
            if index in self._loaded:
                self._take_loaded(index)
                if not keep:
                    del self._loaded[index]
            elif self._was_changed(index, version):
                self.reset(index, pieces.get(index, ()))
        self.note(versions)

    def note(self, versions: Mapping[int, int]) -> None:
        """Parameters are what their remainders were split from."""
        self._versions.update(versions)

    def copy_(self, other: Masters) -> None:
        """All but the versions, which are those of other tensors."""
        self.values.copy_(other.values)
        self._loaded = {index: list(loaded) for index, loaded in other._loaded.items()}

    def _was_changed(self, index: int, version: int) -> bool:
        return self._is_remainder and version != self._versions.get(index, version)

    def _take_loaded(self, index: int) -> None:
        for piece, master in self._loaded[index]:
            param, kept = self._arrays(piece)
            if self._is_remainder:
                rounded, remainder = split_master(master)
                kept.copy_(remainder.masked_fill(~same_bits(rounded, param), 0))
            else:
                whole = same_bits(master.to(param.dtype), param)
                kept.copy_(torch.where(whole, master, param.to(torch.float32)))

    def _arrays(self, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        param = self._params.narrow(0, piece.flat_start, piece.length)
        return param, self.values.narrow(0, piece.owned_start, piece.length)
