"""A whole training step on CPU ranks over gloo: DDP, ZeroRedundancyOptimizer, FSDP2, fusedshard.

    python benchmarks/bench_step.py [--ranks 2 4] [--quick]
    torchrun --nproc-per-node 2 benchmarks/bench_step.py

All ways to train live in the same processes and take turns, a few steps each. The batch is small,
so that communication and update, which the optimizer answers for, weigh most. README.md says how
to read the figures.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    Samples,
    Spread,
    gather,
    interleave,
    ratio,
    run_as_rank,
    run_ranks,
    slowest_rank,
    start_round,
)
from load import median_other_cores
from record import Bar, add_common_options, bars_table, busy, header, open_console, write
from rich.table import Table
from step_variants import BUILDERS, DDP, FSDP, SHARDED, ZERO, ZERO_VIEW, state_bytes

import fusedshard
from fusedshard.demo.model import GPT, Batches, load_corpus, standard_library

PHASES = ("forward", "backward", "step", "zero_grad")
OUR_PHASES = ("exchange", "status", "update", "gather")


class Runner:
    """One way to train, and what it has spent since its first round.

    Every runner starts from the same weights and sees the same batches of text, on each rank those
    of its own slice.
    """

    def __init__(self, name: str, text: bytes, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        model = GPT(args.width, args.depth, args.heads, args.context)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.model, self.optimizer = BUILDERS[name](model)
        self.losses: list[float] = []
        self._cpu_seconds: list[float] = []
        self._phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self._steps_a_round = args.steps
        self._batches = Batches(
            text, dist.get_rank(), dist.get_world_size(), 0, args.batch, args.context
        )

    def round(self) -> float:
        """A few steps, begun by all ranks together: the median seconds of one."""
        dist.barrier()
        first = not self.losses
        start = time.process_time()
        seconds = statistics.median([self._step() for _ in range(self._steps_a_round)])
        self._cpu_seconds.append((time.process_time() - start) / self._steps_a_round)
        if first:
            self._forget_times()
        return seconds

    def _step(self) -> float:
        inputs, targets = self._batches.next()
        marks = [time.perf_counter()]
        loss = self.model(inputs, targets)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        self.optimizer.step()
        marks.append(time.perf_counter())
        self.optimizer.zero_grad()
        marks.append(time.perf_counter())
        self.losses.append(loss.item())
        for phase, start, end in zip(PHASES, marks[:-1], marks[1:], strict=True):
            self._phases[phase].append(end - start)
        return marks[-1] - marks[0]

    def _forget_times(self) -> None:
        self._cpu_seconds.clear()
        for seconds in self._phases.values():
            seconds.clear()
        if isinstance(self.optimizer, fusedshard.AdamW):
            self.optimizer.stats.reset()

    def figures(self) -> dict[str, Any]:
        """This rank's figures; seconds, bytes and collectives are of one step."""
        found: dict[str, Any] = {
            "loss": self.losses[-1],
            "state_bytes": state_bytes(self.optimizer),
            "cpu_seconds": statistics.median(self._cpu_seconds),
            "seconds": {name: statistics.median(spent) for name, spent in self._phases.items()},
        }
        if isinstance(self.optimizer, fusedshard.AdamW):
            stats, steps = self.optimizer.stats, len(self._phases["step"])
            found["seconds_of_step"] = {name: stats.seconds[name] / steps for name in OUR_PHASES}
            found["sent_bytes"] = {name: sent / steps for name, sent in stats.sent_bytes.items()}
            found["collectives"] = {name: calls / steps for name, calls in stats.calls.items()}
        return found


def measure(args: argparse.Namespace) -> None:
    """Time all runners on the ranks of the default group; its first rank reports. Collective."""
    torch.set_num_threads(args.threads)
    text = load_corpus(standard_library())
    runners = {name: Runner(name, text, args) for name in BUILDERS}
    timing = interleave(
        {name: runner.round for name, runner in runners.items()},
        args.repeats,
        before_round=partial(start_round, args.idle_wait),
        progress=dist.get_rank() == 0,
    )
    other_cores = median_other_cores(gather(timing.rounds))
    samples = slowest_rank(timing.samples)
    figures = gather({name: runner.figures() for name, runner in runners.items()})
    if dist.get_rank() == 0:
        report = header("step", args)
        report["settings"] |= {
            "ranks": dist.get_world_size(),
            "parameters": runners[DDP].parameters,
            "loss_after_steps": len(runners[DDP].losses),
        }
        publish(report | {"other_cores": other_cores}, samples, figures, args)


def publish(
    report: dict[str, Any],
    samples: Samples,
    figures: list[dict[str, dict[str, Any]]],
    args: argparse.Namespace,
) -> None:
    """Complete the report, print it and write it."""
    settings, console = report["settings"], open_console()
    report["results"] = [row(name, samples, figures) for name in samples]
    losses = [result["loss"] for result in report["results"]]
    report["largest_loss_difference"] = max(losses) - min(losses)
    found_bars = bars(samples, settings["ranks"])
    report["bars"] = [bar.as_json() for bar in found_bars]
    console.print(
        f"{settings['ranks']} ranks, {settings['parameters']} parameters, "
        f"{args.repeats} interleaved rounds of {args.steps} steps, "
        f"{busy(report['other_cores'])}"
    )
    console.print(times_table(report["results"]), phases_table(report["results"]))
    console.print(
        f"largest difference between the losses after {settings['loss_after_steps']} equal steps: "
        f"{report['largest_loss_difference']:.1e}"
    )
    console.print(bars_table(found_bars, quick=args.quick))
    write(report, args.out, f"step_{settings['ranks']}_ranks", console)


def row(name: str, samples: Samples, figures: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """One variant: times of the slowest rank, phases of the first, processor time of all
    together, and most state of any."""
    ranks = [rank[name] for rank in figures]
    return {
        "name": name,
        **ranks[0],
        "loss": statistics.fmean(rank["loss"] for rank in ranks),
        "cpu_seconds": sum(rank["cpu_seconds"] for rank in ranks),
        "state_bytes": max(rank["state_bytes"] for rank in ranks),
        "step_seconds": asdict(Spread.of(samples[name])),
        "against_ddp": asdict(ratio(samples, name, DDP)),
        "samples": samples[name],
    }


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


def phases_table(results: list[dict[str, Any]]) -> Table:
    """Where the first rank's time goes; step's own phases follow it."""
    table = Table(title="ms of one step on the first rank")
    table.add_column("")
    for phase in (*PHASES, *(f"step: {phase}" for phase in OUR_PHASES)):
        table.add_column(phase, justify="right")
    for result in results:
        whole, parts = result["seconds"], result.get("seconds_of_step", {})
        spent = [whole[phase] for phase in PHASES] + [parts.get(phase) for phase in OUR_PHASES]
        cells = ["" if seconds is None else f"{seconds * 1e3:.1f}" for seconds in spent]
        table.add_row(result["name"], *cells)
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
