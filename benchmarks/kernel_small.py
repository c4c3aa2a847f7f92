"""A whole step of many small tensors, where what Python and torch do for each tensor decides."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from harness import Samples, Spread, interleave, ratio, threads
from kernel_contenders import (
    DEEPSPEED,
    FOR_LOOP,
    FOREACH,
    HYPERPARAMETERS,
    TORCH,
    Update,
    deepspeed_optimizer,
    distance_from_fp64,
    is_installed,
    small_parameters,
    torch_step,
)
from kernel_measure import UPDATE_BYTES, Plan, choose
from load import median_other_cores
from torch.nn import Parameter

import fusedshard

OURS = "fusedshard.AdamW"
Build = Callable[[list[Parameter]], Update]


def ours(isa: str | None, params: list[Parameter]) -> Update:
    step = fusedshard.AdamW(params, **HYPERPARAMETERS).step
    choose(isa)
    return step


def optimizers(plan: Plan) -> dict[str, Build]:
    found: dict[str, Build] = {
        OURS: partial(ours, plan.isas[0]),
        TORCH: partial(torch_step, "fused"),
        FOREACH: partial(torch_step, "foreach"),
        FOR_LOOP: partial(torch_step, "for-loop"),
    }
    if plan.device == "cpu" and is_installed("deepspeed"):
        found[DEEPSPEED] = lambda params: deepspeed_optimizer(params).step
    return found


def distance(build: Build, device: str, tensors: int) -> float:
    params = small_parameters(device, tensors)
    grads = [param.grad for param in params if param.grad is not None]
    return distance_from_fp64(build(params), params, grads)


def counted(step: Update, device: str) -> float:
    """Until the work is done; a GPU is idle before."""
    wait = torch.cuda.synchronize if device == "cuda" else None
    if wait:
        wait()
    start = time.perf_counter()
    step()
    if wait:
        wait()
    return time.perf_counter() - start


def rows(samples: Samples, elements: int, distances: dict[str, float]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "seconds": asdict(Spread.of(seconds)),
            "gigabytes_per_second": UPDATE_BYTES * elements / Spread.of(seconds).median / 1e9,
            "speed_against_torch_foreach": asdict(ratio(samples, FOREACH, name)),
            "largest_difference_from_fp64": distances[name],
            "samples": seconds,
        }
        for name, seconds in samples.items()
    ]


def measure_small(plan: Plan, tensors: int) -> tuple[list[dict[str, Any]], dict[int, Samples]]:
    """A result for each number of threads, and the samples by number of threads."""
    builds = optimizers(plan)
    distances = {name: distance(build, plan.device, tensors) for name, build in builds.items()}
    steps = {name: build(small_parameters(plan.device, tensors)) for name, build in builds.items()}
    variants = {name: partial(counted, step, plan.device) for name, step in steps.items()}
    elements = sum(param.numel() for param in small_parameters("cpu", tensors))
    results, samples = [], {}
    for count in plan.threads:
        with threads(count):
            timing = interleave(variants, plan.repeats, before_round=plan.before_round)
        samples[count] = timing.samples
        results.append(
            {
                "threads": count,
                "tensors": tensors,
                "elements": elements,
                "other_cores": median_other_cores([timing.rounds]),
                "rows": rows(timing.samples, elements, distances),
            }
        )
    return results, samples
