"""The update in mixed precision on a GPU: device time and bytes a second of each configuration of
formats, beside a copy. Measured as in gpu_update.py."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import mixed_arrays
import torch
from gpu_stage import DeviceClock, Samples, Spread, Work, interleaved, save
from gpu_update import COPY, share_of_copy
from kernel_contenders import shard_update
from mixed_arrays import CONFIGURATIONS, Configuration

from fusedshard.native import AdamState

ELEMENTS, QUICK_ELEMENTS = 2**27, 2**22


def update_of(
    configuration: Configuration, elements: int, device: str = "cuda"
) -> tuple[AdamState, Work]:
    """A shard that holds one parameter, and its update."""
    state, gradient = mixed_arrays.allocate(configuration, elements, device)
    return state, shard_update(state, gradient)


def row_of(samples: Samples, configuration: Configuration, elements: int) -> dict[str, Any]:
    """The figures of a configuration that was measured beside the copy."""
    nbytes, seconds = configuration.update_bytes, samples[configuration.name]
    spread = Spread.of(seconds)
    return {
        "name": configuration.name,
        "bytes_an_element": nbytes,
        "seconds": asdict(spread),
        "gigabytes_per_second": nbytes * elements / spread.median / 1e9,
        "share_of_copy": asdict(share_of_copy(samples, configuration.name, nbytes)),
        "samples": samples,
    }


def measure(clock: DeviceClock, configuration: Configuration, elements: int, repeats: int) -> Any:
    source, target = (torch.empty(elements, device="cuda") for _ in range(2))
    _, update = update_of(configuration, elements)
    works: dict[str, Work] = {COPY: partial(target.copy_, source), configuration.name: update}
    timers = {name: partial(clock.seconds, work) for name, work in works.items()}
    return row_of(interleaved(timers, repeats), configuration, elements)


def main(*, quick: bool) -> None:
    clock, repeats = DeviceClock(), 3 if quick else 9
    elements = QUICK_ELEMENTS if quick else ELEMENTS
    figures: dict[str, Any] = {"elements": elements, "results": []}
    for configuration in CONFIGURATIONS:  # one after another: together they need not fit
        row = measure(clock, configuration, elements, repeats)
        figures["results"].append(row)
        save(figures)
        share = Spread(**row["share_of_copy"]).text()
        print(f"{row['name']}: {row['bytes_an_element']} bytes, of copy {share}", flush=True)
        torch.cuda.empty_cache()
