"""What an update in mixed precision must give, to the bit: `adam_reference_` on fp32 numbers,
between formats that are written anew here, with numpy in double precision."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from oracles import adam_reference_

from fusedshard.native import AdamState
from fusedshard.tables import GroupScalars

BLOCK = 128  # codes that share an exponent, remainders that share a check
Words = NDArray[np.uint64]  # of 32 bits and fewer, in room for products
Random = NDArray[np.int64]  # 16 bits for each element

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(counter: list[Words], key: list[int], multipliers: list[int]) -> list[Words]:
    """Philox of 2 or 4 words with 10 rounds (Salmon et al., SC 2011, section 3.3)."""
    weyl = (0x9E3779B9, 0xBB67AE85)
    for turn in range(10):
        keys = [np.uint64((k + turn * w) & 0xFFFFFFFF) for k, w in zip(key, weyl, strict=False)]
        evens = counter[0::2]
        products = [np.uint64(m) * c for m, c in zip(multipliers, evens, strict=True)]
        # Each product's halves go to another pair of words than it came from, where there is one.
        crossed = products[::-1]
        counter = [
            word
            for product, odd, k in zip(crossed, counter[1::2], keys, strict=True)
            for word in ((product >> _SHIFT) ^ odd ^ k, product & _LOW)
        ]
    return counter


def philox2x32(counter: list[Words], key: int) -> list[Words]:
    return philox(counter, [key], [0xD256D193])


def philox4x32(counter: list[Words], key: list[int]) -> list[Words]:
    return philox(counter, key, [0xD2511F53, 0xCD9E8D57])


class Place(NamedTuple):
    """Where an update's random numbers come from.

    Attributes:
        step: number of the update, from 1.
        param: the parameter's index.
        first: number of the shard's first element in the parameter.
    """

    step: int
    param: int = 0
    first: int = 0


def _halves(number: int) -> list[Words]:
    return [np.array([part], np.uint64) for part in (number & 0xFFFFFFFF, number >> 32)]


def _words(seed: int, place: Place, elements: NDArray[np.uint64], stream: int) -> Words:
    counter = [*_halves(place.step), *_halves(place.param)]
    key, high, _, _ = philox4x32(counter, [seed & 0xFFFFFFFF, seed >> 32])
    pairs = elements >> np.uint64(1)
    upper = (pairs >> _SHIFT) ^ high ^ np.uint64(stream)
    low, top = philox2x32([pairs & _LOW, upper], int(key[0]))
    return np.where(elements & np.uint64(1), top, low)


def random_of_moments(seed: int, place: Place, numel: int) -> tuple[Random, Random]:
    """For exp_avg and for exp_avg_sq."""
    elements = np.arange(numel, dtype=np.uint64) + np.uint64(place.first)
    words = _words(seed, place, elements, 0).astype(np.int64)
    return words & 0xFFFF, words >> 16


def random_of_params(seed: int, place: Place, numel: int) -> Random:
    elements = np.arange(numel, dtype=np.uint64) + np.uint64(place.first)
    words = _words(seed, place, elements >> np.uint64(1), 1 << 31).astype(np.int64)
    return np.where(elements & np.uint64(1), words >> 16, words & 0xFFFF)


def to_bf16(x: torch.Tensor, random: Random | None) -> torch.Tensor:
    """To the nearest; or with ``random`` away from zero where it reaches 2^16 together with the
    bits that are cut off."""
    if random is None:
        return x.to(torch.bfloat16)
    bits = x.view(torch.int32).numpy().astype(np.int64) & 0xFFFFFFFF
    away = (bits & 0xFFFF) + random >= 1 << 16
    rounded = torch.from_numpy(((bits >> 16) + away).astype(np.uint16).view(np.int16))
    return torch.where(x.isnan(), torch.nan, rounded.view(torch.bfloat16))


def join(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 numbers that bf16 ones and their remainders stand for."""
    return (param.float().view(torch.int32) + remainder.int()).view(torch.float32)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 numbers, ties away from zero, and the rest in units of the fp32 number's last place."""
    bits = master.view(torch.int32).long() & 0xFFFFFFFF
    high = bits >> 16
    tie_or_above = (bits & 0x8000) != 0
    high = torch.where(master.isnan(), 0x7FC0, high + tie_or_above)
    rest = torch.where(master.isnan(), 0, bits - (high << 16))
    return high.to(torch.uint16).view(torch.bfloat16), rest.to(torch.int16)


