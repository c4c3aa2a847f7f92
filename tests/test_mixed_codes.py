"""8-bit moments: what they can tell apart. Numbers go in and out through the kernel, and are read
with the table of codes of `mixed_oracle.py`."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import ADAM
from mixed_oracle import BLOCK, CODES, Place, wide_moments
from mixed_tools import CODES as CODED
from mixed_tools import FP32, Formats, copy_of, fresh_mixed, on_each_mixed_backend, update_mixed
from oracles import arrays_of, same_bits

from fusedshard.native import AdamState

pytestmark = on_each_mixed_backend

FORMATS = Formats(FP32, None, CODED)
# exp_avg becomes the gradient, exp_avg_sq its square.
TAKE = ADAM._replace(lr=0.0, beta1=0.0, beta2=0.0)
# Moments are read, kept as they are, and written; the parameter becomes NaN, as 0 / 0.
KEEP = ADAM._replace(lr=0.0, beta1=1.0, beta2=1.0)
each_seed = pytest.mark.parametrize("seed", [None, 3], ids=["nearest", "stochastic"])


def coded(grad: torch.Tensor, seed: int | None = None) -> AdamState:
    """A state that holds a gradient and its square."""
    state = fresh_mixed(torch.ones(len(grad)), FORMATS, seed=seed)
    update_mixed(state, grad, TAKE, Place(1))
    return state


def decoded(state: AdamState) -> tuple[torch.Tensor, torch.Tensor]:
    exp_avg, exp_avg_sq, _ = wide_moments(state)
    assert exp_avg is not None and exp_avg_sq is not None
    return exp_avg, exp_avg_sq


def spread_numbers(numel: int = 64 * BLOCK, powers: float = 12) -> torch.Tensor:
    """Of both signs, over so many powers of two in each block, of sizes that differ by block."""
    generator = torch.Generator().manual_seed(2)
    exponents = -powers * torch.rand(numel, generator=generator)
    exponents += torch.linspace(-40, 40, numel // BLOCK).repeat_interleave(BLOCK)
    signs = torch.randint(2, (numel,), generator=generator) * 2 - 1
    return signs * 2**exponents


@pytest.mark.parametrize(("seed", "bound"), [(None, 1 / 16), (3, 1 / 8)])
def test_relative_error_is_bounded(seed: int | None, bound: float) -> None:
    """Half a last place to the nearest, and one at random: over 13 powers of two for exp_avg, and
    for exp_avg_sq over 24 here."""
    grad = spread_numbers()
    exp_avg, exp_avg_sq = decoded(coded(grad, seed))
    for rounded, exact in ((exp_avg, grad), (exp_avg_sq, grad * grad)):
        error = (rounded - exact).abs() / exact.abs()
        assert error.max() <= bound
        assert error.max() > bound / 2  # so that the bound says something


def test_exp_avg_below_its_range_is_off_by_half_of_the_smallest_code() -> None:
    grad = spread_numbers(powers=40)
    exp_avg, _ = decoded(coded(grad))
    largest = grad.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)
    error = (exp_avg - grad).abs()
    assert (error <= torch.maximum(grad.abs() / 16, largest * 2.0**-17)).all()


@each_seed
def test_exp_avg_sq_keeps_thirty_powers_of_two(seed: int | None) -> None:
    grad = torch.zeros(BLOCK)
    grad[:31] = 2.0 ** (torch.arange(31) / 2)
    grad[31:62] = -(2.0 ** (torch.arange(31) / 2))
    _, exp_avg_sq = decoded(coded(grad, seed))
    exact = grad * grad
    assert ((exp_avg_sq - exact).abs() <= exact / 8).all()
    assert exp_avg_sq[:31].unique().numel() == 31


@each_seed
def test_a_tiny_exp_avg_sq_is_never_read_as_zero(seed: int | None) -> None:
    grad = torch.cat([torch.tensor([1e15]), 10.0 ** torch.linspace(-22, 14, BLOCK - 2)])
    grad = torch.cat([grad, torch.zeros(1)])
    _, exp_avg_sq = decoded(coded(grad, seed))
    exact = grad * grad
    assert exact[:-1].min() > 0
    assert exp_avg_sq[:-1].min() > 0 and exp_avg_sq[-1] == 0
    # What is too small comes out larger, so that an update gets smaller and not huge.
    assert (exp_avg_sq >= exact * 7 / 8).all()


@each_seed
def test_zeros_stay_zero(seed: int | None) -> None:
    grad = torch.zeros(2 * BLOCK)
    grad[5] = -3.0
    grad[7] = -0.0
    for values, exact in zip(decoded(coded(grad, seed)), (-3.0, 9.0), strict=True):
        others = torch.arange(len(grad)) != 5
        assert same_bits(values[others], torch.zeros(len(grad) - 1))
        assert values[5] == exact


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@each_seed
def test_what_is_not_finite_is_seen_and_spoils_no_other(seed: int | None, bad: float) -> None:
    grad = spread_numbers(2 * BLOCK)
    places = torch.tensor([0, 77, 128, 255])
    others = torch.ones(len(grad), dtype=torch.bool)
    others[places] = False
    spoilt = torch.where(others, grad, bad)
    clean = torch.where(others, grad, 0.0)
    for values, want, is_seen in zip(
        decoded(coded(spoilt, seed)),
        decoded(coded(clean, seed)),
        (torch.isnan, torch.isinf),
        strict=True,
    ):
        assert is_seen(values[places]).all()
        assert same_bits(values[others], want[others])


def test_what_is_not_finite_reaches_the_parameter() -> None:
    state = coded(torch.tensor([torch.inf, 1.0]))
    update_mixed(state, torch.ones(2), ADAM, Place(2))
    assert state.param.isnan().tolist() == [True, False]


@each_seed
def test_coding_again_changes_nothing(seed: int | None) -> None:
    state = coded(torch.cat([spread_numbers(), spread_numbers(powers=60)]), seed)
    first = decoded(state)
    for step in (2, 3):
        before = copy_of(state)
        update_mixed(state, torch.zeros(len(state.param)), KEEP, Place(step))
        for values, want in zip(decoded(state), first, strict=True):
            assert same_bits(values, want)
    for name, array in arrays_of(before).items():
        assert name == "param" or same_bits(arrays_of(state)[name], array)


def test_every_code_comes_back() -> None:
    """At exponents from the least to the greatest: the table's number is read, and written as the
    same code where the block's largest is among them."""
    for exponent in (40, 41, 100, 127, 200, 254):
        codes = [torch.arange(256), torch.arange(256)]
        state = fresh_mixed(torch.ones(512), FORMATS)
        for moment, exponents, order in zip(state.moments, state.exponents, codes, strict=False):
            assert moment is not None and exponents is not None
            # Each block of 128 with the largest finite codes at its end.
            moment.copy_(torch.cat([order, order.flip(0)]))
            moment[127::128] = 0x7F if moment is state.exp_avg else 0xFE
            exponents.fill_(exponent)
        before = copy_of(state)
        update_mixed(state, torch.zeros(512), KEEP, Place(2))
        assert same_bits(state.exp_avg, before.exp_avg), exponent
        assert same_bits(state.exp_avg_sq, before.exp_avg_sq), exponent


def test_blocks_are_counted_from_the_shard_and_do_not_see_each_other() -> None:
    grad = spread_numbers(3 * BLOCK)
    for start in (0, BLOCK, 2 * BLOCK):
        alone = coded(grad[start : start + BLOCK].contiguous())
        whole = coded(grad)
        assert same_bits(alone.exp_avg, whole.exp_avg[start : start + BLOCK])
        assert same_bits(alone.exp_avg_sq, whole.exp_avg_sq[start : start + BLOCK])


def test_codes_are_in_order() -> None:
    """Of the oracle's own table: larger codes stand for larger numbers, the first for zero."""
    signed, unsigned = (code.magnitudes for code in CODES[:2])
    assert len(signed) == 128 and len(unsigned) == 256
    assert signed[0] == 0.0 and signed[1] == 2.0**-17 and signed[-1] == 1.875
    assert unsigned[1] == 1.125 * 2.0**-31 and unsigned[-2] == 1.75
    assert (signed[1:] > signed[:-1]).all() and (unsigned[1:] > unsigned[:-1]).all()
