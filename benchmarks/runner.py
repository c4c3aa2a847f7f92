"""Ways to train, timed step by step, and what became of them on all ranks."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from charts import Panel, save_bars
from harness import Samples, Spread, gather, interleave, ratio, slowest_rank, start_round
from load import median_other_cores
from record import Bar, bars_table, busy, folder_of, header, write
from rich.console import Console
from rich.table import Table
from step_models import text_batches
from step_variants import DDP, Build, state_bytes
from torch import nn

import fusedshard
from fusedshard.demo.model import GPT

OUR_PHASES = ("exchange", "status", "update", "gather")


class Runner:
    """One way to train, and what its steps have spent since the first round.

    Args:
        model: starts from the same weights in every runner.
        build: what makes it and its optimizer a way to train.
        steps_a_round: of one turn.
    """

    phases: tuple[str, ...]  # of a step, in order

    def __init__(self, model: nn.Module, build: Build, steps_a_round: int) -> None:
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.model, self.optimizer = build(model)
        self.steps = 0
        self._cpu_seconds: list[float] = []
        self._phases: dict[str, list[float]] = {phase: [] for phase in self.phases}
        self._steps_a_round = steps_a_round

    def step(self) -> Sequence[float]:
        """Train on one batch: time.perf_counter() at the beginning and after each phase."""
        raise NotImplementedError

    def round(self) -> float:
        """A few steps, begun by all ranks together: the median seconds of one."""
        dist.barrier()
        first = not self.steps
        start = time.process_time()
        seconds = statistics.median([self._timed_step() for _ in range(self._steps_a_round)])
        self._cpu_seconds.append((time.process_time() - start) / self._steps_a_round)
        if first:
            self.forget()
        return seconds

    def _timed_step(self) -> float:
        marks = self.step()
        self.steps += 1
        for phase, start, end in zip(self.phases, marks[:-1], marks[1:], strict=True):
            self._phases[phase].append(end - start)
        return marks[-1] - marks[0]

    def forget(self) -> None:
        """Everything measured so far was warming up."""
        self._cpu_seconds.clear()
        for seconds in self._phases.values():
            seconds.clear()
        if isinstance(self.optimizer, fusedshard.AdamW):
            self.optimizer.stats.reset()

    def figures(self) -> dict[str, Any]:
        """This rank's figures; seconds, bytes and collectives are of one step."""
        found: dict[str, Any] = {
            "cpu_seconds": statistics.median(self._cpu_seconds),
            "seconds": {name: statistics.median(spent) for name, spent in self._phases.items()},
        }
        if isinstance(self.optimizer, fusedshard.AdamW):
            stats, steps = self.optimizer.stats, len(self._phases["step"])
            found["seconds_of_step"] = {name: stats.seconds[name] / steps for name in OUR_PHASES}
            found["sent_bytes"] = {name: sent / steps for name, sent in stats.sent_bytes.items()}
            found["collectives"] = {name: calls / steps for name, calls in stats.calls.items()}
        return found


class BatchRunner(Runner):
    """A model that returns the loss of a batch. On a GPU each phase lasts until that is done.

    Args:
        batches: the same in every runner, on each rank others.
        device: where the model is trained.
    """

    phases = ("forward", "backward", "step", "zero_grad")

    def __init__(
        self,
        model: nn.Module,
        build: Build,
        batches: Iterator[tuple[torch.Tensor, ...]],
        steps_a_round: int,
        device: str = "cpu",
    ) -> None:
        super().__init__(model.to(device), build, steps_a_round)
        self._batches, self.device = batches, torch.device(device)
        self._losses: list[float] = []

    def next_batch(self) -> list[torch.Tensor]:
        return [tensor.to(self.device) for tensor in next(self._batches)]

    def train(self, batch: Sequence[torch.Tensor], mark: Callable[[], None]) -> torch.Tensor:
        """One step, with a mark after each phase: the loss."""
        loss: torch.Tensor = self.model(*batch)
        mark()
        loss.backward()
        mark()
        self.optimizer.step()
        mark()
        self.optimizer.zero_grad()
        mark()
        return loss

    def step(self) -> Sequence[float]:
        batch, marks = self.next_batch(), list[float]()

        def mark() -> None:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())

        mark()
        self._losses.append(self.train(batch, mark).item())
        return marks

    def figures(self) -> dict[str, Any]:
        state = state_bytes(self.optimizer)
        return {"loss": self._losses[-1], "state_bytes": state, **super().figures()}


def choose_gpt(args: argparse.Namespace) -> None:
    """Set the size of `TextRunner`'s model: 17 million parameters, or few in a quick run."""
    args.width, args.depth, args.heads = (64, 2, 2) if args.quick else (448, 7, 7)
    args.context = 16 if args.quick else 32


