"""The update in every combination of formats, to the bit; masters and what is done to them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from emulated_backend import is_emulated
from kernel_tools import ADAM, ADAMW, running_on, ways_to_run
from mixed_oracle import Place, Words, mixed_reference_, philox2x32, philox4x32, wide_param
from mixed_tools import (
    BF16,
    FP16,
    FP32,
    REMAINDER,
    Formats,
    copy_of,
    each_format,
    fresh_mixed,
    on_each_mixed_backend,
    update_in_parts,
    update_mixed,
)
from oracles import arrays_of, same_bits, same_state

from fusedshard.kernels import found_inf_
from fusedshard.native import AdamState
from fusedshard.tables import GroupScalars

pytestmark = on_each_mixed_backend

SEED = (5 << 32) + 7
EMULATED_NUMEL = 9001  # more than two thread blocks take; what is more only takes time
COUPLED = ADAM._replace(weight_decay=0.1, maximize=True, beta1=0.3)
each_seed = pytest.mark.parametrize("seed", [None, SEED], ids=["nearest", "stochastic"])


def gradients(numel: int, steps: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Random, over six decades, some of them zero."""
    generator = torch.Generator().manual_seed(numel)
    found = []
    for _ in range(steps):
        spread = 10 ** (6 * torch.rand(numel, generator=generator) - 4)
        grad = spread * torch.randn(numel, generator=generator)
        grad[torch.rand(numel, generator=generator) < 0.1] = 0.0
        found.append(grad.to(dtype))
    return found


def weights(numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1))


def differing(ours: AdamState, theirs: AdamState) -> list[str]:
    """Names of the arrays that differ."""
    our, their = arrays_of(ours), arrays_of(theirs)
    return [name for name in their if not same_bits(our[name], their[name])]


@pytest.mark.parametrize("wide", [False, True], ids=["narrow gradient", "fp32 gradient"])
@pytest.mark.parametrize(
    "group",
    [ADAMW, ADAMW._replace(amsgrad=True), COUPLED, COUPLED._replace(amsgrad=True)],
    ids=["adamw", "adamw-amsgrad", "adam", "adam-amsgrad"],
)
@each_seed
@each_format
def test_update_is_that_of_fp32_between_formats(
    formats: Formats, seed: int | None, group: GroupScalars, wide: bool
) -> None:
    ours = fresh_mixed(weights(1003), formats, amsgrad=group.amsgrad, seed=seed)
    theirs = copy_of(ours)
    for step, grad in enumerate(gradients(1003, 4, FP32 if wide else formats.param), 1):
        place = Place(step, param=3, first=256)
        update_mixed(ours, grad, group, place, grad_scale=1 / 3)
        mixed_reference_(theirs, grad, group, place, grad_scale=1 / 3)
        assert differing(ours, theirs) == [], step


@each_seed
@each_format
def test_update_of_odd_values(formats: Formats, seed: int | None) -> None:
    """Infinities, NaN, the largest and the smallest numbers, in weights and in gradients."""
    odd = [torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 65504.0, 1e-38, -1e-42, 0.0, -0.0, 1.0]
    pairs = torch.tensor([*itertools.product(odd, odd)])
    ours = fresh_mixed(pairs[:, 0], formats, amsgrad=True, seed=seed)
    theirs = copy_of(ours)
    group = ADAMW._replace(amsgrad=True)
    for step in (1, 2):
        grad = pairs[:, 1].roll(step).contiguous()
        update_mixed(ours, grad, group, Place(step))
        mixed_reference_(theirs, grad, group, Place(step))
        assert differing(ours, theirs) == [], step


