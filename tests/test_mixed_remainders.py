"""Remainders beside weights that somebody has edited: they count in blocks whose weights have the
bits that they were split from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_tools import ADAM, ADAMW
from mixed_oracle import BLOCK, Place, checks_of, join
from mixed_tools import (
    BF16,
    CODES,
    FP32,
    REMAINDER,
    Formats,
    copy_of,
    fresh_mixed,
    on_each_mixed_backend,
    update_mixed,
)
from oracles import same_bits, same_state

from fusedshard.native import AdamState

pytestmark = on_each_mixed_backend

NUMEL = 5 * BLOCK + 7  # of which the last block has few
PLACES = [0, BLOCK - 1, 2 * BLOCK + 77, 5 * BLOCK, NUMEL - 1]
# An update that writes what it has read, but for the sign of zeros.
KEEP = ADAM._replace(lr=0.0)
each_moment = pytest.mark.parametrize("moments", [FP32, BF16, CODES], ids=["fp32", "bf16", "codes"])


def trained(moments: torch.dtype = FP32, steps: int = 3) -> AdamState:
    generator = torch.Generator().manual_seed(1)
    state = fresh_mixed(torch.randn(NUMEL, generator=generator), Formats(BF16, REMAINDER, moments))
    # Without eps what is zero becomes NaN, as what stands for elements behind the end.
    group = ADAMW._replace(eps=0.0)
    for step in range(1, steps + 1):
        update_mixed(state, torch.randn(NUMEL, generator=generator), group, Place(step))
    _, remainder, checks = parts(state)
    assert (remainder != 0).double().mean() > 0.9 and same_bits(checks, checks_of(state.param))
    return state


def parts(state: AdamState) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weights, their remainders and the checks."""
    assert state.master is not None and state.checks is not None
    return state.param, state.master, state.checks


def masters(state: AdamState) -> torch.Tensor:
    """Whatever the checks say."""
    param, remainder, _ = parts(state)
    return join(param, remainder)


def same_numbers(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether they have the same bits, but for zeros of two signs and what NaN carry."""
    return torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)


def kept(state: AdamState) -> AdamState:
    """A copy that an update has read and written."""
    after = copy_of(state)
    update_mixed(after, torch.zeros(NUMEL), KEEP, Place(9))
    return after


def check_only_block_is_new(state: AdamState, before: torch.Tensor, place: int) -> None:
    """Of the masters `before`, those of the block at `place` become its weights' values."""
    want = before.clone()
    block = slice(place // BLOCK * BLOCK, place // BLOCK * BLOCK + BLOCK)
    want[block] = state.param[block].float()
    assert not same_bits(want, before)
    after = kept(state)
    assert same_numbers(masters(after), want) and same_numbers(after.param, state.param)
    assert same_bits(parts(after)[2], checks_of(after.param))


VALUES = [0.0, -0.0, 3.0, torch.inf, -torch.inf, 1e-40, -3.3e38]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("place", PLACES)
@each_moment
def test_an_edited_weight_is_taken_over(moments: torch.dtype, place: int, value: float) -> None:
    state = trained(moments)
    before = masters(state)
    state.param.data[place] = value
    check_only_block_is_new(state, before, place)
    assert not kept(state).param.isnan().any()


def test_a_weight_of_nan_spoils_no_other() -> None:
    state = trained()
    before = masters(state)
    state.param[BLOCK + 1] = torch.nan
    check_only_block_is_new(state, before, BLOCK + 1)
    assert kept(state).param.isnan().sum() == 1


@pytest.mark.parametrize("value", [1.0, -1.0])
def test_zeroed_weights_beside_any_remainder_are_zero(value: float) -> None:
    """Beside a negative remainder a zero would be NaN."""
    state = fresh_mixed(torch.full((NUMEL,), value), Formats(BF16, REMAINDER, FP32))
    update_mixed(state, torch.full((NUMEL,), value), ADAM._replace(lr=1e-3), Place(1))
    _, remainder, _ = parts(state)
    assert (remainder != 0).all()
    for zero in (0.0, -0.0):
        for sign in (-1, 1):
            remainder.copy_(remainder.abs() * sign)
            state.param.fill_(zero)
            assert not masters(kept(state)).any()


@pytest.mark.parametrize("bit", range(16))
def test_every_bit_is_seen(bit: int) -> None:
    for place in PLACES:
        state = trained()
        before = masters(state)
        state.param.view(torch.int16)[place] ^= torch.tensor(1 << bit).short()
        check_only_block_is_new(state, before, place)


@pytest.mark.parametrize(("one", "other"), [(0, 1), (5, 6), (127, 0), (31, 77)])
def test_a_swap_is_seen(one: int, other: int) -> None:
    state = trained()
    before = masters(state)
    pair = torch.tensor([BLOCK + one, BLOCK + other])
    assert state.param[pair[0]] != state.param[pair[1]]
    state.param[pair] = state.param[pair.flip(0)]
    check_only_block_is_new(state, before, BLOCK)


def test_swapped_blocks_are_seen() -> None:
    state = trained()
    before = masters(state)
    state.param[: 2 * BLOCK] = state.param[: 2 * BLOCK].roll(BLOCK)
    want = torch.cat([state.param[: 2 * BLOCK].float(), before[2 * BLOCK :]])
    assert same_bits(masters(kept(state)), want)


def undone(weights: torch.Tensor) -> None:
    saved = weights.clone()
    weights.mul_(3.0).add_(1.0)
    weights.copy_(saved)


def negated_twice(weights: torch.Tensor) -> None:
    weights.neg_().neg_()


def averaged_with_itself(weights: torch.Tensor) -> None:
    weights.copy_((weights.float() + weights.float()) / 2)


@pytest.mark.parametrize("edit", [undone, negated_twice, averaged_with_itself])
@each_moment
def test_an_edit_that_changes_no_bit_loses_nothing(
    moments: torch.dtype, edit: Callable[[torch.Tensor], None]
) -> None:
    state = trained(moments)
    before = copy_of(state)
    edit(state.param)
    assert same_state(state, before)
    assert same_bits(masters(kept(state)), masters(before))


def test_blocks_that_were_never_written_have_no_remainder() -> None:
    """Weights, remainders and checks of zero: nothing; and whatever the weights are after that."""
    state = fresh_mixed(torch.zeros(NUMEL), Formats(BF16, REMAINDER, FP32))
    assert same_bits(masters(kept(state)), torch.zeros(NUMEL))
    state.param.copy_(torch.randn(NUMEL, generator=torch.Generator().manual_seed(3)))
    assert same_bits(masters(kept(state)), state.param.float())


def test_training_goes_on_from_an_edit_as_from_its_weights() -> None:
    """Whole updates, not only what they read: the edited block's as with no remainder."""
    state = trained()
    state.param[BLOCK + 3] = -2.0
    want = copy_of(state)
    parts(want)[1][BLOCK : 2 * BLOCK] = 0
    parts(want)[2].copy_(checks_of(want.param))
    grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(4))
    for each in (state, want):
        update_mixed(each, grad, ADAMW, Place(4))
    assert same_state(state, want)