class TextRunner(BatchRunner):
    """A GPT that reads text, on each rank its own slice of it."""

    def __init__(self, build: Build, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        model = GPT(args.width, args.depth, args.heads, args.context)
        ranks = dist.get_rank(), dist.get_world_size()
        super().__init__(model, build, text_batches(args.batch, args.context, *ranks), args.steps)


class Outcome(NamedTuple):
    """What runners did.

    Attributes:
        samples: seconds of a step, round by round, as the slowest rank saw them.
        figures: of each rank, by runner.
        other_cores: that others kept busy.
        parameters: of the model.
        steps: that each has done.
    """

    samples: Samples
    figures: list[dict[str, dict[str, Any]]]
    other_cores: float | None
    parameters: int
    steps: int

    def row(self, name: str) -> dict[str, Any]:
        """One variant: times of the slowest rank, phases of the first, processor time of all
        together."""
        ranks = [rank[name] for rank in self.figures]
        return {
            "name": name,
            **ranks[0],
            "cpu_seconds": sum(rank["cpu_seconds"] for rank in ranks),
            "step_seconds": asdict(Spread.of(self.samples[name])),
            "samples": self.samples[name],
        }

    def batch_row(self, name: str) -> dict[str, Any]:
        """The same of a `BatchRunner`, with the most state of any rank, and its times beside
        DDP's."""
        ranks = [rank[name] for rank in self.figures]
        return self.row(name) | {
            "loss": statistics.fmean(rank["loss"] for rank in ranks),
            "state_bytes": max(rank["state_bytes"] for rank in ranks),
            "against_ddp": asdict(ratio(self.samples, name, DDP)),
        }


def take_turns(runners: Mapping[str, Runner], args: argparse.Namespace) -> Outcome:
    """Time all runners on the ranks of the default group. Collective."""
    timing = interleave(
        {name: runner.round for name, runner in runners.items()},
        args.repeats,
        before_round=partial(start_round, args.idle_wait),
        progress=dist.get_rank() == 0,
    )
    other_cores = median_other_cores(gather(timing.rounds))
    samples = slowest_rank(timing.samples)
    figures = gather({name: runner.figures() for name, runner in runners.items()})
    parameters, steps = runners[DDP].parameters, runners[DDP].steps
    return Outcome(samples, figures, other_cores, parameters, steps)


def begin_report(benchmark: str, outcome: Outcome, args: argparse.Namespace) -> dict[str, Any]:
    """What every report of runners begins with."""
    report = header(benchmark, args)
    report["settings"] |= {
        "ranks": len(outcome.figures),
        "parameters": outcome.parameters,
        "steps_of_each": outcome.steps,
    }
    return report | {"other_cores": outcome.other_cores}


def rank_count(report: Mapping[str, Any]) -> str:
    ranks = report["settings"]["ranks"]
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def report_name(report: Mapping[str, Any]) -> str:
    return f"{report['benchmark']}_{rank_count(report)}".replace(" ", "_")


def heading(report: Mapping[str, Any], steps_a_round: int, what: str = "") -> str:
    settings = report["settings"]
    return (
        f"{rank_count(report)}, {settings['parameters']} parameters{what}, {settings['repeats']} "
        f"interleaved rounds of {steps_a_round} steps, {busy(report['other_cores'])}"
    )


def phases_table(results: Sequence[Mapping[str, Any]], digits: int = 1) -> Table:
    """Where the first rank's time goes. fusedshard's own phases follow, and lie in those before."""
    table = Table(title="ms of one step on the first rank")
    phases = list(results[0]["seconds"])
    for column in ("", *phases, *(f"of it: {phase}" for phase in OUR_PHASES)):
        table.add_column(column, justify="right" if column else "left")
    for result in results:
        whole, parts = result["seconds"], result.get("seconds_of_step", {})
        spent = [whole[phase] for phase in phases] + [parts.get(phase) for phase in OUR_PHASES]
        cells = ["" if seconds is None else f"{seconds * 1e3:.{digits}f}" for seconds in spent]
        table.add_row(result["name"], *cells)
    return table


def compare_losses(report: dict[str, Any], console: Console) -> None:
    """Add by how much the losses of the report's results differ, and print it."""
    losses = [result["loss"] for result in report["results"]]
    report["largest_loss_difference"] = max(losses) - min(losses)
    console.print(
        f"largest difference between the losses after {report['settings']['steps_of_each']} equal "
        f"steps: {report['largest_loss_difference']:.1e}"
    )


def publish(
    report: dict[str, Any],
    bars: Sequence[Bar],
    console: Console,
    args: argparse.Namespace,
    chart: tuple[str, Sequence[Panel]] | None = None,
) -> None:
    """Complete the report with the bars, print those, and write it, with a chart of that title."""
    report["bars"] = [bar.as_json() for bar in bars]
    if bars:
        console.print(bars_table(bars, quick=args.quick))
    name = report_name(report)
    write(report, folder_of(args), name, console)
    if chart is not None:
        title, panels = chart
        where = f"{title}, {rank_count(report)}"
        save_bars(report, folder_of(args), name, where, panels, console)
