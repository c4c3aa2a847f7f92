"""Stochastic rounding: to either neighbour, right on average, and the same wherever it is done."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_tools import ADAM, ADAMW
from mixed_oracle import CODES as CODE_FORMATS
from mixed_oracle import Place, mixed_reference_, wide_moments
from mixed_tools import (
    BF16,
    CODES,
    FP16,
    FP32,
    REMAINDER,
    Formats,
    fresh_mixed,
    on_each_mixed_backend,
    update_mixed,
)
from oracles import arrays_of, same_bits, same_state

from fusedshard.native import AdamState
from fusedshard.tables import GroupScalars

pytestmark = on_each_mixed_backend

NUMEL = 1 << 18
# exp_avg becomes the gradient, exp_avg_sq its square, and the parameter stays.
TAKE = ADAM._replace(lr=0.0, beta1=0.0, beta2=0.0)
each_moment = pytest.mark.parametrize("moments", [BF16, CODES], ids=["bf16", "codes"])


def after(
    grad: torch.Tensor,
    formats: Formats,
    group: GroupScalars = TAKE,
    place: Place = Place(1),  # noqa: B008
    seed: int | None = 11,
) -> AdamState:
    """An update from weights of one and no moments."""
    state = fresh_mixed(torch.ones(len(grad)), formats, seed=seed)
    update_mixed(state, grad, group, place)
    return state


def share_up(rounded: torch.Tensor, down: float, up: float) -> tuple[float, torch.Tensor]:
    """The share of elements that are `up`, and which; all are one of both."""
    is_up = rounded == up
    assert (is_up | (rounded == down)).all()
    return is_up.double().mean().item(), is_up


def check_share(share: float, fraction: float) -> None:
    """Within five standard deviations."""
    sigma = math.sqrt(fraction * (1 - fraction) / NUMEL)
    assert abs(share - fraction) < 5 * sigma, (share, fraction)


def neighbours(x: torch.Tensor, index: int, moments: torch.dtype) -> tuple[float, float]:
    """The numbers of a format below and above x, a positive number that is its block's largest."""
    value = x[0].item()
    if moments == BF16:
        power = 2.0 ** (math.floor(math.log2(value)) - 7)
        down = math.floor(value / power) * power
        return down, down + power
    scale = 2.0 ** (int(CODE_FORMATS[index].exponents(x)[0]) - 127)
    grid = [magnitude * scale for magnitude in CODE_FORMATS[index].magnitudes.tolist()]
    return max(g for g in grid if g <= value), min(g for g in grid if g > value)


@pytest.mark.parametrize("value", [1.0009765625, 1.04, 1.2, 0.9, 7.3e-5, 1.1e-17])
@each_moment
def test_moments_are_right_on_average(moments: torch.dtype, value: float) -> None:
    grad = torch.full((NUMEL,), value)
    found = wide_moments(after(grad, Formats(FP32, None, moments)))
    for index, exact in enumerate((grad, grad * grad)):
        rounded = found[index]
        assert rounded is not None
        down, up = neighbours(exact, index, moments)
        share, _ = share_up(rounded, down, up)
        check_share(share, (exact[0].item() - down) / (up - down))


@pytest.mark.parametrize("lr", [0.0003, 0.001, 0.002, 0.0035])
def test_parameters_without_a_master_are_right_on_average(lr: float) -> None:
    """A step of lr below 1, where the next number is 1 - 2^-8, of which lr is a part."""
    group = ADAM._replace(lr=lr, eps=0.0)
    state = after(torch.ones(NUMEL), Formats(BF16, None, FP32), group)
    share, _ = share_up(state.param.float(), 1.0, 1 - 2.0**-8)
    check_share(share, lr * 2**8)


def test_roundings_do_not_depend_on_each_other() -> None:
    """Those of the three arrays, and of elements that share a call of the generator or a word."""
    group = TAKE._replace(lr=0.0015)
    value = 1.002
    state = after(torch.full((NUMEL,), value), Formats(BF16, None, BF16), group)
    found = []
    for rounded in (state.param, state.exp_avg, state.exp_avg_sq):
        numbers = rounded.float()
        _, up = share_up(numbers, numbers.min().item(), numbers.max().item())
        found.append(up.double() - up.double().mean())
    pairs = [(found[0], found[1]), (found[0], found[2]), (found[1], found[2])]
    pairs += [(x[:-lag], x[lag:]) for x in found for lag in (1, 2, 3, 4, 8, 16, 128, 512)]
    for x, y in pairs:
        correlation = (x * y).mean() / (x.std() * y.std())
        assert abs(correlation) < 5 / math.sqrt(len(x))


