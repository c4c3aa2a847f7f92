"""Refusals of the kernels' wrapper: the array's name, what it is, what was wanted."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from kernel_tools import ADAM, ADAMW, tables_of
from oracles import arrays_of, same_state, with_array

from fusedshard.kernels import adam_, found_inf_, mean_, pack_, square_sum
from fusedshard.layout import Segment
from fusedshard.native import AdamState
from fusedshard.tables import GroupScalars, SegmentTable, integers

pytestmark = pytest.mark.usefixtures("each_backend")

NUMEL = 6

# What is done to an array of 6 fp32 elements, and how the refusal reads.
Wrong = tuple[Callable[[torch.Tensor], torch.Tensor], type[Exception], str]
WRONG: dict[str, Wrong] = {
    "integers": (lambda x: x.to(torch.int32), TypeError, "got torch.int32, wanted torch.float32"),
    "device": (lambda x: x.to("meta"), ValueError, "got device meta, wanted cpu"),
    "shape": (
        lambda x: x.view(2, 3),
        ValueError,
        "got shape (2, 3) with strides (3, 1), wanted one contiguous dimension",
    ),
    "strides": (
        lambda x: x.repeat(2)[::2],
        ValueError,
        "got shape (6,) with strides (2,), wanted one contiguous dimension",
    ),
}
LENGTH: Wrong = (lambda x: x[:5], ValueError, "got 5 elements, wanted 6")
DOUBLE: Wrong = (lambda x: x.double(), TypeError, "got torch.float64, wanted torch.float32")
NARROW: Wrong = (lambda x: x.bfloat16(), TypeError, "got torch.bfloat16, wanted torch.float32")
WRONG_BESIDE_OTHERS = {**WRONG, "length": LENGTH, "double": DOUBLE, "narrow": NARROW}


def refused(
    name: str, kind: type[Exception], message: str
) -> AbstractContextManager[pytest.ExceptionInfo[Exception]]:
    return pytest.raises(kind, match=re.escape(f"{name}: {message}"))


ARRAYS = ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def state_of(numel: int = NUMEL) -> AdamState:
    param, exp_avg, exp_avg_sq, largest = (torch.rand(numel) for _ in range(4))
    return AdamState(param, exp_avg, exp_avg_sq, largest)


GRADIENT = torch.ones(100)


def table_of(*lengths: int, groups: tuple[GroupScalars, ...] = (ADAM,)) -> SegmentTable:
    """A packed shard of parameters, ready to run on a gradient of ones."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    segments = [Segment(i, 0, starts[i], length) for i, length in enumerate(lengths)]
    tables = tables_of(segments, 4, groups)
    tables.point_at_shards([GRADIENT])
    tables.upload()
    return tables.tables[0]


def run(state: AdamState, table: SegmentTable, **options: torch.Tensor) -> None:
    adam_(state, table, integers([0, 0]), **options)


@pytest.mark.parametrize(
    ("name", "wrong"),
    # A narrow parameter may have moments of fp32: test_mixed_arguments.py.
    sorted({*itertools.product(ARRAYS, WRONG_BESIDE_OTHERS)} - {("param", "narrow")}),
)
def test_adam_refuses_an_array(name: str, wrong: str) -> None:
    change, kind, message = WRONG_BESIDE_OTHERS[wrong]
    state = state_of()
    given = with_array(state, name, change(getattr(state, name)))
    if name == "param" and wrong == "length":
        name, message = "exp_avg", "got 6 elements, wanted 5"
    if name == "param" and wrong == "double":
        name, message = "exp_avg", "got torch.float32, wanted torch.float64"
    if name == "exp_avg" and wrong == "narrow":
        name, message = "exp_avg_sq", "got torch.float32, wanted torch.bfloat16"
    before = copy.deepcopy(state)
    with refused(name, kind, message):
        run(given, table_of(NUMEL))
    assert same_state(state, before)


