"""What a rank holds, in words that all kinds of optimizers have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

Index = tuple[int, ...]

PARAM = "param"  # the part that is the parameter itself


class ParamInfo(NamedTuple):
    """A parameter (or buffer), as every rank knows it.

    Attributes:
        name: the model's, or ``"parameter 3"``.
        shape: of the whole.
        trains: whether it requires a gradient, and the optimizer has it.
        group: the number of its param group there.
    """

    name: str
    shape: Index
    trains: bool = True
    group: int = 0


class Piece(NamedTuple):
    """A box of an array that a rank holds: the parameter, or a part of its optimizer state.

    Attributes:
        param: the parameter's name.
        part: ``"param"``, or the key of its state: ``"exp_avg"``, ``"step"``, ...
        shape: of the whole array. Where pieces are stretches of storage order it is
            ``(elements,)``.
        offset, size: the box: its first index and its extent, one number a dimension.
        dtype: its name, without ``torch.``.
        copies: how many ranks must hold each element; 0: as many as hold any, where the
            ranks that are audited have but a part of the array, so that gaps cannot be told.
        strides: of the tensor that holds it; ranks with other strides are compared by index.
    """

    param: str
    part: str
    shape: Index
    offset: Index
    size: Index
    dtype: str
    copies: int
    strides: Index

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def whole_numel(self) -> int:
        """Of the whole array."""
        return math.prod(self.shape)

    @property
    def array(self) -> tuple[str, str]:
        return self.param, self.part


class Held(NamedTuple):
    """A piece, and the tensor of its size that holds it here."""

    piece: Piece
    tensor: torch.Tensor


class Inventory(NamedTuple):
    """All that a rank holds.

    Attributes:
        params: the parameters that are audited, the same on every rank.
        held: its pieces; empty ones are left out.
        expected: arrays that must be there, as pieces without elements; the same on every rank.
        buffers: names of those among ``params`` that are no parameters, and need not agree.
        must_have_state: whether a parameter that trains has lost what no rank has of its state,
            and most others have. Elsewhere it may not have had a gradient yet.
    """

    params: Sequence[ParamInfo]
    held: Sequence[Held]
    expected: Sequence[Piece] = ()
    buffers: frozenset[str] = frozenset()
    must_have_state: bool = False


def box(
    param: str, part: str, shape: Index, offset: Index, tensor: torch.Tensor, copies: int
) -> Held:
    """A tensor that is a box of an array, of its own size."""
    size, strides = tuple(tensor.shape), tuple(tensor.stride())
    dtype = dtype_name(tensor.dtype)
    return Held(Piece(param, part, shape, offset, size, dtype, copies, strides), tensor)


def whole(param: str, part: str, tensor: torch.Tensor, copies: int = 0) -> Held:
    """A tensor that is an array by itself."""
    return box(param, part, tuple(tensor.shape), (0,) * tensor.dim(), tensor, copies)


def stretch(param: str, part: str, tensor: torch.Tensor, start: int, numel: int) -> Held:
    """Elements of an array of ``numel``, in storage order, that one rank alone must hold."""
    return box(param, part, (numel,), (start,), tensor, 1)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