SPREAD = torch.logspace(-6, 6, 4099)
ALL = [Formats(BF16, None, BF16), Formats(BF16, None, CODES), Formats(BF16, REMAINDER, CODES)]
each_of_all = pytest.mark.parametrize("formats", ALL, ids=str)


@each_of_all
def test_every_number_is_a_neighbour(formats: Formats) -> None:
    """Of the one that has been computed, for codes at the same exponents."""
    ours = after(SPREAD, formats, ADAMW)
    start = fresh_mixed(torch.ones(len(SPREAD)), formats)
    exact = mixed_reference_(start, SPREAD, ADAMW, Place(1))
    arrays = [(exact.exp_avg, wide_moments(ours)[0]), (exact.exp_avg_sq, wide_moments(ours)[1])]
    assert (ours.param.float() - exact.param).abs().max() < 2.0**-7
    for index, (value, rounded) in enumerate(arrays):
        assert rounded is not None
        if formats.moments == BF16:
            assert ((rounded - value).abs() < value.abs() * 2.0**-7).all()
            continue
        scale = 2.0 ** (CODE_FORMATS[index].exponents(value).double() - 127)
        least = scale.repeat_interleave(128)[: len(value)] * 2.0 ** (-17 if index == 0 else -30)
        gap = torch.maximum(value.double().abs() / 8, least)
        assert ((rounded.double() - value).abs() < gap).all()


@each_of_all
def test_other_seeds_steps_and_parameters_round_otherwise(formats: Formats) -> None:
    """The high words of seeds and of places within parameters count, too."""
    same, place = after(SPREAD, formats), Place(1)
    assert all(
        same_bits(a, arrays_of(same)[n]) for n, a in arrays_of(after(SPREAD, formats)).items()
    )
    others = {
        "seed": after(SPREAD, formats, seed=12),
        "high seed": after(SPREAD, formats, seed=11 + (1 << 32)),
        "step": after(SPREAD, formats, place=Place(2)),
        "high step": after(SPREAD, formats, place=Place(1 + (1 << 32))),
        "parameter": after(SPREAD, formats, place=place._replace(param=1)),
        "element": after(SPREAD, formats, place=place._replace(first=1 << 13)),
        "high element": after(SPREAD, formats, place=place._replace(first=1 << 34)),
    }
    for name in ("exp_avg", "exp_avg_sq"):
        differing = {
            other: (arrays_of(state)[name] != arrays_of(same)[name]).float().mean().item()
            for other, state in others.items()
        }
        assert min(differing.values()) > 0.2, differing


def test_seeds_steps_and_parameters_count_for_parameters() -> None:
    group = TAKE._replace(lr=0.0015, eps=0.0)
    grad, formats = torch.ones(4096), Formats(BF16, None, FP32)
    same = after(grad, formats, group)
    for seed, place in [(12, Place(1)), (11, Place(2)), (11, Place(1, 1)), (11, Place(1, 0, 4096))]:
        other = after(grad, formats, group, place, seed)
        assert (other.param != same.param).float().mean() > 0.2


@pytest.mark.parametrize(
    "formats",
    [Formats(BF16, REMAINDER, FP32), Formats(BF16, FP32, FP32), Formats(FP16, None, FP32)],
)
def test_nothing_is_random_where_nothing_is_to_be(formats: Formats) -> None:
    """Masters and fp16 parameters are rounded to the nearest whatever the seed."""
    states = [after(SPREAD, formats, ADAMW, seed=seed) for seed in (None, 1, 2)]
    assert all(same_state(state, states[0]) for state in states)


def test_no_seed_rounds_to_the_nearest_wherever() -> None:
    for formats in ALL:
        states = [after(SPREAD, formats, place=Place(step), seed=None) for step in (1, 2)]
        assert same_bits(states[0].exp_avg, states[1].exp_avg)
        assert same_bits(states[0].exp_avg_sq, states[1].exp_avg_sq)
