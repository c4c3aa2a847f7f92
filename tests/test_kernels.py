"""The update against fp64, torch.optim and plain torch; the mean; the sum of squares."""

from __future__ import annotations

import itertools
import math
import platform
from pathlib import Path

import pytest
import torch
from kernel_tools import (
    ADAM,
    GROUPS,
    chunks_of_all_scales,
    describe,
    each_common_group,
    each_dtype,
    each_group,
    make_problem,
    run_kernel,
    update,
)
from oracles import (
    Problem,
    adam_reference_,
    fresh_state,
    ordered_mean,
    run_reference,
    run_torch,
    same_bits,
    same_state,
    torch_fused_default,
)

from fusedshard.kernels import count_steps_, found_inf_, mean_, square_sum
from fusedshard.native import AdamState
from fusedshard.tables import GroupScalars

pytestmark = pytest.mark.usefixtures("each_backend")


@each_group
@each_dtype
def test_update_is_plain_torch_without_fma(group: GroupScalars, dtype: torch.dtype) -> None:
    problem = make_problem(group)
    ours, theirs = run_kernel(problem, dtype), run_reference(problem, dtype)
    if dtype == torch.float32:
        assert same_state(ours, theirs)
    else:  # double powers of beta may differ in their last bit
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="elsewhere torch's default code has FMA instructions"
)
def test_fp32_is_torch_fused_without_vector_instructions(tmp_path: Path) -> None:
    """Bit for bit p, m, v (and vmax), with every option in GROUPS."""
    problems = [make_problem(group) for group in GROUPS]
    for problem, theirs in zip(problems, torch_fused_default(problems, tmp_path), strict=True):
        assert same_state(run_kernel(problem, torch.float32), theirs), describe(problem.group)


@each_group
def test_fp64_equals_torch(group: GroupScalars) -> None:
    problem = make_problem(group)
    problem = Problem(group, problem.param.double(), [grad.double() for grad in problem.grads])
    theirs = run_torch(problem, foreach=True)
    torch.testing.assert_close(run_kernel(problem, torch.float64), theirs, rtol=1e-12, atol=1e-12)


@each_common_group
@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e5])
def test_fp32_error_is_at_most_a_quarter_above_torch(group: GroupScalars, scale: float) -> None:
    """Root mean square errors against fp64. torch's own uses FMA, ours does not."""
    problem = make_problem(group, scale, numel=8192, steps=60)
    exact = run_reference(problem, torch.float64)
    ours, theirs = run_kernel(problem, torch.float32), run_torch(problem, foreach=True)
    for name in AdamState._fields[: 4 if group.amsgrad else 3]:
        want = getattr(exact, name)
        error, allowed = rms(getattr(ours, name) - want), 1.25 * rms(getattr(theirs, name) - want)
        assert error <= allowed, name


def rms(error: torch.Tensor) -> float:
    return float(error.square().mean().sqrt())


def test_beta1_of_zero_forgets_a_large_gradient() -> None:
    group = ADAM._replace(lr=1.0, beta1=0.0, beta2=0.0)
    state = fresh_state(torch.zeros(40))
    update(state, torch.full((40,), 1e8), group, 1)
    update(state, torch.full((40,), 3.0), group, 2)
    assert torch.equal(state.exp_avg, torch.full((40,), 3.0))
    assert torch.equal(state.param, torch.full((40,), -2.0))


def test_bias_correction_is_computed_in_double() -> None:
    """A beta that is rounded to fp32 first is off by 1.4e-3 at step 1."""
    group = ADAM._replace(lr=1.0, beta2=0.99999, eps=0.0)
    state = fresh_state(torch.zeros(1))
    update(state, torch.ones(1), group, 1)
    assert state.param.item() == pytest.approx(-1.0, abs=1e-6)


@pytest.mark.parametrize("step", [1, 2, 3, 1000, 2**24 + 1, 2**40])
def test_step_count_is_an_integer_of_64_bits(step: int) -> None:
    group = ADAM._replace(beta1=1 - 1e-9, beta2=1 - 1e-9)
    ours, theirs = fresh_state(torch.ones(9).double()), fresh_state(torch.ones(9).double())
    grad = torch.linspace(-1, 1, 9, dtype=torch.float64)
    update(ours, grad, group, step)
    adam_reference_(theirs, grad, group, step)
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=0)


