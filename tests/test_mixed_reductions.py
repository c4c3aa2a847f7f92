"""The mean, the sum of squares and the search for infinities of bf16 and fp16 numbers."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_tools import chunks_of_all_scales, running_on, ways_to_run
from mixed_tools import BF16, FP16, on_each_mixed_backend
from oracles import ordered_mean, same_bits

from fusedshard.kernels import found_inf_, mean_, refresh_, square_sum

pytestmark = on_each_mixed_backend

NARROW = [BF16, FP16]
# Around vectors, blocks of a sum, and what one thread and several take.
SIZES = [0, 1, 7, 127, 128, 129, 4095, 4097, 17 * 257, 3 * 2**15 + 17]
each_dtype = pytest.mark.parametrize("dtype", NARROW, ids=["bf16", "fp16"])
each_size = pytest.mark.parametrize("numel", SIZES)


def narrow_chunks(count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of six decades, at equal distances."""
    return list(torch.stack(chunks_of_all_scales(count, numel, torch.float32)).to(dtype))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@each_size
@each_dtype
def test_mean_adds_in_fp32_and_in_order(dtype: torch.dtype, numel: int, count: int) -> None:
    chunks = narrow_chunks(count, numel, dtype)
    want = ordered_mean([chunk.float() for chunk in chunks])
    for variant, threads in ways_to_run((1, 2, 5)):
        out = torch.full((numel,), 7.0)
        with running_on(variant, threads):
            mean_(out, chunks)
        assert same_bits(out, want), (variant, threads)


@each_dtype
def test_mean_is_not_rounded_on_the_way(dtype: torch.dtype) -> None:
    """A sum in the chunks' own dtype has other numbers."""
    chunks = narrow_chunks(3, 999, dtype)
    out = torch.empty(999)
    mean_(out, chunks)
    rounded = (chunks[0] + chunks[1] + chunks[2]) / 3
    assert (out.to(dtype) != rounded).float().mean() > 0.1


@pytest.mark.parametrize(("value", "ranks"), [(40000.0, 2), (30000.0, 4), (65504.0, 8)])
def test_num_09_mean_is_finite_where_the_fp16_sum_is_not(value: float, ranks: int) -> None:
    chunks = list(torch.full((ranks, 4096), value, dtype=FP16))
    assert torch.stack(chunks).sum(0, dtype=FP16).isinf().all()
    out = torch.empty(4096)
    mean_(out, chunks)
    assert torch.equal(out, chunks[0].float())


@each_dtype
def test_mean_keeps_zeros_sign_denormals_and_non_finite_values(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal / 64
    values = [[-0.0, math.nan, math.inf, math.inf, tiny], [-0.0, 1.0, 1.0, -math.inf, tiny]]
    out = torch.empty(5)
    mean_(out, list(torch.tensor(values).to(dtype)))
    assert same_bits(out, torch.tensor([-0.0, math.nan, math.inf, math.nan, tiny]))


@each_size
@each_dtype
def test_square_sum_equals_fsum(dtype: torch.dtype, numel: int) -> None:
    (x,) = narrow_chunks(1, numel, dtype)
    exact = math.fsum(value * value for value in x.double().tolist())
    sums = set()
    for variant, threads in ways_to_run((1, 2, 5)):
        with running_on(variant, threads):
            sums.add(float(square_sum(x)))
    assert len(sums) == 1
    assert sums.pop() == pytest.approx(exact, rel=1e-12, abs=0)


def test_clp_04_square_sum_of_a_large_fp16_norm() -> None:
    x = torch.full((4096,), 2000.0, dtype=FP16)
    assert math.sqrt(square_sum(x)) == 128000.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 1, 4000, 17 * 257 - 1, 3 * 2**15 + 16])
@each_dtype
def test_non_finite_values_are_seen_wherever(dtype: torch.dtype, at: int, bad: float) -> None:
    x = torch.full((max(at + 1, 4369),), torch.finfo(dtype).max, dtype=dtype)
    for variant, threads in ways_to_run((1, 2, 5)):
        found = []
        with running_on(variant, threads):
            for value in (torch.finfo(dtype).max, bad):
                x[at] = value
                found_inf = torch.zeros(1)
                found_inf_(found_inf, x)
                found.append(found_inf.item())
        assert found == [0.0, 1.0], (variant, threads)
    total = float(square_sum(x))
    assert math.isnan(total) if math.isnan(bad) else total == math.inf


@each_dtype
def test_found_inf_keeps_its_value_where_all_is_finite(dtype: torch.dtype) -> None:
    found_inf = torch.ones(1)
    found_inf_(found_inf, torch.ones(99, dtype=dtype))
    assert found_inf.item() == 1.0


@each_size
@each_dtype
def test_what_was_changed_beside_its_rounding_is_taken_over(dtype: torch.dtype, numel: int) -> None:
    (wide,) = chunks_of_all_scales(1, numel, torch.float32)
    narrow = wide.to(dtype)
    narrow[3::7] *= -1
    narrow[5::100] = torch.nan
    same = narrow.view(torch.int16) == wide.to(dtype).view(torch.int16)
    want = torch.where(same, wide, narrow.float())
    assert numel < 7 or not same.all()
    for variant, threads in ways_to_run((1, 2, 5)):
        ours = wide.clone()
        with running_on(variant, threads):
            refresh_(ours, narrow)
        assert same_bits(ours, want), (variant, threads)


def test_what_refresh_refuses() -> None:
    narrow = torch.ones(5, dtype=BF16)
    with pytest.raises(TypeError, match=r"narrow: got torch\.float32, wanted torch\.bfloat16 or"):
        refresh_(torch.ones(5), torch.ones(5))
    with pytest.raises(TypeError, match=r"wide: got torch\.float64, wanted torch\.float32"):
        refresh_(torch.ones(5, dtype=torch.float64), narrow)
    with pytest.raises(ValueError, match="narrow: got 5 elements, wanted 4"):
        refresh_(torch.ones(4), narrow)