@pytest.mark.parametrize("numel", [1, 7, 127, 128, 129, 511, 513, 100_003])
@each_format
def test_bits_are_those_of_every_way_to_run(formats: Formats, numel: int) -> None:
    """Instruction sets, threads (one takes 2^15 elements at least), and shards of 1, 2 and 3 ranks,
    cut within vectors' reach."""
    numel = min(numel, EMULATED_NUMEL) if is_emulated() else numel
    start = fresh_mixed(weights(numel), formats, amsgrad=True, seed=SEED)
    group = ADAMW._replace(amsgrad=True)
    grads = gradients(numel, 2, FP32)
    want = copy_of(start)
    for step, grad in enumerate(grads, 1):
        mixed_reference_(want, grad, group, Place(step))
    ranks = (1, 2, 3) if numel < 1000 else (1, 3)
    all_cuts = [[numel * r // n // 128 * 128 for r in range(1, n)] for n in ranks]
    for (variant, threads), cuts in itertools.product(ways_to_run((1, 3)), all_cuts):
        state = copy_of(start)
        with running_on(variant, threads):
            for step, grad in enumerate(grads, 1):
                update_in_parts(state, grad, group, Place(step), cuts)
        assert differing(state, want) == [], (variant, threads, cuts)


@each_format
def test_gradient_is_only_read_and_found_inf_skips(formats: Formats) -> None:
    state = fresh_mixed(weights(999), formats, seed=SEED)
    before, (grad,) = copy_of(state), gradients(999, 1, FP32)
    given = grad.clone()
    update_mixed(state, grad, ADAMW, Place(1), found_inf=torch.ones(1))
    assert same_state(state, before)
    update_mixed(state, grad, ADAMW, Place(1), found_inf=torch.zeros(1))
    assert not same_state(state, before) and same_bits(grad, given)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_num_04_small_updates_are_not_lost(dtype: torch.dtype) -> None:
    group = ADAMW._replace(lr=1e-4, weight_decay=0.0)
    for master in (FP32, REMAINDER) if dtype == BF16 else (FP32,):
        state = fresh_mixed(torch.ones(8), Formats(dtype, master, FP32))
        for step in range(1, 101):
            update_mixed(state, torch.full((8,), 0.5, dtype=dtype), group, Place(step))
        torch.testing.assert_close(
            wide_param(state), torch.full((8,), 0.98999834), rtol=0, atol=1e-6
        )
        assert torch.equal(state.param, wide_param(state).to(dtype))
        assert dtype == FP16 or state.param[0] == 0.98828125


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_an_edited_weight_is_taken_over(dtype: torch.dtype) -> None:
    """Of the others every bit of the master stays."""
    state = fresh_mixed(weights(1003), Formats(dtype, FP32, FP32))
    for step, grad in enumerate(gradients(1003, 3, FP32), 1):
        update_mixed(state, grad, ADAMW, Place(step))
    assert state.master is not None
    edited = torch.arange(1003) % 7 == 0
    state.param[edited] = 3.0
    want = torch.where(edited, torch.tensor(3.0), state.master)
    assert not torch.equal(state.master[~edited], state.param[~edited].float())
    update_mixed(state, torch.zeros(1003), ADAM._replace(lr=0.0), Place(4))
    assert same_bits(state.master, want)
    assert torch.equal(state.param, want.to(dtype))


def test_fp16_overflow_is_seen_and_leaves_the_master_alone() -> None:
    state = fresh_mixed(torch.full((99,), 65504.0), Formats(FP16, FP32, FP32))
    assert state.master is not None
    group = ADAM._replace(lr=100.0)
    masters = []
    for step in (1, 2):
        update_mixed(state, torch.full((99,), -1.0, dtype=FP16), group, Place(step))
        assert torch.equal(state.param, torch.full((99,), torch.inf, dtype=FP16))
        masters.append(state.master[0].item())
    assert masters == pytest.approx([65604.0, 65704.0], abs=0.1)
    found_inf = torch.zeros(1)
    found_inf_(found_inf, state.param)
    assert found_inf.item() == 1.0


def test_random_numbers_are_philox() -> None:
    """The oracle's own, by the known answers of Random123."""

    def words(*values: int) -> list[Words]:
        return [np.array([value], np.uint64) for value in values]

    ones = 0xFFFFFFFF
    answers = [
        (philox2x32(words(0, 0), 0), 0xFF1DAE59, 0x6CD10DF2),
        (philox2x32(words(ones, ones), ones), 0x2C3F628B, 0xAB4FD7AD),
        (philox2x32(words(0x243F6A88, 0x85A308D3), 0x13198A2E), 0xDD7CE038, 0xF62A4C12),
        (philox4x32(words(0, 0, 0, 0), [0, 0]), 0x6627E8D5, 0xE169C58D),
        (philox4x32(words(ones, ones, ones, ones), [ones, ones]), 0x408F276D, 0x41C83B0E),
        (
            philox4x32(
                words(0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), [0xA4093822, 0x299F31D0]
            ),
            0xD16CFE09,
            0x94FDCCEB,
        ),
    ]
    for got, first, second in answers:
        assert (int(got[0][0]), int(got[1][0])) == (first, second)
