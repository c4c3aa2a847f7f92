"""A whole step of a thousand small tensors in a CUDA graph, beside the same step without one."""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from gpu_stage import Spread, Work, interleaved, ratio, save
from gpu_update import small_tensors
from kernel_contenders import SMALL_TENSORS

STEPS = 20  # in a row, of one sample
REPLAY = ", replayed"


def captured(work: Work) -> Work:
    """The replay of its CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def seconds_per_step(work: Work) -> float:
    """Of host and device together."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / STEPS


def main(*, quick: bool) -> None:
    warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")
    works: dict[str, Work] = {}
    for name, optimizer in small_tensors("cuda", capturable=True).items():
        for _ in range(3):  # state is made outside of the graph
            optimizer.step()
        works[name] = optimizer.step
        works[name + REPLAY] = captured(optimizer.step)
    timers = {name: partial(seconds_per_step, work) for name, work in works.items()}
    samples = interleaved(timers, 3 if quick else 15)
    results: dict[str, Any] = {}
    for name, seconds in samples.items():
        spread = Spread.of(seconds)
        gain = ratio(samples, name.removesuffix(REPLAY), name)
        results[name] = {"seconds": asdict(spread), "gain": asdict(gain), "samples": seconds}
        print(f"{name}: {spread.text(1e6, 1)} us a step, gain {gain.text()}", flush=True)
    save({"tensors": SMALL_TENSORS, "results": results})
