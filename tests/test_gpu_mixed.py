"""The update in mixed precision and the reductions of 16-bit numbers on a GPU: the CPU's bits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from gpu_tools import DEVICE, equal_on_host, placed, placed_state, require_gpu
from kernel_tools import ADAM, ADAMW, chunks_of_all_scales, tables_of
from mixed_oracle import BLOCK, Place
from mixed_tools import (
    BF16,
    CODES,
    FP16,
    FP32,
    REMAINDER,
    Formats,
    copy_of,
    each_format,
    fresh_mixed,
    update_mixed,
)
from oracles import same_bits
from test_kernel_bits import odd_values

from fusedshard.kernels import adam_, found_inf_, mean_, square_sum
from fusedshard.layout import Segment
from fusedshard.native import AdamState
from fusedshard.tables import gradient_addresses, integers

require_gpu()
pytestmark = pytest.mark.gpu

SIZES = [1, 7, 8, 127, 129, 4095, 4097, 17 * 257, 100_003]
SEED = 11
each_seed = pytest.mark.parametrize("seed", [None, SEED], ids=["nearest", "stochastic"])
each_narrow = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])


def odd_start(numel: int, formats: Formats, seed: int | None, **options: Any) -> AdamState:
    """After a step from odd weights by an ordinary gradient."""
    state = fresh_mixed(odd_values(numel, FP32), formats, seed=seed, **options)
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    update_mixed(state, grad, ADAMW, Place(1))
    return state


@pytest.mark.parametrize("wide", [False, True], ids=["narrow gradient", "fp32 gradient"])
@each_seed
@each_format
def test_update(formats: Formats, seed: int | None, wide: bool) -> None:
    groups = (ADAMW._replace(amsgrad=True), ADAM._replace(weight_decay=0.1, maximize=True))
    for (index, numel), group in itertools.product(enumerate(SIZES), groups):
        want = odd_start(numel, formats, seed, amsgrad=group.amsgrad)
        ours = placed_state(want)
        for step in (2, 3):
            grad = odd_values(numel, FP32 if wide else formats.param).roll(step)
            place = Place(step, param=2, first=BLOCK << 33)
            update_mixed(want, grad, group, place, 0.5)
            update_mixed(ours, placed(grad, offset=index % 3), group, place, 0.5)
        assert equal_on_host(ours, want), (numel, group)


@each_seed
@each_format
def test_many_segments(formats: Formats, seed: int | None) -> None:
    """Some of them inactive, with gradients of their own at any address."""
    lengths = [1, 7, 129, 4097, 64, 8200, 1, 1000] * 20
    segments, end = [], 0
    for param, length in enumerate(lengths):
        segments.append(Segment(param, 0, end, length))
        end += -(-length // BLOCK) * BLOCK + param % 2 * BLOCK
    start = odd_start(end, formats, seed, amsgrad=True)
    values = [odd_values(length, formats.param) for length in lengths]
    groups = [ADAMW, ADAM._replace(weight_decay=0.1, amsgrad=True)]
    states = []
    for device in (DEVICE, "cpu"):
        state = placed_state(start, device)
        grads = [placed(value, device, index % 4) for index, value in enumerate(values)]
        group_of = integers([index % 2 for index in range(len(lengths))])
        tables = tables_of(segments, formats.param.itemsize, groups, group_of, device)
        tables.set_used(integers([int(index % 3 != 0) for index in range(len(lengths))]))
        tables.point_at_params(gradient_addresses(grads))
        tables.upload()
        adam_(state, tables.tables[0], torch.arange(len(lengths), device=device))
        states.append(state)
    assert equal_on_host(*states)
    assert not equal_on_host(states[0], start)


@each_format
def test_found_inf_skips(formats: Formats) -> None:
    start = odd_start(1003, formats, SEED)
    for found in (0.0, 1.0):
        ours, want = placed_state(start), copy_of(start)
        grad = torch.ones(1003)
        for state, device in ((ours, DEVICE), (want, "cpu")):
            flag = torch.tensor([found], device=device)
            update_mixed(state, grad.to(device), ADAMW, Place(2), found_inf=flag)
        assert equal_on_host(ours, want)
        assert equal_on_host(ours, start) == (found != 0)


@pytest.mark.parametrize("moments", [FP32, BF16, CODES], ids=["fp32", "bf16", "codes"])
def test_remainders_beside_edited_weights(moments: torch.dtype) -> None:
    """Of every fourth block one weight is another, at places that no two blocks share."""
    numel = 8200
    want = odd_start(numel, Formats(BF16, REMAINDER, moments), SEED)
    ours = placed_state(want)
    edited = torch.arange(0, numel, 4 * BLOCK + 1)
    for state in (ours, want):
        state.param[edited.to(state.param.device)] = 0.0
    for step in (2, 3):
        grad = odd_values(numel, BF16).roll(step)
        update_mixed(want, grad, ADAMW, Place(step))
        update_mixed(ours, placed(grad), ADAMW, Place(step))
        assert equal_on_host(ours, want), step


@pytest.mark.parametrize("gap", [0, 1, 8])
@pytest.mark.parametrize("count", [1, 2, 5])
@each_narrow
def test_mean(dtype: torch.dtype, count: int, gap: int) -> None:
    for numel, offset, out_offset in itertools.product(SIZES, (0, 3), (0, 1, 3)):
        rows = torch.zeros(count, numel + gap, dtype=dtype)
        rows[:, :numel] = torch.stack([odd_values(numel, dtype).roll(i) for i in range(count)])
        want, out = torch.empty(numel), placed(torch.full((numel,), 7.0), offset=out_offset)
        mean_(want, [row[:numel] for row in rows])
        room = placed(rows.flatten(), offset=offset)
        mean_(out, [part[:numel] for part in room.split(numel + gap)])
        assert same_bits(out.cpu(), want), (numel, offset, out_offset)


@each_narrow
def test_square_sum(dtype: torch.dtype) -> None:
    for numel, offset in itertools.product([0, *SIZES, 4096 * 4096 + 5], (0, 1, 8)):
        x = chunks_of_all_scales(1, numel, FP32)[0].to(dtype)
        assert same_bits(square_sum(placed(x, offset=offset)).cpu(), square_sum(x)), numel


@each_narrow
def test_found_inf(dtype: torch.dtype) -> None:
    for numel, offset in itertools.product(SIZES, (0, 1)):
        x = placed(torch.full((numel,), torch.finfo(dtype).max, dtype=dtype), offset=offset)
        for place, value in itertools.product({0, numel // 2, numel - 1}, ("inf", "-inf", "nan")):
            results = []
            for written in (torch.finfo(dtype).max, float(value)):
                x[place] = written
                found_inf = torch.zeros(1, device=DEVICE)
                found_inf_(found_inf, x)
                results.append(found_inf.item())
            x[place] = 0
            assert results == [0.0, 1.0], (numel, place, value)