def test_adam_refuses_an_unknown_dtype_of_all() -> None:
    param, exp_avg, exp_avg_sq, _ = (array.int() for array in arrays_of(state_of()).values())
    state = AdamState(param, exp_avg, exp_avg_sq, None)
    with refused("param", TypeError, "got torch.int32, wanted torch.float32 or torch.float64"):
        run(state, table_of(NUMEL))


def test_adam_refuses_amsgrad_without_its_moment() -> None:
    state = state_of()._replace(max_exp_avg_sq=None)
    before = copy.deepcopy(state)
    with refused("max_exp_avg_sq", ValueError, "got None, wanted an array"):
        run(state, table_of(NUMEL, groups=(ADAM._replace(amsgrad=True), ADAMW)))
    assert same_state(state, before)


def test_adam_needs_no_third_moment_for_the_groups_of_others() -> None:
    state = state_of()._replace(max_exp_avg_sq=None)
    run(state, table_of(NUMEL, groups=(ADAM, ADAMW._replace(amsgrad=True))))


def test_adam_refuses_a_table_that_ends_past_the_shard() -> None:
    state = state_of()
    before = copy.deepcopy(state)
    with refused("table", ValueError, "ends at 7, wanted at most 6"):
        run(state, table_of(3, 4))
    assert same_state(state, before)


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    [
        ("found_inf", torch.zeros(1).double(), TypeError, "got torch.float64, wanted torch.float3"),
        ("found_inf", torch.zeros(2), ValueError, "got 2 elements, wanted 1"),
        ("found_inf", torch.zeros(1, device="meta"), ValueError, "got device meta, wanted cpu"),
        ("grad_scale", torch.ones(1), TypeError, "got torch.float32, wanted torch.float64"),
        ("grad_scale", torch.ones(2).double(), ValueError, "got 2 elements, wanted 1"),
    ],
)
def test_adam_refuses_a_scalar(
    name: str, value: torch.Tensor, kind: type[Exception], message: str
) -> None:
    state = state_of()
    before = copy.deepcopy(state)
    with refused(name, kind, message):
        run(state, table_of(NUMEL), **{name: value})
    assert same_state(state, before)


def test_a_table_of_another_device_is_refused() -> None:
    table = table_of(NUMEL)
    table.device_rows = table.device_rows.to("meta")
    with refused("table", ValueError, "got device meta, wanted cpu"):
        run(state_of(), table)
    with refused("table", ValueError, "got device meta, wanted cpu"):
        pack_(torch.zeros(NUMEL), table)


@pytest.mark.parametrize("wrong", [*WRONG, "double", "narrow"])
def test_mean_refuses_out(wrong: str) -> None:
    change, kind, message = WRONG_BESIDE_OTHERS[wrong]
    with refused("out", kind, message):
        mean_(change(torch.ones(NUMEL)), [torch.ones(NUMEL)])


@pytest.mark.parametrize("wrong", WRONG_BESIDE_OTHERS)
def test_mean_refuses_a_chunk(wrong: str) -> None:
    change, kind, message = WRONG_BESIDE_OTHERS[wrong]
    out = torch.zeros(NUMEL)
    with refused("chunks[1]", kind, message):
        mean_(out, [torch.ones(NUMEL), change(torch.ones(NUMEL))])
    assert torch.equal(out, torch.zeros(NUMEL))


def test_mean_refuses_no_chunks() -> None:
    with refused("chunks", ValueError, "got none, wanted at least one"):
        mean_(torch.ones(NUMEL), [])


@pytest.mark.parametrize("wrong", WRONG)
def test_square_sum_refuses(wrong: str) -> None:
    change, kind, message = WRONG[wrong]
    with refused("x", kind, message):
        square_sum(change(torch.ones(NUMEL)))


@pytest.mark.parametrize("wrong", WRONG)
def test_found_inf_refuses(wrong: str) -> None:
    change, kind, message = WRONG[wrong]
    with refused("x", kind, message):
        found_inf_(torch.zeros(1), change(torch.ones(NUMEL)))


def test_found_inf_refuses_its_flag() -> None:
    with refused("found_inf", TypeError, "got torch.int64, wanted torch.float32"):
        found_inf_(torch.zeros(1, dtype=torch.int64), torch.ones(NUMEL))
