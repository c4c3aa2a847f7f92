"""In which formats an optimizer keeps its arrays, and how numbers get into them and back.

The kernels do this by themselves, in the same pass as the update (csrc/numbers.h says what the
formats are). What is here is for state dicts and for parameters that somebody has edited.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fusedshard.kernels import MASTER_DTYPES, MOMENT_DTYPES
from fusedshard.native import CODE_BLOCK

# Parameters of fewer elements keep fp32 moments where others have codes.
LEAST_CODED = 4096

_LEAST_EXPONENT, _MOST_EXPONENT = 40, 254  # of a block of codes
_MAGNITUDE, _INFINITY, _WORD = 0x7FFFFFFF, 0x7F800000, 0xFFFFFFFF


@dataclass(frozen=True)
class Precision:
    """The arguments about formats: see `fusedshard.Adam`."""

    master_weights: bool | None
    state_dtype: torch.dtype
    stochastic_rounding: bool
    seed: int

    def check(self) -> None:
        """Raise for a value that is not among the allowed ones."""
        if not any(self.master_weights is known for known in (None, True, False)):
            raise ValueError(
                f"master_weights: got {self.master_weights!r}, wanted None, True or False"
            )
        if not any(self.state_dtype is known for known in MOMENT_DTYPES):
            wanted = ", ".join(map(str, MOMENT_DTYPES))
            raise ValueError(f"state_dtype: got {self.state_dtype!r}, wanted one of {wanted}")
        if not isinstance(self.stochastic_rounding, bool):
            raise ValueError(
                f"stochastic_rounding: got {self.stochastic_rounding!r}, wanted True or False"
            )
        if not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed: got {self.seed!r}, wanted an integer of 64 bits")

    def moments_of(self, param: torch.Tensor) -> torch.dtype:
        """The dtype of a parameter's moments."""
        if param.dtype not in (torch.float32, *MASTER_DTYPES):
            return param.dtype.to_real()
        coded = self.state_dtype == torch.uint8
        return torch.float32 if coded and param.numel() < LEAST_CODED else self.state_dtype

    def block_of(self, param: torch.Tensor) -> int:
        """Elements of a parameter that stay together on one rank: those that share an exponent or
        a check."""
        coded = self.moments_of(param) == torch.uint8
        in_blocks = coded or self.master_of(param.dtype) == torch.int16
        return CODE_BLOCK if in_blocks else 1

    def master_of(self, dtype: torch.dtype) -> torch.dtype | None:
        """What is kept beside parameters of a dtype: int16 remainders, fp32 copies, or nothing."""
        if self.master_weights is False or dtype not in MASTER_DTYPES:
            return None
        remainder = self.master_weights is None and dtype == torch.bfloat16
        return torch.int16 if remainder else torch.float32

    @property
    def rounding_seed(self) -> int | None:
        """None: round to the nearest."""
        return self.seed if self.stochastic_rounding else None

    def described(self) -> dict[str, Any]:
        """What must be the same on every rank."""
        return {
            "master_weights": self.master_weights,
            "state_dtype": self.state_dtype,
            "stochastic_rounding": self.stochastic_rounding,
            "seed": self.seed,
        }


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 values as bf16 numbers, rounded half away from zero, and int16 remainders."""
    bits = master.contiguous().view(torch.int32)
    high = torch.where(master.isnan(), 0x7FC0, (bits + 0x8000) >> 16)
    low = torch.where(master.isnan(), 0, bits - (high << 16))
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join_master(value: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 values that `split_master` took apart."""
    high = value.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + remainder).view(torch.float32)


def checks_of(value: torch.Tensor) -> torch.Tensor:
    """A number for each block of `CODE_BLOCK` of 1-D bf16 numbers, int32, that tells whether they
    are the same bits."""
    bits = value.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF
    blocks = -(-len(bits) // CODE_BLOCK)
    padded = bits.new_zeros(blocks * CODE_BLOCK)
    padded[: len(bits)] = bits
    weights = torch.tensor([_check_weight(i) for i in range(CODE_BLOCK)], device=value.device)
    return _low_word((padded.view(blocks, CODE_BLOCK) * weights).sum(dim=1)).to(torch.int32)


def _check_weight(place: int) -> int:
    weight = (place + 1) * 0x9E3779B9 & _WORD
    weight = (weight ^ weight >> 15) * 0x85EBCA6B & _WORD
    return (weight ^ weight >> 13) | 1


def _low_word(numbers: torch.Tensor) -> torch.Tensor:
    """As a signed 32-bit integer."""
    word = numbers & _WORD
    return word - ((word >> 31) << 32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two tensors of 16-bit numbers are alike."""
    return a.contiguous().view(torch.int16) == b.contiguous().view(torch.int16)


def decode(codes: torch.Tensor, exponents: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """The fp32 numbers of 1-D codes, of exp_avg where ``signed``, else of exp_avg_sq; one exponent
    for each `CODE_BLOCK` of them."""
    shared = exponents.to(torch.int32).clamp(_LEAST_EXPONENT, _MOST_EXPONENT)
    exponent = shared.repeat_interleave(CODE_BLOCK)[: len(codes)]
    code = codes.to(torch.int32)
    if not signed:
        values = (((exponent - 31) << 23) + (code << 20)).view(torch.float32)
        return values.masked_fill(code == 0, 0.0).masked_fill(code == 0xFF, float("inf"))
    magnitude = code & 0x7F
    denormal = magnitude < 8
    base = (exponent - 14) << 23
    shifted = base + (magnitude << 20) - ((~denormal).to(torch.int32) << 23)
    values = shifted.view(torch.float32) - base.view(torch.float32) * denormal
    signs = 1 - 2 * (code >> 7)
    return (values * signs).masked_fill(code == 0x80, float("nan"))


def encode(values: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and exponents of 1-D fp32 numbers, to the nearest; the inverse of `decode` where they
    come from it."""
    bits = values.contiguous().view(torch.int32)
    magnitude = bits & _MAGNITUDE
    finite = magnitude < _INFINITY
    blocks = -(-len(values) // CODE_BLOCK)
    padded = magnitude.new_zeros(blocks * CODE_BLOCK)
    padded[: len(values)] = torch.where(finite, magnitude, 0)
    largest = padded.view(blocks, CODE_BLOCK).amax(dim=1)
    above = (largest + (0xFFFFF if signed else 0x1FFFFF)) >> 23
    shared = above.clamp(_LEAST_EXPONENT, _MOST_EXPONENT)
    exponent = shared.repeat_interleave(CODE_BLOCK)[: len(values)]
    if signed:
        base = (exponent - 14) << 23
        unit = ((291 - exponent) << 23).view(torch.float32)
        small = (magnitude.view(torch.float32) * unit).masked_fill(magnitude >= base, 0.0)
        fixed = torch.where(magnitude < base, small.to(torch.int32), magnitude - base + (1 << 23))
        code = _round(fixed).clamp(max=0x7F)
        sign = (bits >> 24) & 0x80
        code = torch.where(code == 0, 0, code | sign).masked_fill(~finite, 0x80)
    else:
        fixed = (magnitude - ((exponent - 31) << 23)).clamp(min=1 << 20)
        code = _round(fixed).clamp(max=0xFE).masked_fill(magnitude == 0, 0)
        code = code.masked_fill(~finite, 0xFF)
    return code.to(torch.uint8), shared.to(torch.uint8)


def _round(fixed: torch.Tensor) -> torch.Tensor:
    """From units of 2^-20 to whole ones, ties to even."""
    return (fixed + 0x7FFFF + ((fixed >> 20) & 1)) >> 20
