"""A whole training step on CPU ranks over gloo: DDP, ZeroRedundancyOptimizer, FSDP2, fusedshard.

    python benchmarks/bench_step.py [--ranks 2 4] [--quick]
    torchrun --nproc-per-node 2 benchmarks/bench_step.py

All ways to train live in the same processes and take turns, a few steps each. The batch is small,
so that communication and update, which the optimizer answers for, weigh most. README.md says how
to read the figures.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from harness import Samples, Spread, ratio, run_as_rank, run_ranks
from record import Bar, add_common_options, open_console
from rich.table import Table
from runner import (
    Outcome,
    TextRunner,
    begin_report,
    compare_losses,
    heading,
    phases_table,
    publish,
    take_turns,
)
from step_variants import BUILDERS, DDP, FSDP, SHARDED, ZERO, ZERO_VIEW

from fusedshard.demo.model import load_corpus, standard_library


def measure(args: argparse.Namespace) -> None:
    """Time all runners on the ranks of the default group; its first rank reports. Collective."""
    torch.set_num_threads(args.threads)
    text = load_corpus(standard_library())
    runners = {name: TextRunner(build, text, args) for name, build in BUILDERS.items()}
    outcome = take_turns(runners, args)
    if dist.get_rank() == 0:
        report(begin_report("step", runners, outcome, args), outcome, args)


def report(found: dict[str, Any], outcome: Outcome, args: argparse.Namespace) -> None:
    """Complete what was found, print it and write it."""
    console = open_console()
    found["results"] = [outcome.text_row(name) for name in outcome.samples]
    console.print(heading(found, args.steps))
    console.print(times_table(found["results"]), phases_table(found["results"]))
    compare_losses(found, console)
    publish(found, bars(outcome.samples, found["settings"]["ranks"]), console, args)


def bars(samples: Samples, ranks: int) -> list[Bar]:
    limits = {DDP: 1.0 if ranks <= 2 else 1.1, ZERO: 0.9, ZERO_VIEW: 0.9, FSDP: 0.5}
    return [
        Bar(f"{SHARDED} / {base}", ratio(samples, SHARDED, base), at_most=limit)
        for base, limit in limits.items()
    ]


def times_table(results: list[dict[str, Any]]) -> Table:
    table = Table(title="one step")
    columns = ("", "ms: median (quartiles)", f"of {DDP}", "CPU ms", "state MB", "sent MB", "loss")
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for result in results:
        sent = result.get("sent_bytes")
        table.add_row(
            result["name"],
            Spread(**result["step_seconds"]).text(scale=1e3, digits=1),
            Spread(**result["against_ddp"]).text(),
            f"{result['cpu_seconds'] * 1e3:.0f}",
            f"{result['state_bytes'] / 1e6:.1f}",
            f"{sum(sent.values()) / 1e6:.1f}" if sent else "",
            f"{result['loss']:.6f}",
        )
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A whole training step on CPU ranks over gloo.")
    parser.add_argument(
        "--ranks", type=int, nargs="+", help="start these many, in turn (not under torchrun)"
    )
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--steps", type=int, default=3, help="of a variant's turn in a round")
    parser.add_argument("--batch", type=int, default=1, help="sequences a rank and step")
    add_common_options(parser)
    args = parser.parse_args()
    small = args.quick
    args.repeats = args.repeats or (2 if small else 15)
    args.width, args.depth, args.heads = (64, 2, 2) if small else (448, 7, 7)
    args.context = 16 if small else 32
    args.ranks = args.ranks or ([2] if small else [2, 4])
    return args


def main() -> None:
    args = parse()
    if dist.is_torchelastic_launched():
        run_as_rank(measure, args)
    for ranks in args.ranks:
        run_ranks(ranks, measure, args)


if __name__ == "__main__":
    main()
