"""Shards in mixed precision for bench_kernel.py and gpu_mixed.py: their formats, and what an update
of them moves."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusedshard import kernels
from fusedshard.native import CODE_BLOCK, AdamState


@dataclass(frozen=True)
class Configuration:
    """How the arrays of a shard lie in memory; gradients are fp32, as after averaging."""

    name: str
    param: torch.dtype
    master: torch.dtype | None
    moments: torch.dtype

    @property
    def update_bytes(self) -> int:
        """That an update moves for an element: the gradient is read, all else is read and written.
        (Exponents of codes are 1/32 byte more, and checks of remainders 1/16.)"""
        return 4 + 2 * (self.memory_bytes - 4)

    @property
    def memory_bytes(self) -> int:
        """That lie in memory for an element, its fp32 gradient with them."""
        master = 0 if self.master is None else self.master.itemsize
        return 4 + self.param.itemsize + master + 2 * self.moments.itemsize


_NARROW = torch.bfloat16
CONFIGURATIONS = (
    Configuration("bf16 + remainder, fp32 moments", _NARROW, torch.int16, torch.float32),
    Configuration("bf16 + remainder, bf16 moments", _NARROW, torch.int16, torch.bfloat16),
    Configuration("bf16 + remainder, 8-bit moments", _NARROW, torch.int16, torch.uint8),
    Configuration("bf16 alone, bf16 moments", _NARROW, None, torch.bfloat16),
    Configuration("bf16 + fp32 master, fp32 moments", _NARROW, torch.float32, torch.float32),
    Configuration("fp16 + fp32 master, fp32 moments", torch.float16, torch.float32, torch.float32),
    Configuration("fp32, 8-bit moments", torch.float32, None, torch.uint8),
)


def allocate(
    configuration: Configuration, elements: int, device: str = "cpu"
) -> tuple[AdamState, torch.Tensor]:
    """A shard as an optimizer allocates it, and its gradient."""

    def new(dtype: torch.dtype, numel: int = elements) -> torch.Tensor:
        return kernels.flat_memory(numel, dtype, torch.device(device))

    param, gradient = new(configuration.param), new(torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    param.normal_(generator=generator)
    gradient.uniform_(0.5, 1.5, generator=generator)
    master = None if configuration.master is None else new(configuration.master)
    if configuration.master == torch.float32 and master is not None:
        master.copy_(param)
    blocks = -(-elements // CODE_BLOCK)
    exponents: tuple[torch.Tensor | None, ...] = (None, None, None)
    if configuration.moments == torch.uint8:
        exponents = (new(torch.uint8, blocks), new(torch.uint8, blocks), None)
    checks = new(torch.int32, blocks) if configuration.master == torch.int16 else None
    narrow = configuration.moments != torch.float32
    state = AdamState(
        param=param,
        exp_avg=new(configuration.moments),
        exp_avg_sq=new(configuration.moments),
        max_exp_avg_sq=None,
        master=master,
        exponents=exponents,
        seed=0 if narrow else None,
        checks=checks,
    )
    return state, gradient


def part(state: AdamState, start: int, elements: int) -> AdamState:
    """Some elements of a shard, from the beginning of a block of codes on."""
    stretch = slice(start, start + elements)
    blocks = slice(start // CODE_BLOCK, -(-stretch.stop // CODE_BLOCK))

    def cut(array: torch.Tensor | None, where: slice) -> torch.Tensor | None:
        return None if array is None else array[where]

    return state._replace(
        param=state.param[stretch],
        exp_avg=state.exp_avg[stretch],
        exp_avg_sq=state.exp_avg_sq[stretch],
        master=cut(state.master, stretch),
        exponents=tuple(cut(exponents, blocks) for exponents in state.exponents),
        checks=cut(state.checks, blocks),
    )
