"""The fused update on a GPU: device time beside torch's fused AdamW and beside a copy.

One parameter of each size, then a thousand small ones. The times are the device's own, with the
L2 cache full of other data before each.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from gpu_stage import Bar, DeviceClock, Samples, Spread, Work, interleaved, ratio, save
from kernel_contenders import (
    HYPERPARAMETERS,
    SCALARS,
    SMALL_TENSORS,
    small_parameters,
    whole_table,
)

import fusedshard
from fusedshard.kernels import adam_
from fusedshard.native import AdamState
from fusedshard.tables import integers

COPY = "copy"
KERNEL, TORCH_KERNEL = "fusedshard kernel", "torch._fused_adamw_"
STEP, TORCH_STEP = "fusedshard step", "torch AdamW fused step"
COPY_BYTES = 8  # an element, read and written
UPDATE_BYTES = 28  # parameter, gradient and two moments read, all but gradient written
ARRAYS = 7  # of a size's elements at most at any time, with those that move and the copy's target
SIZES = [4**power for power in range(5, 16)]  # 1 Ki to 1 Gi
LARGE = 100_000_000  # elements, from which on the bars hold
OF_COPY, OF_TORCH = 0.93, 1.05


def contenders(elements: int, device: str) -> dict[str, Work]:
    """All of them on the same four arrays, which are fusedshard's; each update is the second."""
    param = torch.nn.Parameter(torch.randn(elements, device=device))
    grad = param.grad = torch.rand(elements, device=device).add_(0.5)
    ours = fusedshard.AdamW([param], **HYPERPARAMETERS)
    ours.step()
    exp_avg, exp_avg_sq = (ours.state[param][name] for name in ("exp_avg", "exp_avg_sq"))
    theirs = torch.optim.AdamW([param], fused=True, **HYPERPARAMETERS)
    step = torch.ones((), device=device)
    theirs.state[param].update(step=step, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    torch_steps = [torch.full((), 2.0, device=device)]  # torch counts before its kernel runs
    state = AdamState(param.detach(), exp_avg, exp_avg_sq, None)
    table, steps = whole_table(grad, grad.itemsize), integers([1]).to(device)
    target = torch.empty_like(grad)

    lists = ([array] for array in (state.param, grad, exp_avg, exp_avg_sq))

    return {
        COPY: partial(target.copy_, grad),
        KERNEL: partial(adam_, state, table, steps),
        TORCH_KERNEL: partial(torch._fused_adamw_, *lists, [], torch_steps, **SCALARS),
        STEP: ours.step,
        TORCH_STEP: theirs.step,
    }


def small_tensors(device: str, **options: Any) -> dict[str, torch.optim.Optimizer]:
    """Both optimizers on the same gradients of many small tensors."""
    made: dict[str, torch.optim.Optimizer] = {}
    for name, kind, own in (
        (STEP, fusedshard.AdamW, options),
        (TORCH_STEP, torch.optim.AdamW, options | {"fused": True}),
    ):
        made[name] = kind(small_parameters(device), **HYPERPARAMETERS, **own)
    return made


def rows(samples: Samples, elements: int) -> list[dict[str, Any]]:
    """The figures of one size."""
    found = []
    for name, seconds in samples.items():
        nbytes = COPY_BYTES if name == COPY else UPDATE_BYTES
        spread = Spread.of(seconds)
        found.append(
            {
                "name": name,
                "seconds": asdict(spread),
                "gigabytes_per_second": nbytes * elements / spread.median / 1e9,
                "share_of_copy": asdict(share_of_copy(samples, name)),
                "speed_against_torch_step": asdict(ratio(samples, TORCH_STEP, name)),
                "samples": seconds,
            }
        )
    return found


def share_of_copy(samples: Samples, name: str, update_bytes: float = UPDATE_BYTES) -> Spread:
    """Bytes a second, as a share of the copy's, round by round."""
    weight = 1.0 if name == COPY else update_bytes / COPY_BYTES
    pairs = zip(samples[COPY], samples[name], strict=True)
    return Spread.of([weight * copy / seconds for copy, seconds in pairs])


def bars(samples: Samples, elements: int) -> list[Bar]:
    if elements < LARGE:
        return []
    size = f"{elements:,} fp32 elements"
    return [
        bar
        for ours, theirs in ((KERNEL, TORCH_KERNEL), (STEP, TORCH_STEP))
        for bar in (
            Bar(f"{ours}, share of copy, {size}", share_of_copy(samples, ours), OF_COPY),
            Bar(f"{ours}, against {theirs}, {size}", ratio(samples, theirs, ours), OF_TORCH),
        )
    ]


def sizes_that_fit(quick: bool) -> list[int]:
    free, _ = torch.cuda.mem_get_info()
    chosen = SIZES[:7:3] if quick else SIZES
    return [size for size in chosen if 4 * ARRAYS * size < free]


def measure_sizes(clock: DeviceClock, repeats: int, figures: dict[str, Any], quick: bool) -> None:
    for elements in sizes_that_fit(quick):
        torch.cuda.empty_cache()
        variants = contenders(elements, "cuda")
        timers = {name: partial(clock.seconds, work) for name, work in variants.items()}
        samples = interleaved(timers, repeats)
        figures["sizes"].append({"elements": elements, "results": rows(samples, elements)})
        figures["bars"] += [bar.as_json() for bar in bars(samples, elements)]
        save(figures)
        texts = [f"{name} {Spread.of(s).text(scale=1e6, digits=1)}" for name, s in samples.items()]
        print(f"{elements:>13,}  us: {'; '.join(texts)}", flush=True)


def host_seconds(work: Work) -> float:
    """Until the call returns; the device is idle before."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_small(clock: DeviceClock, repeats: int) -> dict[str, Any]:
    steps = {name: optimizer.step for name, optimizer in small_tensors("cuda").items()}
    host = interleaved({n: partial(host_seconds, step) for n, step in steps.items()}, repeats)
    lead = 3 * max(max(seconds) for seconds in host.values())
    timers = {name: partial(clock.seconds, step, lead) for name, step in steps.items()}
    found = {"tensors": SMALL_TENSORS}
    return found | compared("host", host) | compared("device", interleaved(timers, repeats))


def compared(what: str, samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Samples of both steps, in words too."""
    spreads = {name: Spread.of(seconds) for name, seconds in samples.items()}
    for name, spread in spreads.items():
        print(f"{SMALL_TENSORS} tensors, {what}, us: {name} {spread.text(1e6, 1)}", flush=True)
    return {f"{what}_seconds": {name: asdict(spread) for name, spread in spreads.items()}}


def main(*, quick: bool) -> None:
    clock, repeats = DeviceClock(), 3 if quick else 15
    figures: dict[str, Any] = {"bytes_per_element": UPDATE_BYTES, "sizes": [], "bars": []}
    figures["small_tensors"] = measure_small(clock, repeats)
    measure_sizes(clock, repeats, figures, quick)