@each_group
@pytest.mark.parametrize("grad_scale", [0.25, 1 / 3, 65536.0])
def test_grad_scale_multiplies_the_gradient(group: GroupScalars, grad_scale: float) -> None:
    problem = make_problem(group, steps=1)
    ours = fresh_state(problem.param, group.amsgrad)
    theirs = fresh_state(problem.param, group.amsgrad)
    update(ours, problem.grads[0], group, 1, grad_scale)
    update(theirs, problem.grads[0] * grad_scale, group, 1)
    assert same_state(ours, theirs)


def test_gradient_is_only_read() -> None:
    grad = torch.randn(999)
    before = grad.clone()
    update(fresh_state(torch.ones(999)), grad, ADAM._replace(maximize=True), 1, 0.5)
    assert same_bits(grad, before)


@each_group
def test_non_finite_gradient_touches_its_element_alone(group: GroupScalars) -> None:
    problem = make_problem(group, numel=257, steps=2)
    clean = run_kernel(problem, torch.float32)
    for grad in problem.grads:
        grad[[3, 100, 256]] = torch.tensor([math.nan, math.inf, -math.inf])
    ours, theirs = run_kernel(problem, torch.float32), run_torch(problem, foreach=True)
    others = torch.ones(257, dtype=torch.bool)
    others[[3, 100, 256]] = False
    for name in AdamState._fields[: 4 if group.amsgrad else 3]:
        our, their = getattr(ours, name), getattr(theirs, name)
        assert same_bits(our[others], getattr(clean, name)[others])
        bad = our[~others], their[~others]
        torch.testing.assert_close(*bad, rtol=0, atol=0, equal_nan=True)


def test_nan_stays_in_max_exp_avg_sq() -> None:
    state = fresh_state(torch.ones(2), amsgrad=True)
    group = ADAM._replace(amsgrad=True)
    update(state, torch.tensor([math.nan, 1.0]), group, 1)
    state.exp_avg_sq[0] = 1.0
    update(state, torch.tensor([1.0, 1.0]), group, 2)
    assert state.max_exp_avg_sq is not None
    assert state.max_exp_avg_sq.isnan().tolist() == [True, False]


def test_infinite_weight_without_decay_keeps_its_moments_finite() -> None:
    state = fresh_state(torch.tensor([math.inf, 1.0]))
    update(state, torch.ones(2), ADAM, 1)
    assert state.exp_avg.isfinite().all() and state.param[0] == math.inf


@pytest.mark.parametrize("count", range(1, 6))
@pytest.mark.parametrize("numel", [0, 1, 7, 1023, 1024, 1025, 17 * 257])
@each_dtype
def test_mean_adds_in_order_then_divides(count: int, numel: int, dtype: torch.dtype) -> None:
    chunks = chunks_of_all_scales(count, numel, dtype)
    out = torch.empty(numel, dtype=dtype)
    mean_(out, chunks)
    assert same_bits(out, ordered_mean(chunks))


def test_mean_of_another_order_has_other_bits() -> None:
    values = (2.0**24, 1.0, 1.0, -(2.0**24))
    results = {}
    for order in itertools.permutations(values):
        chunks = list(torch.tensor(order).unsqueeze(1).repeat(1, 100))
        out = torch.empty(100)
        mean_(out, chunks)
        assert same_bits(out, ordered_mean(chunks))
        results[order] = out[0].item()
    assert results[values] == 0.0
    assert results[2.0**24, -(2.0**24), 1.0, 1.0] == 0.5


def test_mean_divides_rather_than_multiplies() -> None:
    chunks = chunks_of_all_scales(3, 999, torch.float32)
    out = torch.empty(999)
    mean_(out, chunks)
    product = (chunks[0] + chunks[1] + chunks[2]) * torch.tensor(1 / 3)
    assert not same_bits(out, product)  # so the bits of the test above tell the two apart


@pytest.mark.parametrize("index", range(4))
def test_mean_into_one_of_its_chunks(index: int) -> None:
    chunks = chunks_of_all_scales(4, 5000, torch.float32)
    want, others = ordered_mean(chunks), [chunk.clone() for chunk in chunks]
    mean_(chunks[index], chunks)
    assert same_bits(chunks[index], want)
    for i in set(range(4)) - {index}:
        assert same_bits(chunks[i], others[i])


