"""Fingerprints on a GPU: whether they are the CPU's, and device time beside a sum of the same
tensor. Measured as in gpu_update.py; the answer's way to the host is left out."""

from __future__ import annotations

from functools import partial

import torch
from gpu_stage import Bar, DeviceClock, Work, interleaved, ratio, rows_beside, save

from fusedshard.kernels import FingerprintTable, fingerprints
from fusedshard.native import BACKENDS

OURS, SHIFTED, SUM = "fingerprint", "fingerprint, 4 bytes behind an aligned address", "torch.sum"
ELEMENTS, QUICK_ELEMENTS = 2**28, 2**22  # of fp32
MOST = 1.2  # times of a plain sum


def contenders(elements: int, device: str = "cuda") -> dict[str, Work]:
    room = torch.randn(elements + 1, device=device)
    x = room[:elements]
    return {OURS: queued(x), SHIFTED: queued(room[1:]), SUM: x.sum}


def queued(x: torch.Tensor) -> Work:
    """Its fingerprint, left on the device."""
    table = FingerprintTable([x])
    hashes = torch.empty(1, dtype=torch.int64, device=x.device)
    return partial(BACKENDS[x.device.type].fingerprints, hashes, table)


def same_as_on_the_host(elements: int, device: str = "cuda") -> bool:
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    pieces, there = x.split(elements // 3), x.to(device).split(elements // 3)
    return fingerprints(there).tolist() == fingerprints(pieces).tolist()


def main(*, quick: bool) -> None:
    elements, repeats = (QUICK_ELEMENTS, 3) if quick else (ELEMENTS, 15)
    same = same_as_on_the_host(QUICK_ELEMENTS)
    save({"same_as_on_the_host": same})
    assert same, "the device's fingerprints are not the host's"
    clock = DeviceClock()
    timers = {
        name: partial(clock.seconds, work) for name, work in contenders(elements, "cuda").items()
    }
    samples = interleaved(timers, repeats)
    bar = Bar(f"time of {OURS} against {SUM}", ratio(samples, OURS, SUM), at_most=MOST)
    found = rows_beside(samples, SUM, 4 * elements)
    figures = {"elements": elements, "same_as_on_the_host": same, "results": found}
    save(figures | {"bars": [bar.as_json()]})
    for row in found:
        print(f"{row['name']}: {row['gigabytes_per_second']:.0f} GB/s", flush=True)
