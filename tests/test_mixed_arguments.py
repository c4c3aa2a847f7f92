"""Refusals of arrays in mixed precision: the array's name, what it is, what was wanted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_tools import ADAM, tables_of
from mixed_oracle import BLOCK
from mixed_tools import (
    ALL_FORMATS,
    BF16,
    CODES,
    FP16,
    FP32,
    REMAINDER,
    Formats,
    copy_of,
    fresh_mixed,
    on_each_mixed_backend,
)
from oracles import same_state, with_array
from test_kernel_arguments import refused

from fusedshard.kernels import adam_, mean_
from fusedshard.layout import Segment
from fusedshard.native import AdamState
from fusedshard.tables import integers

pytestmark = on_each_mixed_backend

NUMEL = 3 * BLOCK
MASTERS_OF_BF16 = "wanted None or torch.float32 or torch.int16"
MASTERS_OF_FP16 = "wanted None or torch.float32"
MOMENTS = "wanted torch.float32 or torch.bfloat16 or torch.uint8"
NO_BACKEND = "got device meta, wanted cpu"


def state_of(formats: Formats, *, amsgrad: bool = True) -> AdamState:
    return fresh_mixed(torch.linspace(-1, 1, NUMEL), formats, amsgrad=amsgrad)


def run(state: AdamState, start: int = 0, length: int = NUMEL) -> None:
    """An update of a segment that begins at `start`."""
    tables = tables_of([Segment(0, 0, start, length)], state.param.itemsize)
    tables.point_at_shards([torch.ones(NUMEL)])
    tables.upload()
    adam_(state, tables.tables[0], integers([0]))


def check_refusal(
    state: AdamState, name: str, kind: type[Exception], message: str, start: int = 0
) -> None:
    """Nothing has changed, either."""
    untouched = copy_of(state) if state.param.device.type == "cpu" else None
    with refused(name, kind, message):
        run(state, start, NUMEL - start)
    assert untouched is None or same_state(state, untouched)


@pytest.mark.parametrize("formats", ALL_FORMATS, ids=str)
def test_what_is_refused_below_is_accepted_otherwise(formats: Formats) -> None:
    run(state_of(formats))


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        (Formats(BF16, FP16, FP32), f"got torch.float16, {MASTERS_OF_BF16}"),
        (Formats(BF16, BF16, CODES), f"got torch.bfloat16, {MASTERS_OF_BF16}"),
        (Formats(FP16, REMAINDER, FP32), f"got torch.int16, {MASTERS_OF_FP16}"),
        (Formats(FP16, torch.float64, BF16), f"got torch.float64, {MASTERS_OF_FP16}"),
        (Formats(FP32, FP32, FP32), "got torch.float32, wanted None"),
        (Formats(FP32, REMAINDER, BF16), "got torch.int16, wanted None"),
    ],
    ids=str,
)
def test_a_master_that_the_parameter_cannot_have(formats: Formats, message: str) -> None:
    check_refusal(state_of(formats), "master", TypeError, message)


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        (Formats(BF16, None, FP16), f"got torch.float16, {MOMENTS}"),
        (Formats(FP16, FP32, torch.float64), f"got torch.float64, {MOMENTS}"),
        (Formats(FP32, None, torch.int8), f"got torch.int8, {MOMENTS}"),
        (Formats(torch.float64, None, FP32), "got torch.float32, wanted torch.float64"),
        (Formats(torch.float64, None, CODES), "got torch.uint8, wanted torch.float64"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_moments_that_the_parameter_cannot_have(formats: Formats, message: str) -> None:
    check_refusal(state_of(formats), "exp_avg", TypeError, message)


Change = Callable[[torch.Tensor], torch.Tensor]
SHAPES: dict[str, tuple[Change, str]] = {
    "length": (lambda x: x[:-1], f"got {NUMEL - 1} elements, wanted {NUMEL}"),
    "shape": (
        lambda x: x.view(3, -1),
        "got shape (3, 128) with strides (128, 1), wanted one contiguous dimension",
    ),
    "strides": (
        lambda x: x.repeat(2)[::2],
        "got shape (384,) with strides (2,), wanted one contiguous dimension",
    ),
    "device": (lambda x: x.to("meta"), NO_BACKEND),
}


@pytest.mark.parametrize("wrong", SHAPES)
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master"])
@pytest.mark.parametrize(
    "formats", [Formats(BF16, REMAINDER, CODES), Formats(FP16, FP32, BF16)], ids=str
)
def test_an_array_of_another_shape(formats: Formats, name: str, wrong: str) -> None:
    change, message = SHAPES[wrong]
    state = state_of(formats)
    given = with_array(state, name, change(getattr(state, name)))
    with refused(name, ValueError, message):
        run(given)


@pytest.mark.parametrize("name", ["exp_avg_sq", "max_exp_avg_sq"])
def test_moments_of_two_dtypes(name: str) -> None:
    state = state_of(Formats(BF16, REMAINDER, BF16))
    given = with_array(state, name, torch.zeros(NUMEL))
    check_refusal(given, name, TypeError, "got torch.float32, wanted torch.bfloat16")


each_change_of_blocks = pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda x: None, ValueError, "got None, wanted 3"),
        (lambda x: x[:2], ValueError, "got 2 elements, wanted 3"),
        (lambda x: x.repeat(2), ValueError, "got 6 elements, wanted 3"),
        (lambda x: x.view(1, 3), ValueError, "got shape (1, 3)"),
        (lambda x: x.short(), TypeError, "got torch.int16, wanted torch."),
        (lambda x: x.to("meta"), ValueError, NO_BACKEND),
    ],
    ids=["none", "length", "longer", "shape", "dtype", "device"],
)


@each_change_of_blocks
@pytest.mark.parametrize("index", range(3))
def test_exponents_that_do_not_fit(
    index: int, change: Change, kind: type[Exception], message: str
) -> None:
    state = state_of(Formats(BF16, REMAINDER, CODES))
    exponents = list(state.exponents)
    changed = exponents[index]
    assert changed is not None
    exponents[index] = change(changed)
    name = f"exponents of {('exp_avg', 'exp_avg_sq', 'max_exp_avg_sq')[index]}"
    with refused(name, kind, message):
        run(state._replace(exponents=tuple(exponents)))


@each_change_of_blocks
@pytest.mark.parametrize("moments", [FP32, CODES], ids=["fp32", "codes"])
def test_checks_that_do_not_fit(
    moments: torch.dtype, change: Change, kind: type[Exception], message: str
) -> None:
    state = state_of(Formats(BF16, REMAINDER, moments))
    assert state.checks is not None
    with refused("checks", kind, message):
        run(state._replace(checks=change(state.checks)))


@pytest.mark.parametrize(
    ("formats", "start", "wanted"),
    [
        (Formats(BF16, REMAINDER, CODES), 64, 128),
        (Formats(FP32, None, CODES), 8, 128),
        (Formats(BF16, REMAINDER, FP32), 8, 128),
        (Formats(BF16, FP32, FP32), 4, 8),
        (Formats(FP16, None, BF16), 9, 8),
    ],
    ids=lambda value: str(value),
)
def test_segments_that_begin_within_a_block(formats: Formats, start: int, wanted: int) -> None:
    message = f"got segments that begin at multiples of {start}, wanted {wanted}"
    check_refusal(state_of(formats), "table", ValueError, message, start)


@pytest.mark.parametrize("name", ["param", "master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"])
def test_arrays_that_vectors_cannot_be_read_from(name: str) -> None:
    state = state_of(Formats(BF16, REMAINDER, FP32))
    room = torch.zeros(NUMEL + 1, dtype=getattr(state, name).dtype)
    given = with_array(state, name, room[1:])
    message = f"got address {room[1:].data_ptr():#x}, wanted a multiple of 16"
    check_refusal(given, name, ValueError, message)


def test_amsgrad_without_its_moment() -> None:
    state = state_of(Formats(BF16, REMAINDER, CODES), amsgrad=False)
    tables = tables_of([Segment(0, 0, 0, NUMEL)], 2, [ADAM._replace(amsgrad=True)])
    tables.point_at_shards([torch.ones(NUMEL)])
    with refused("max_exp_avg_sq", ValueError, "got None, wanted an array"):
        adam_(state, tables.tables[0], integers([0]))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_mean_that_is_not_fp32(dtype: torch.dtype) -> None:
    chunks = [torch.ones(9, dtype=dtype)] * 2
    with refused("out", TypeError, f"got {dtype}, wanted torch.float32"):
        mean_(torch.zeros(9, dtype=dtype), chunks)
    with refused("chunks[1]", TypeError, f"got torch.float32, wanted {dtype}"):
        mean_(torch.zeros(9), [chunks[0], torch.ones(9)])
