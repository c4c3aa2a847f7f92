"""Every kernel a few times on small arrays of awkward sizes and places, for compute-sanitizer.

Results are not looked at here: the tests do that.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import torch

from fusedshard.kernels import (
    SUPPORTED_DTYPES,
    adam_,
    count_steps_,
    fingerprints,
    found_inf_,
    mean_,
    square_sum,
    wide_dtype,
)
from fusedshard.layout import Segment
from fusedshard.native import BACKENDS, CODE_BLOCK, AdamState
from fusedshard.tables import GroupScalars, StepTables, gradient_addresses, integers

SIZES = (1, 7, 4097)
OFFSETS = (0, 3)
ADAMW = GroupScalars(1e-2, 0.9, 0.999, 1e-8, 0.1, decoupled=True, amsgrad=False, maximize=False)
GROUPS = (
    ADAMW,
    ADAMW._replace(decoupled=False, maximize=True),
    ADAMW._replace(amsgrad=True),
    ADAMW._replace(amsgrad=True, decoupled=False),
)
# Dtypes of the parameter, of its master, and of the moments.
MixedFormats = tuple[torch.dtype, torch.dtype | None, torch.dtype]
MIXED_FORMATS: list[MixedFormats] = [
    (param, master, moments)
    for param, master in (
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.int16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    )
    for moments in (torch.float32, torch.bfloat16, torch.uint8)
]


def random(numel: int, dtype: torch.dtype, device: str, offset: int = 0) -> torch.Tensor:
    """Its memory ends with it, so that a step past its end is a step out of the allocation."""
    values = torch.rand(numel + offset, generator=torch.Generator().manual_seed(numel))
    return values.to(dtype).to(device)[offset:]


def segments_of(lengths: Sequence[int], gap: int) -> list[Segment]:
    starts = [gap + sum(lengths[:i]) + i * gap for i in range(len(lengths))]
    return [Segment(i, 0, starts[i], length) for i, length in enumerate(lengths)]


def tables_of(
    segments: Sequence[Segment], itemsize: int, groups: Sequence[GroupScalars], device: str
) -> StepTables:
    group_of = integers([segment.param % len(groups) for segment in segments])
    tables = StepTables([(segments, itemsize)], group_of, len(groups), torch.device(device))
    tables.set_groups(groups)
    tables.set_used(integers([int(segment.param != 1) for segment in segments]))
    return tables


def run_adam(dtype: torch.dtype, device: str, offset: int, groups: Sequence[GroupScalars]) -> None:
    segments = segments_of([*SIZES, 1, 2, 8200], gap=5)
    numel = segments[-1].shard_start + segments[-1].length
    p, m, v, largest = (random(numel, dtype, device, offset * i) for i in range(4))
    state = AdamState(p, m, v, largest if any(group.amsgrad for group in groups) else None)
    grads = [random(s.length, dtype, device, offset) for s in segments]
    tables = tables_of(segments, dtype.itemsize, groups, device)
    tables.point_at_params(gradient_addresses(grads))
    tables.upload()
    steps = integers([0] * len(segments)).to(device)
    scale = torch.ones((), dtype=torch.float64, device=device)
    for skipped in (0.0, 1.0):
        found_inf = torch.full((), skipped, device=device)
        adam_(state, tables.tables[0], steps, scale, found_inf)
        count_steps_(steps, steps.float(), tables.device_used, found_inf)


def run_mixed(formats: MixedFormats, device: str, offset: int, seed: int | None) -> None:
    """Gradients of the parameters' dtype and, with an offset, in fp32."""
    param_dtype, master, moments = formats
    segments = [
        Segment(index, 0, index * 2 * CODE_BLOCK, length)
        for index, length in enumerate((1, CODE_BLOCK + 7, 2 * CODE_BLOCK - 1, 8200))
    ]
    numel = segments[-1].shard_start + segments[-1].length
    p, m, v, largest = (random(numel, d, device) for d in (param_dtype, *[moments] * 3))
    kept = None if master is None else random(numel, master, device)
    blocks = -(-numel // CODE_BLOCK)
    checks = random(blocks, torch.int32, device) if master == torch.int16 else None
    exponents: tuple[torch.Tensor | None, ...] = (None, None, None)
    if moments == torch.uint8:
        exponents = tuple(random(blocks, moments, device) for _ in range(3))
    state = AdamState(p, m, v, largest, kept, exponents, seed, checks)
    wide = offset != 0
    grad_dtype = torch.float32 if wide else param_dtype
    grads = [random(s.length, grad_dtype, device, offset) for s in segments]
    tables = tables_of(segments, param_dtype.itemsize, GROUPS, device)
    are_wide = integers([int(wide and param_dtype.itemsize == 2)] * len(segments))
    tables.point_at_params(gradient_addresses(grads), are_wide)
    tables.upload()
    adam_(state, tables.tables[0], integers([0] * len(segments)).to(device))


def run_moves(dtype: torch.dtype, device: str, offset: int) -> None:
    """pack and unpack, of any size of elements: the wrapper takes those of the update only."""
    segments = segments_of([*SIZES, 3], gap=3)
    grads: list[torch.Tensor | None] = [random(s.length, dtype, device, offset) for s in segments]
    grads[1] = None
    tables = tables_of(segments, dtype.itemsize, GROUPS, device)
    tables.point_at_params(gradient_addresses(grads))
    tables.upload()
    send = random(tables.tables[0].end + 9, dtype, device, offset)
    backend = BACKENDS[torch.device(device).type]
    backend.pack(send, tables.tables[0])
    backend.unpack(send, tables.tables[0])


def run_reductions(numel: int, dtype: torch.dtype, device: str, offset: int) -> None:
    x = random(numel, dtype, device, offset)
    square_sum(x)
    found_inf_(torch.zeros((), device=device), x)
    for count, gap in itertools.product((1, 3), (0, 1, 8)):
        room = random(count * (numel + gap), dtype, device, offset)
        out = random(numel, wide_dtype(dtype), device, offset)
        mean_(out, [part[:numel] for part in room.split(numel + gap)])


def run_fingerprints(device: str) -> None:
    """Aligned, as units of four bytes, and byte by byte."""
    for offset in (0, 1, 4):
        sizes = (0, *SIZES, 3 * 16384 + 5)
        fingerprints([random(size, torch.uint8, device, offset) for size in sizes])


def run_all(device: str) -> None:
    for dtype, offset in itertools.product((torch.float32, torch.float64), OFFSETS):
        for groups in (GROUPS, GROUPS[:2]):
            run_adam(dtype, device, offset, groups)
    for formats, offset in itertools.product(MIXED_FORMATS, OFFSETS):
        for seed in (None, 7):
            run_mixed(formats, device, offset, seed)
    for dtype, offset in itertools.product(SUPPORTED_DTYPES, OFFSETS):
        for numel in (*SIZES, 3 * 4096 + 5):
            run_reductions(numel, dtype, device, offset)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for offset in OFFSETS:
            run_moves(dtype, device, offset)
    run_fingerprints(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    device = parser.parse_args().device
    run_all(device)
    if device != "cpu":
        torch.cuda.synchronize()
    print("every kernel has run")


if __name__ == "__main__":
    main()
