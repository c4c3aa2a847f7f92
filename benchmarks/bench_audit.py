"""What audits cost: `audit_every` as a share of training, and one call of `fusedshard.audit`.

    python benchmarks/bench_audit.py [--ranks 2] [--quick]

A GPT with a small batch, and 1,000 parameters of 4 elements, where Python decides: each with an
audit in every step and without any, in turns. README.md says how to read the figures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from charts import Panel
from fresh_ranks import run_ranks
from harness import Samples, Spread, gather
from hooks_overhead import TinyRunner
from record import Bar, add_common_options, open_console
from rich.table import Table
from runner import Runner, TextRunner, begin_report, choose_gpt, heading, publish, take_turns
from step_variants import DDP, REPLICATED, SHARDED, Build, ddp, ours

import fusedshard

EVERY = 100  # steps between audits, for which the share is told
MODES = {SHARDED: "sharded", REPLICATED: "replicated"}
JOBS = ("GPT", "tiny parameters")


def audited(name: str) -> str:
    return f"{name}, audited in each step"


def builders() -> dict[str, Build]:
    found: dict[str, Build] = {DDP: ddp}
    for name, mode in MODES.items():
        found[name] = partial(ours, mode=mode, reduction="ordered")
        found[audited(name)] = partial(ours, mode=mode, reduction="ordered", audit_every=1)
    return found


def measure(args: argparse.Namespace) -> None:
    """Time the jobs on the ranks of the default group; its first rank reports. Collective."""
    torch.set_num_threads(args.threads)
    for job in args.jobs:
        measure_job(args, job)


def measure_job(args: argparse.Namespace, job: str) -> None:
    runners: dict[str, Runner] = {
        name: TextRunner(build, args) if job == "GPT" else TinyRunner(build, args)
        for name, build in builders().items()
    }
    outcome = take_turns(runners, args)
    calls = {name: one_audit(runners[name]) for name in (DDP, *MODES)}
    if dist.get_rank() == 0:
        found = begin_report("audit", outcome, args)
        found["settings"]["job"] = job
        found["results"] = [outcome.row(name) for name in outcome.samples]
        shares = {name: share(outcome.samples, name) for name in MODES}
        found["shares"] = {name: asdict(spread) for name, spread in shares.items()}
        found["one_audit"] = {name: asdict(spread) for name, spread in calls.items()}
        report(found, args, shares, calls)


def share(samples: Samples, name: str) -> Spread:
    """What an audit every `EVERY` steps adds to training, as a share of it, round by round."""
    pairs = zip(samples[audited(name)], samples[name], strict=True)
    return Spread.of([(with_audit - bare) / bare / EVERY for with_audit, bare in pairs])


def one_audit(runner: Runner, times: int = 5) -> Spread:
    """Seconds of one call, for the slowest rank."""
    seconds = []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        found = fusedshard.audit(runner.optimizer, runner.model)
        seconds.append(max(gather(time.perf_counter() - start)))
        assert found.ok, found.headline
    return Spread.of(seconds)


def report(
    found: dict[str, Any],
    args: argparse.Namespace,
    shares: Mapping[str, Spread],
    calls: Mapping[str, Spread],
) -> None:
    console, job = open_console(), found["settings"]["job"]
    steps = args.steps if job == "GPT" else args.overhead_steps
    console.print(heading(found, steps, f" ({job})"))
    table = Table(title=f"{job}: audits")
    for column in ("", "ms of a step", f"share at audit_every={EVERY}: %", "ms of one audit()"):
        table.add_column(column, justify="right" if column else "left")
    for result in found["results"]:
        name = result["name"]
        table.add_row(
            name,
            Spread(**result["step_seconds"]).text(scale=1e3, digits=1),
            shares[name].text(scale=100, digits=3) if name in shares else "",
            calls[name].text(scale=1e3, digits=1) if name in calls else "",
        )
    console.print(table)
    bars = [
        Bar(f"{job}: % of audit_every={EVERY}, {name}", spread.scaled(100), at_most=1.0)
        for name, spread in shares.items()
    ]
    found["benchmark"] = f"audit_{job.split()[0].lower()}"
    percent = {name: spread.scaled(100) for name, spread in shares.items()}
    ms = {name: spread.scaled(1e3) for name, spread in calls.items()}
    panels = [
        Panel(f"audit_every={EVERY}", percent, "% of a step", 1.0),
        Panel("one audit()", ms, "ms"),
    ]
    publish(found, bars, console, args, (f"What audits cost: {job}", panels))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What audits cost, on CPU ranks over gloo.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="start these, in turn")
    parser.add_argument("--jobs", choices=JOBS, nargs="+", default=JOBS)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--steps", type=int, default=3, help="of a variant's turn in a round")
    parser.add_argument("--batch", type=int, default=1, help="sequences a rank and step")
    add_common_options(parser)
    args = parser.parse_args()
    small = args.quick
    args.repeats = args.repeats or (2 if small else 15)
    choose_gpt(args)
    args.tensors = 30 if small else 1000
    args.overhead_steps = 2 if small else 20
    return args


def main() -> None:
    args = parse()
    for ranks in args.ranks:
        run_ranks(ranks, measure, args)


if __name__ == "__main__":
    main()