def _check_weight(place: int) -> int:
    weight = (place + 1) * 0x9E3779B9 % 2**32
    weight = (weight ^ weight >> 15) * 0x85EBCA6B % 2**32
    return (weight ^ weight >> 13) | 1


_WEIGHTS = np.array([_check_weight(place) for place in range(BLOCK)], np.uint64)


def checks_of(param: torch.Tensor) -> torch.Tensor:
    """Of each block of bf16 numbers."""
    bits = np.zeros(-(-len(param) // BLOCK) * BLOCK, np.uint64)
    bits[: len(param)] = param.view(torch.int16).numpy().view(np.uint16)
    sums = (bits.reshape(-1, BLOCK) * _WEIGHTS).sum(1) & _LOW
    return torch.from_numpy(sums.astype(np.uint32).view(np.int32))


def _magnitudes(exponents: int, denormal: bool) -> NDArray[np.float64]:
    """Of all codes in order, with 3 mantissa bits, where the shared exponent stands for 1."""
    codes = np.arange(8 << exponents)
    power, mantissa = codes >> 3, codes & 7
    least = 1 - (1 << exponents)
    normal = (1 + mantissa / 8) * 2.0 ** (power + least)
    return np.where(denormal & (power == 0), mantissa / 8 * 2.0 ** (least + 1), normal)


class Code(NamedTuple):
    """A format of 8-bit codes.

    Attributes:
        magnitudes: of the codes, from 0 on.
        signed: codes from 0x80 on are negative.
        bad: the code of what is infinite or NaN, and what it is read as.
        least: the smallest code for what is not zero.
    """

    magnitudes: NDArray[np.float64]
    signed: bool
    bad: tuple[int, float]
    least: int

    def decode(self, codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
        numbers = codes.numpy()
        magnitude = self.magnitudes[numbers & (0x7F if self.signed else 0xFF)]
        scale = 2.0 ** (np.maximum(spread(exponents, len(numbers)), 40) - 127)
        value = np.where(self.signed & (numbers >= 0x80), -magnitude, magnitude) * scale
        value = np.where(numbers == self.bad[0], self.bad[1], value)
        return torch.from_numpy(np.where(numbers == 0, 0.0, value)).float()

    def exponents(self, x: torch.Tensor) -> torch.Tensor:
        """The smallest in range whose largest code is not below the block's largest number."""
        padded = torch.zeros(-(-len(x) // BLOCK) * BLOCK, dtype=torch.float64)
        padded[: len(x)] = torch.where(x.isfinite(), x.double().abs(), 0.0)
        largest = padded.view(-1, BLOCK).amax(1).numpy()
        mantissa, power = np.frexp(largest / self._usable[-1])
        exponent = np.where(mantissa == 0.5, power - 1, power) + 127
        exponent = np.where(largest == 0, 0, exponent)
        return torch.from_numpy(exponent.clip(40, 254).astype(np.uint8))

    def encode(
        self, x: torch.Tensor, exponents: torch.Tensor, random: Random | None
    ) -> torch.Tensor:
        """To the nearest, ties to even; or with ``random`` up where it, in the middle of what its
        16 bits leave open, reaches the next code. Both see 20 bits behind the code."""
        exact = x.double().numpy()
        scaled = np.abs(exact) / 2.0 ** (spread(exponents, len(x)) - 127)
        usable = self._usable
        scaled = np.where(np.isfinite(exact), scaled, 0).clip(usable[self.least], usable[-1])
        code = np.searchsorted(usable, scaled, side="right") - 1
        above = usable[np.minimum(code + 1, len(usable) - 1)]
        gap = np.where(above > usable[code], above - usable[code], 1)
        rest = np.floor((scaled - usable[code]) / gap * 2**20).astype(np.int64)
        half = 2**19
        nearest_up = (rest > half) | ((rest == half) & (code % 2 == 1))
        code += nearest_up if random is None else rest + 16 * random + 8 >= 2**20
        code += np.where(self.signed & (exact < 0) & (code > 0), 0x80, 0)
        code = np.where(exact == 0, 0, code)
        code = np.where(np.isfinite(exact), code, self.bad[0])
        return torch.from_numpy(code.astype(np.uint8))

    @property
    def _usable(self) -> NDArray[np.float64]:
        """Of finite numbers."""
        return self.magnitudes if self.signed else self.magnitudes[:-1]


SIGNED = Code(_magnitudes(4, denormal=True), True, (0x80, float("nan")), 0)
UNSIGNED = Code(_magnitudes(5, denormal=False), False, (0xFF, float("inf")), 1)
CODES = (SIGNED, UNSIGNED, UNSIGNED)  # of exp_avg, exp_avg_sq and max_exp_avg_sq


def spread(of_blocks: torch.Tensor, numel: int) -> NDArray[np.int64]:
    """Each block's number for each of its elements."""
    return np.repeat(of_blocks.numpy().astype(np.int64), BLOCK)[:numel]


def wide_param(state: AdamState) -> torch.Tensor:
    """The fp32 numbers that an update begins with."""
    param, master = state.param, state.master
    if master is None:
        return param.float()
    if master.dtype == torch.int16:
        assert state.checks is not None
        valid = torch.from_numpy(spread(checks_of(param) == state.checks, len(param)))
        return join(param, master * valid)
    edited = master.to(param.dtype) != param
    return torch.where(edited, param.float(), master)


def wide_moments(state: AdamState) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = []
    for code, moment, exponents in zip(CODES, state.moments, state.exponents, strict=True):
        if moment is None or exponents is None:
            found.append(None if moment is None else moment.float())
        else:
            found.append(code.decode(moment, exponents))
    return found


def wide_state(state: AdamState) -> AdamState:
    """All of it in fp32."""
    exp_avg, exp_avg_sq, largest = wide_moments(state)
    assert exp_avg is not None and exp_avg_sq is not None
    param = wide_param(state).clone()
    return AdamState(param, exp_avg.clone(), exp_avg_sq.clone(), largest)


def narrow_into_(state: AdamState, wide: AdamState, place: Place) -> None:
    """Write fp32 numbers into the arrays of a state, in their formats."""
    numel, seed = len(state.param), state.seed
    random: list[Random | None] = [None, None, None]
    if seed is not None:
        random[:2] = random_of_moments(seed, place, numel)
    formats = zip(CODES, state.moments, wide.moments, state.exponents, random, strict=True)
    for code, moment, value, exponents, r in formats:
        if moment is None or value is None:
            continue
        if exponents is not None:
            exponents.copy_(code.exponents(value))
            moment.copy_(code.encode(value, exponents, r))
        else:
            moment.copy_(to_bf16(value, r) if moment.dtype == torch.bfloat16 else value)
    if state.master is not None and state.master.dtype == torch.int16:
        state.param[:], state.master[:] = split(wide.param)
        assert state.checks is not None
        state.checks.copy_(checks_of(state.param))
        return
    if state.master is not None:
        state.master.copy_(wide.param)
    at_random = seed is not None and state.master is None and state.param.dtype == torch.bfloat16
    if at_random:
        state.param.copy_(to_bf16(wide.param, random_of_params(seed or 0, place, numel)))
    else:
        state.param.copy_(wide.param)


def mixed_reference_(
    state: AdamState, grad: torch.Tensor, group: GroupScalars, place: Place, grad_scale: float = 1.0
) -> AdamState:
    """One update in place; returns the fp32 numbers before they were rounded."""
    wide = wide_state(state)
    adam_reference_(wide, grad.float(), group, place.step, grad_scale)
    narrow_into_(state, wide, place)
    return wide
