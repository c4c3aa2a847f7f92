"""Training in mixed precision: formats to choose from, and gradients whose means are exact."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from ranks import Rank
from training import Shapes, backward

import fusedshard

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CODED = torch.uint8
NARROW = (BF16, FP16)
STATES = (FP32, BF16, CODED)
HYPER: dict[str, Any] = {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}
# Some below and some above the least size of 8-bit moments, in the order of their dtypes.
SHAPES: Shapes = [(17, 257), (5,), (64, 100), (0,), (1,), (70, 130), (33,)]
DTYPES = (BF16, FP32, FP16, BF16, FP64, FP32, BF16)


class Formats(NamedTuple):
    """Arguments of an optimizer."""

    master_weights: bool | None
    state_dtype: torch.dtype
    stochastic_rounding: bool

    def __str__(self) -> str:
        state = str(self.state_dtype).removeprefix("torch.")
        rounding = "stochastic" if self.stochastic_rounding else "nearest"
        return f"master={self.master_weights}-{state}-{rounding}"


FORMATS = [
    Formats(*parts) for parts in itertools.product((None, True, False), STATES, (True, False))
]


def make_mixed(seed: int = 0, shapes: Shapes = SHAPES) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    dtypes = itertools.cycle(DTYPES)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape, dtype in zip(shapes, dtypes, strict=False)
    ]


def exact_gradient(
    param: torch.Tensor, step: int, index: int, rank: int, world_size: int
) -> torch.Tensor:
    """A small integer that differs between ranks, while the mean over ranks is the same integer for
    every world size: so sums, means and 16-bit numbers round nothing."""
    generator = torch.Generator().manual_seed(1_000_003 * step + 1009 * index)
    numbers = torch.randint(-40, 41, param.shape, generator=generator)
    apart = rank - (world_size - 1) / 2
    return (numbers + 6 * apart).to(param.dtype)


def train_mixed(
    rank: Rank | None, formats: Formats, steps: int = 4, **options: Any
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Parameters and full state."""
    number, world_size = (0, 1) if rank is None else (rank.rank, rank.world_size)
    params = make_mixed(seed=number)  # the first rank's must win
    group = None if rank is None else rank.group
    optimizer = fusedshard.AdamW(
        params, process_group=group, **formats._asdict(), **HYPER, **options
    )
    for step in range(steps):
        optimizer.zero_grad()
        gradients = [
            exact_gradient(param, step, index, number, world_size)
            for index, param in enumerate(params)
        ]
        backward(params, gradients)
        optimizer.step()
    return [p.detach().clone() for p in params], optimizer.full_state_dict()


def fp32_twins(params: Sequence[torch.Tensor]) -> list[torch.nn.Parameter]:
    """Copies, of which torch trains fp32 ones in place of bf16 and fp16 ones."""
    return [
        torch.nn.Parameter(p.detach().to(FP32 if p.dtype in NARROW else p.dtype, copy=True))
        for p in params
    ]
