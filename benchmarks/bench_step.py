"""A whole training step: DDP, ZeroRedundancyOptimizer, FSDP2 and fusedshard on real models.

    python benchmarks/bench_step.py [--ranks 1 2 4] [--model gpt17m] [--quick]
    torchrun --nproc-per-node 2 benchmarks/bench_step.py

On CPU ranks over gloo, or under torchrun on a machine with GPUs over NCCL. Ways to train live in
the same processes and take turns, as many as fit into memory; the reference is in each group. On
CPUs the batch is small, so that communication and update, which the optimizer answers for, weigh
most. README.md says how to read the figures.
"""

from __future__ import annotations

import argparse
import os

import torch.distributed as dist
from fresh_ranks import FreshRanks, rank_of_torchrun, ranks_here
from harness import progress_bar
from record import add_common_options
from resident import groups, variants_at_once
from step_job import least_available, peak_of, take_turns_at, workload
from step_models import MODELS
from step_report import report
from step_variants import DDP, SHARDED, builders, runnable


def measure(ranks: FreshRanks, model: str, args: argparse.Namespace) -> None:
    """Measure one model; the process that speaks for all reports. Collective."""
    work = workload(model, ranks.device, args)
    args = argparse.Namespace(**vars(args))
    args.steps, args.repeats = args.steps or work.steps, args.repeats or work.repeats
    names = runnable(list(builders(work.learning_rate)), ranks.device)
    at_once = variants_at_once(4 * work.parameters(), ranks.run(least_available))
    found = [ranks.run(take_turns_at, model, group, args) for group in groups(names, DDP, at_once)]
    measured = names if args.memory and not args.quick else [DDP, SHARDED] if args.memory else []
    peaks = measure_peaks(ranks, model, measured, args)
    if ranks.reports:
        report(model, found, peaks, ranks.device, args)


def measure_peaks(
    ranks: FreshRanks, model: str, names: list[str], args: argparse.Namespace
) -> dict[str, list[int]]:
    """Bytes of each variant on each rank, alone in new processes. Collective."""
    peaks = {}
    with progress_bar(ranks.reports) as bar:
        task = bar.add_task("", total=len(names))
        for name in names:
            bar.update(task, description=f"memory: {name}")
            peaks[name] = ranks.run(peak_of, model, name, args)
            bar.advance(task)
    return peaks


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A whole training step on gloo or NCCL ranks.")
    parser.add_argument(
        "--ranks", type=int, nargs="+", help="start these many, in turn (not under torchrun)"
    )
    parser.add_argument("--model", choices=MODELS, nargs="+", default=MODELS)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--steps", type=int, help="of a variant's turn in a round")
    parser.add_argument(
        "--no-memory", dest="memory", action="store_false", help="leave out peaks of memory"
    )
    add_common_options(parser)
    args = parser.parse_args()
    if args.ranks and dist.is_torchelastic_launched():
        parser.error("--ranks: torchrun has started the ranks already")
    if args.ranks and min(args.ranks) < 1:
        parser.error(f"--ranks: got {min(args.ranks)}, wanted at least 1")
    args.ranks = args.ranks or ([2] if args.quick else [1, 2, 4])
    return args


def main() -> None:
    # The profiler of torch 2.13 announces itself; read when torch is imported, as ranks do later.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    args = parse()
    if dist.is_torchelastic_launched():
        ranks = rank_of_torchrun()
        for model in args.model:
            measure(ranks, model, args)
        return
    for count in args.ranks:
        with ranks_here(count) as ranks:
            for model in args.model:
                measure(ranks, model, args)


if __name__ == "__main__":
    main()