def test_mean_keeps_zeros_sign_and_non_finite_values() -> None:
    values = [[-0.0, math.nan, math.inf, math.inf], [-0.0, 1.0, 1.0, -math.inf]]
    out = torch.empty(4)
    mean_(out, list(torch.tensor(values)))
    assert same_bits(out, torch.tensor([-0.0, math.nan, math.inf, math.nan]))


@pytest.mark.parametrize("numel", [0, 1, 7, 127, 128, 129, 4095, 4096, 4097, 17 * 257, 100_003])
@each_dtype
def test_square_sum_equals_fsum(numel: int, dtype: torch.dtype) -> None:
    (x,) = chunks_of_all_scales(1, numel, dtype)
    exact = math.fsum(value * value for value in x.double().tolist())
    assert square_sum(x).item() == pytest.approx(exact, rel=1e-12, abs=0)


def test_square_sum_of_many_small_and_of_huge_values() -> None:
    small = torch.full((4_000_000,), 1e-4)
    assert square_sum(small).item() == pytest.approx(4e6 * small[0].item() ** 2, rel=1e-9)
    assert square_sum(torch.full((1000,), 1e20)).item() == pytest.approx(1e43, rel=1e-6)
    assert square_sum(torch.full((1000,), 1e-30)).item() == pytest.approx(1e-57, rel=1e-6)


@pytest.mark.parametrize("at", [0, 31, 1024, 4999])
def test_square_sum_sees_non_finite_values(at: int) -> None:
    x = torch.ones(5000)
    x[at] = -math.inf
    assert square_sum(x) == math.inf
    x[at] = math.nan
    assert math.isnan(square_sum(x))


@pytest.mark.parametrize("numel", [0, 1, 3, 4, 5, 17 * 257])
@each_dtype
def test_found_inf_keeps_its_value_where_all_is_finite(numel: int, dtype: torch.dtype) -> None:
    x = torch.full((numel,), torch.finfo(dtype).max, dtype=dtype)
    for before in (0.0, 1.0):
        found_inf = torch.tensor([before])
        found_inf_(found_inf, x)
        assert found_inf.item() == before


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 1, 4000, 17 * 257 - 1])
@each_dtype
def test_found_inf_sees_every_element(at: int, value: float, dtype: torch.dtype) -> None:
    x = torch.ones(17 * 257, dtype=dtype)
    x[at] = value
    found_inf = torch.zeros(1)
    found_inf_(found_inf, x)
    assert found_inf.item() == 1.0


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_found_inf_skips_the_update(found: float) -> None:
    state, skipped = fresh_state(torch.ones(999)), fresh_state(torch.ones(999))
    grad = torch.linspace(-1, 1, 999)
    update(state, grad, ADAM, 1)
    update(skipped, grad, ADAM, 1, found_inf=torch.tensor([found]))
    assert same_state(skipped, fresh_state(torch.ones(999)) if found else state)


@each_dtype
def test_grad_scale_may_be_a_tensor(dtype: torch.dtype) -> None:
    by_number, by_tensor = (fresh_state(torch.ones(999, dtype=dtype)) for _ in range(2))
    grad = torch.linspace(-1, 1, 999, dtype=dtype)
    update(by_number, grad, ADAM, 1, 1 / 3)
    update(by_tensor, grad, ADAM, 1, torch.tensor(1 / 3, dtype=torch.float64))
    assert same_state(by_tensor, by_number)


@pytest.mark.parametrize("found", [None, 0.0, 1.0])
def test_steps_are_counted_unless_skipped(found: float | None) -> None:
    steps = torch.tensor([0, 5, 2**24 + 1, 7])
    mirror, used = torch.full((4,), -1.0), torch.tensor([1, 0, 1, 1])
    count_steps_(steps, mirror, used, None if found is None else torch.tensor([found]))
    counted = [1, 5, 2**24 + 2, 8]
    assert steps.tolist() == ([0, 5, 2**24 + 1, 7] if found else counted)
    assert mirror.tolist() == ([-1.0] * 4 if found else counted)
