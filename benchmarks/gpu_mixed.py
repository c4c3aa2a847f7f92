"""The update in mixed precision on a GPU: device time and bytes a second of each configuration of
formats, beside a copy. Measured as in gpu_update.py."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
from gpu_stage import DeviceClock, Samples, Spread, Work, interleaved, save
from gpu_update import COPY, share_of_copy, whole_table

from fusedshard.kernels import adam_
from fusedshard.native import CODE_BLOCK, AdamState
from fusedshard.tables import integers

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
REMAINDER, CODES = torch.int16, torch.uint8
ELEMENTS, QUICK_ELEMENTS = 2**27, 2**22


class Configuration(NamedTuple):
    """Formats of the arrays of a shard."""

    param: torch.dtype
    master: torch.dtype | None
    moments: torch.dtype
    gradient: torch.dtype

    def __str__(self) -> str:
        dtypes = zip(self._fields, self, strict=True)
        return ", ".join(f"{name} {str(d).removeprefix('torch.')}" for name, d in dtypes if d)

    @property
    def bytes_per_element(self) -> float:
        """Moved: the gradient is read, all else is read and written."""
        master = 0 if self.master is None else self.master.itemsize
        exponent = 1 / CODE_BLOCK if self.moments == CODES else 0
        kept = self.param.itemsize + master + 2 * (self.moments.itemsize + exponent)
        return 2 * kept + self.gradient.itemsize


CONFIGURATIONS = [
    Configuration(FP32, None, FP32, FP32),
    *(Configuration(BF16, REMAINDER, moments, FP32) for moments in (FP32, BF16, CODES)),
    *(Configuration(BF16, REMAINDER, moments, BF16) for moments in (BF16, CODES)),
    Configuration(BF16, None, BF16, FP32),
    Configuration(BF16, FP32, FP32, FP32),
    Configuration(FP16, FP32, FP32, FP32),
    Configuration(FP32, None, CODES, FP32),
]


def state_of(formats: Configuration, elements: int, device: str) -> AdamState:
    param = torch.randn(elements, device=device).to(formats.param)
    exp_avg, exp_avg_sq = (
        torch.zeros(elements, dtype=formats.moments, device=device) for _ in range(2)
    )
    exponents: tuple[torch.Tensor | None, ...] = (None, None, None)
    if formats.moments == CODES:
        blocks = -(-elements // CODE_BLOCK)
        pair = (torch.zeros(blocks, dtype=CODES, device=device) for _ in range(2))
        exponents = (*pair, None)
    master = None
    if formats.master is not None:
        master = torch.zeros(elements, dtype=formats.master, device=device)
    if formats.master == FP32:
        master = param.float()
    return AdamState(param, exp_avg, exp_avg_sq, None, master, exponents, seed=0)


def update_of(formats: Configuration, elements: int, device: str) -> Work:
    state = state_of(formats, elements, device)
    grad = torch.rand(elements, device=device).add_(0.5).to(formats.gradient)
    table = whole_table(grad, state.param.itemsize)
    return partial(adam_, state, table, integers([1]).to(device))


def row_of(samples: Samples, formats: Configuration, elements: int) -> dict[str, Any]:
    """The figures of a configuration, measured beside the copy."""
    name, nbytes = str(formats), formats.bytes_per_element
    spread = Spread.of(samples[name])
    return {
        "name": name,
        "bytes_per_element": nbytes,
        "seconds": asdict(spread),
        "gigabytes_per_second": nbytes * elements / spread.median / 1e9,
        "share_of_copy": asdict(share_of_copy(samples, name, nbytes)),
        "samples": samples,
    }


def main(*, quick: bool) -> None:
    clock, repeats = DeviceClock(), 3 if quick else 9
    elements = QUICK_ELEMENTS if quick else ELEMENTS
    figures: dict[str, Any] = {"elements": elements, "results": []}
    source, target = (torch.empty(elements, device="cuda") for _ in range(2))
    copy = partial(clock.seconds, partial(target.copy_, source))
    for formats in CONFIGURATIONS:  # one after another: together they would not fit everywhere
        update = partial(clock.seconds, update_of(formats, elements, "cuda"))
        row = row_of(interleaved({COPY: copy, str(formats): update}, repeats), formats, elements)
        figures["results"].append(row)
        save(figures)
        share = Spread(**row["share_of_copy"]).text()
        print(f"{formats}: {row['bytes_per_element']:.2f} bytes, of copy {share}", flush=True)
        del update
        torch.cuda.empty_cache()
