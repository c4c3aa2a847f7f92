"""How much of the gradients' exchange is hidden behind backward, and what that is worth."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from charts import Panel, spreads_of
from harness import Spread, ratio
from overlap import Overlap, summary
from record import Bar, open_console
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
from step_variants import DDP, FUSED, SHARDED, SHARDED_IN_STEP, Build, ddp, ours

import fusedshard

# With that of bench_step the loss of larger batches jumps, and rounding decides how far.
LEARNING_RATE = 1e-4


class OverlapRunner(TextRunner):
    """Notes what fusedshard's buckets did in each step."""

    def __init__(self, build: Build, args: argparse.Namespace) -> None:
        super().__init__(build, args)
        self._overlaps: list[Overlap] = []

    def step(self) -> Sequence[float]:
        marks = super().step()
        if isinstance(self.optimizer, fusedshard.AdamW):
            _, began, ended, *_ = marks
            self._overlaps.append(Overlap.of(self.optimizer.stats.exchanges, (began, ended)))
        return marks

    def forget(self) -> None:
        super().forget()
        self._overlaps.clear()

    def figures(self) -> dict[str, Any]:
        return {"overlaps": self._overlaps, **super().figures()}


def builders(bucket_mb: float) -> dict[str, Build]:
    sharded = partial(
        ours, lr=LEARNING_RATE, mode="sharded", reduction="ordered", bucket_cap_mb=bucket_mb
    )
    return {
        DDP: partial(ddp, adam=FUSED | {"lr": LEARNING_RATE}, bucket_cap_mb=bucket_mb),
        SHARDED: sharded,
        SHARDED_IN_STEP: partial(sharded, grad_sync="step"),
    }


def measure(args: argparse.Namespace) -> None:
    """Time all runners on the ranks of the default group; its first rank reports. Collective."""
    torch.set_num_threads(args.threads)
    built = builders(args.bucket_mb)
    runners = {name: OverlapRunner(build, args) for name, build in built.items()}
    outcome = take_turns(runners, args)
    if dist.get_rank() == 0:
        report(begin_report("overlap", outcome, args), outcome, args)


def report(found: dict[str, Any], outcome: Outcome, args: argparse.Namespace) -> None:
    """Complete what was found, print it and write it."""
    console = open_console()
    found["results"] = results = [row(name, outcome) for name in outcome.samples]
    console.print(heading(found, args.steps, f", batches of {args.batch}"))
    console.print(times_table(results), phases_table(results), overlap_table(results))
    compare_losses(found, console)
    (first,) = (result["first_bucket"] for result in results if result["name"] == SHARDED)
    claim = f"{SHARDED}: the first bucket's start / backward's end"
    title = "A GPT whose backward takes about as long as the exchange"
    panels = [
        Panel("one step", spreads_of(results, "against_ddp"), f"time / that of {DDP}", 1.0),
        Panel("exchange", spreads_of(results, "hidden_share"), "hidden share of its time", 1.0),
    ]
    publish(found, [Bar(claim, Spread(**first), at_most=1.0)], console, args, (title, panels))


def row(name: str, outcome: Outcome) -> dict[str, Any]:
    """One variant; what was hidden is of all ranks together, step by step."""
    found, samples = outcome.batch_row(name), outcome.samples
    found["against_exchange_in_step"] = asdict(ratio(samples, name, SHARDED_IN_STEP))
    del found["overlaps"]
    steps = list(zip(*(rank[name]["overlaps"] for rank in outcome.figures), strict=True))
    return found | (summary(steps) if steps else {})


def times_table(results: list[dict[str, Any]]) -> Table:
    table = Table(title="one step")
    columns = ("ms: median (quartiles)", f"of {DDP}", "of exchanged in step", "CPU ms")
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left")
    for result in results:
        table.add_row(
            result["name"],
            Spread(**result["step_seconds"]).text(scale=1e3, digits=1),
            Spread(**result["against_ddp"]).text(),
            Spread(**result["against_exchange_in_step"]).text(),
            f"{result['cpu_seconds'] * 1e3:.0f}",
        )
    return table


def overlap_table(results: list[dict[str, Any]]) -> Table:
    table = Table(title="exchange of gradients while backward goes on")
    columns = ("hidden share", "buckets begun", "in steps", "first begun at")
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left")
    for result in results:
        if "hidden_share" in result:
            table.add_row(
                result["name"],
                Spread(**result["hidden_share"]).text(),
                f"{result['early_buckets']['median']:.0f} of {result['buckets']}",
                f"{result['steps_begun_early']} of {result['steps']}",
                Spread(**result["first_bucket"]).text(),
            )
    return table
