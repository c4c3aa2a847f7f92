"""States in every combination of formats, and updates of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from kernel_tools import tables_of
from mixed_oracle import BLOCK, Place

from fusedshard.kernels import adam_
from fusedshard.layout import Segment
from fusedshard.native import AdamState
from fusedshard.tables import GroupScalars, integers

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
REMAINDER, CODES = torch.int16, torch.uint8
NAMES = {None: "none", BF16: "bf16", FP16: "fp16", FP32: "fp32", REMAINDER: "rest", CODES: "codes"}

BACKENDS = ["cpu", "emulated"]
on_each_mixed_backend = [
    pytest.mark.usefixtures("each_backend"),
    pytest.mark.parametrize("each_backend", BACKENDS, indirect=True),
]


class Formats(NamedTuple):
    """How the arrays of a state lie in memory."""

    param: torch.dtype
    master: torch.dtype | None
    moments: torch.dtype

    def __str__(self) -> str:
        return "-".join(NAMES.get(dtype, str(dtype)) for dtype in self)


_PARAMS = [(FP32, None), (BF16, None), (BF16, FP32), (BF16, REMAINDER), (FP16, None), (FP16, FP32)]
ALL_FORMATS = [
    Formats(param, master, moments)
    for (param, master), moments in itertools.product(_PARAMS, (FP32, BF16, CODES))
    if (param, moments) != (FP32, FP32)
]
each_format = pytest.mark.parametrize("formats", ALL_FORMATS, ids=str)


def fresh_mixed(
    param: torch.Tensor, formats: Formats, *, amsgrad: bool = False, seed: int | None = None
) -> AdamState:
    """Moments of zero; ``param``: fp32, of which the state holds what its formats can."""
    numel, narrow = param.numel(), param.to(formats.param)
    moments = [torch.zeros(numel, dtype=formats.moments) for _ in range(3)]
    master = None if formats.master is None else torch.zeros(numel, dtype=formats.master)
    if master is not None and master.dtype == FP32:
        master.copy_(narrow)
    blocks = -(-numel // BLOCK)
    exponents: tuple[torch.Tensor | None, ...] = (None, None, None)
    if formats.moments == CODES:
        shared = [torch.zeros(blocks, dtype=torch.uint8) for _ in range(3)]
        exponents = (*shared[:2], shared[2] if amsgrad else None)
    checks = torch.zeros(blocks, dtype=torch.int32) if formats.master == REMAINDER else None
    third = moments[2] if amsgrad else None
    param = narrow.clone()
    return AdamState(param, moments[0], moments[1], third, master, exponents, seed, checks)


def copy_of(state: AdamState) -> AdamState:
    return part_of(state, 0, state.param.numel(), copied=True)


def part_of(state: AdamState, start: int, stop: int, *, copied: bool = False) -> AdamState:
    """Elements ``[start, stop)``, in whole blocks, in the state's own memory or in copies."""

    def part(array: torch.Tensor | None, first: int, last: int) -> torch.Tensor | None:
        if array is None:
            return None
        return array[first:last].clone() if copied else array[first:last]

    blocks = start // BLOCK, -(-stop // BLOCK)
    arrays: Any = {name: part(getattr(state, name), start, stop) for name in AdamState._fields[:5]}
    exponents = tuple(part(array, *blocks) for array in state.exponents)
    checks = part(state.checks, *blocks)
    return state._replace(**arrays, exponents=exponents, checks=checks)


def update_mixed(
    state: AdamState,
    grad: torch.Tensor,
    group: GroupScalars,
    place: Place,
    grad_scale: float = 1.0,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Update a shard that holds one parameter, or a part of it; ``grad``: of its dtype or fp32."""
    segments = [Segment(place.param, place.first, 0, grad.numel())]
    tables = tables_of(segments, state.param.itemsize, [group], device=grad.device.type)
    tables.point_at_shards([grad])
    tables.upload()
    steps = integers([place.step - 1] * (place.param + 1)).to(grad.device)
    adam_(state, tables.tables[0], steps, grad_scale, found_inf)


def update_in_parts(
    state: AdamState, grad: torch.Tensor, group: GroupScalars, place: Place, cuts: Sequence[int]
) -> None:
    """The same in shards that end at ``cuts``, multiples of BLOCK, and at the end."""
    for start, stop in itertools.pairwise([0, *cuts, grad.numel()]):
        there = place._replace(first=place.first + start)
        update_mixed(part_of(state, start, stop), grad[start:stop], group, there)
