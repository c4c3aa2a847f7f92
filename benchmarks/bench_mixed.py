"""A step in bf16 on one rank and the CPU, clipped by the global norm: fusedshard, whose masters and
moments are updated in one pass, against torch's passes over fp32 copies; and 8-bit moments against
torchao's.

    python benchmarks/bench_mixed.py [--elements N] [--threads N] [--quick]

Gradients are there beforehand, in bf16. What torch does for a step: copy the gradients to fp32,
clip them, update the fp32 masters by its fused AdamW, and copy these back to bf16. torchao's
AdamW8bit has no masters and clips nothing; it stands beside ours without both. README.md says how
to read the figures.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from charts import Panel, save_bars, spreads_of
from harness import Samples, Spread, Timing, interleave, ratio, threads
from load import median_other_cores, wait_for_idle
from record import Bar, add_common_options, bars_table, busy, folder_of, header, open_console, write
from rich.table import Table
from torch.nn import Parameter

import fusedshard

Step = Callable[[], object]
Build = Callable[[Sequence[Parameter]], Step]

OURS = "fusedshard"
OURS_CODED = "fusedshard, 8-bit moments, no masters, no clipping"
TORCH = "torch, fp32 masters"
TORCHAO = "torchao AdamW8bit, no clipping"
TENSORS = 32
MAX_NORM = 1.0
HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}


def make_params(elements: int) -> list[Parameter]:
    """The same values and gradients each time; what torchao quantizes has whole blocks of 256."""
    numel = max(1, elements // TENSORS // 4096) * 4096
    generator = torch.Generator().manual_seed(0)
    params = []
    for _ in range(TENSORS):
        param = Parameter((2 * torch.rand(numel, generator=generator) - 1).bfloat16())
        param.grad = torch.randn(numel, generator=generator).bfloat16()
        params.append(param)
    return params


def ours(params: Sequence[Parameter], *, clip: bool = True, **formats: Any) -> Step:
    optimizer = fusedshard.AdamW(params, **HYPERPARAMETERS, **formats)

    def step() -> None:
        if clip:
            optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()

    return step


def torch_with_masters(params: Sequence[Parameter]) -> Step:
    copies: list[torch.Tensor] = list(params)
    masters: list[torch.Tensor] = [Parameter(param.detach().float()) for param in params]
    narrow = [param.grad for param in params if param.grad is not None]
    wide = [torch.zeros_like(master) for master in masters]
    for master, gradient in zip(masters, wide, strict=True):
        master.grad = gradient
    optimizer = torch.optim.AdamW(masters, **HYPERPARAMETERS, fused=True)

    @torch.no_grad()
    def step() -> None:
        torch._foreach_copy_(wide, narrow)
        torch.nn.utils.clip_grad_norm_(masters, MAX_NORM)
        optimizer.step()
        torch._foreach_copy_(copies, masters)

    return step


def torchao_coded(params: Sequence[Parameter]) -> Step:
    optim = importlib.import_module("torchao.optim")  # an extra, which may not be there
    step: Step = optim.AdamW8bit(params, **HYPERPARAMETERS, bf16_stochastic_round=True).step
    return step


def contenders() -> dict[str, Build]:
    coded: dict[str, Any] = {"state_dtype": torch.uint8}
    found: dict[str, Build] = {
        OURS: ours,
        "fusedshard, bf16 moments": partial(ours, state_dtype=torch.bfloat16),
        "fusedshard, 8-bit moments": partial(ours, **coded),
        OURS_CODED: partial(ours, clip=False, master_weights=False, **coded),
        TORCH: torch_with_masters,
    }
    if importlib.util.find_spec("torchao"):
        found[TORCHAO] = torchao_coded
    return found


def largest_difference(build: Build, steps: int = 30, elements: int = 1 << 18) -> float:
    """Of its parameters from those of torch's for-loop Adam in fp64, after equal steps with
    gradients that clipping leaves alone."""
    params = make_params(elements)
    for param in params:
        assert param.grad is not None
        param.grad *= 1e-4
    exact = [Parameter(param.detach().double()) for param in params]
    for reference, param in zip(exact, params, strict=True):
        assert param.grad is not None
        reference.grad = param.grad.double()
    step = build(params)
    reference_step = torch.optim.AdamW(exact, **HYPERPARAMETERS, foreach=False).step
    for _ in range(steps):
        step()
        reference_step()
    return max(
        (param.double() - reference).abs().max().item()
        for param, reference in zip(params, exact, strict=True)
    )


def counted(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure(args: argparse.Namespace) -> Timing:
    variants = {
        name: partial(counted, build(make_params(args.elements)))
        for name, build in contenders().items()
    }
    idle = partial(wait_for_idle, args.idle_wait)
    return interleave(variants, args.repeats, before_round=idle)


def rows(samples: Samples) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "seconds": asdict(Spread.of(seconds)),
            "speed_against_torch": asdict(ratio(samples, TORCH, name)),
            "samples": seconds,
        }
        for name, seconds in samples.items()
    ]


def bars(samples: Samples) -> list[Bar]:
    found = [Bar(f"speed against {TORCH}", ratio(samples, TORCH, OURS), at_least=1.8)]
    if TORCHAO in samples:
        speed = ratio(samples, TORCHAO, OURS_CODED)
        found.append(Bar("8-bit moments: speed against torchao", speed, at_least=2.0))
    return found


def results_table(report: dict[str, Any]) -> Table:
    settings = report["settings"]
    table = Table(title=f"threads: {settings['threads']}, {busy(report['other_cores'])}")
    for column in ("", "ms: median (quartiles)", "against torch", "from fp64"):
        table.add_column(column, justify="right" if column else "left")
    for row in report["results"]:
        table.add_row(
            row["name"],
            Spread(**row["seconds"]).text(scale=1e3),
            Spread(**row["speed_against_torch"]).text(),
            f"{report['largest_difference_from_fp64'][row['name']]:.1e}",
        )
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A step in bf16 on one rank and the CPU.")
    parser.add_argument("--elements", type=int, help="of all parameters (default: 32 Mi)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="(default: all cores)")
    add_common_options(parser)
    args = parser.parse_args()
    args.elements = args.elements or (1 << 18 if args.quick else 32 << 20)
    args.repeats = args.repeats or (3 if args.quick else 15)
    return args


def main() -> None:
    args = parse()
    console = open_console()
    # Before anything is compiled: what torchao compiles keeps to this number of threads.
    with threads(args.threads):
        differences = {name: largest_difference(build) for name, build in contenders().items()}
        timing = measure(args)
    found_bars = bars(timing.samples)
    report = header("mixed", args) | {
        "largest_difference_from_fp64": differences,
        "other_cores": median_other_cores([timing.rounds]),
        "results": rows(timing.samples),
        "bars": [bar.as_json() for bar in found_bars],
    }
    console.print(f"{args.elements} bf16 elements, {args.repeats} interleaved rounds")
    console.print(results_table(report))
    if TORCHAO not in timing.samples:
        console.print("torchao is not installed: 8-bit moments stand alone")
    console.print(bars_table(found_bars, quick=args.quick))
    write(report, folder_of(args), "mixed", console)
    title = f"A step of {args.elements} bf16 elements, {args.threads} threads"
    speeds = spreads_of(report["results"], "speed_against_torch")
    panel = Panel("speed", speeds, f"as a multiple of that of {TORCH}", 1.0)
    save_bars(report, folder_of(args), "mixed", title, [panel], console)


if __name__ == "__main__":
    main()
