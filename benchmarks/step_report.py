"""What bench_step.py found: rows, claims and tables."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from harness import Samples, Spread, ratio
from record import Bar, folder_of, open_console
from rich.table import Table
from runner import begin_report, compare_losses, heading, phases_table, publish, report_name
from step_job import Group
from step_plot import draw
from step_variants import DDP, DDP_VIEW, FSDP, FSDP_KEEP, SHARDED, ZERO, ZERO_VIEW
from traffic import sent_bytes

Rows = Sequence[Mapping[str, Any]]
CLAIMED = "gpt17m"  # the model whose figures are claims; of others they are only told


def report(
    model: str,
    groups: Sequence[Group],
    peaks: Mapping[str, Sequence[int]],
    device: str,
    args: argparse.Namespace,
) -> None:
    """Print and write what the variants of one model did.

    Args:
        groups: that took turns, DDP in each.
        peaks: bytes on each rank, by variant; empty if they were not asked for.
    """
    console = open_console()
    found = begin_report(f"step_{model}", groups[0].outcome, args)
    found["settings"] |= {"model": model, "device": device}
    known = [group.outcome.other_cores for group in groups]
    found["other_cores"] = max((cores for cores in known if cores is not None), default=None)
    found["groups"] = [
        {"variants": list(group.traffic), "reference_samples": group.outcome.samples[DDP]}
        for group in groups
    ]
    found["results"] = results = rows(groups, peaks)
    console.print(heading(found, args.steps, f" ({model})"))
    console.print(times_table(results), phases_table(results), costs_table(results))
    compare_losses(found, console)
    relative = relative_samples(groups)
    found["comparisons"] = comparisons(relative)
    for comparison in found["comparisons"]:
        console.print(f"{comparison['name']}: {Spread(**comparison['time']).text()}")
    claims = bars(relative, results, found["settings"]["ranks"]) if model == CLAIMED else []
    publish(found, claims, console, args)
    draw(found, folder_of(args), report_name(found), console)


def rows(groups: Sequence[Group], peaks: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """One a variant; DDP's from the first group."""
    found = []
    for number, (outcome, traffic) in enumerate(groups):
        for name in outcome.samples:
            if name == DDP and number:
                continue
            row = outcome.batch_row(name) | {"group": number, "traffic": traffic[name]}
            if name in peaks:
                row |= {"peak_bytes": max(peaks[name]), "peak_bytes_of_ranks": list(peaks[name])}
            found.append(row)
    return found


def relative_samples(groups: Sequence[Group]) -> Samples:
    """Each round's times over DDP's of the same round: comparable between groups, too."""
    return {
        name: [own / base for own, base in zip(seconds, group.outcome.samples[DDP], strict=True)]
        for group in groups
        for name, seconds in group.outcome.samples.items()
    }


def comparisons(relative: Samples) -> list[dict[str, Any]]:
    """Our default beside all that torch has."""
    return [
        {"name": f"{SHARDED} / {base}", "time": asdict(ratio(relative, SHARDED, base))}
        for base in (DDP, DDP_VIEW, ZERO, ZERO_VIEW, FSDP, FSDP_KEEP)
        if base in relative
    ]


def bars(relative: Samples, results: Rows, ranks: int) -> list[Bar]:
    limits = {DDP: 1.0 if ranks <= 2 else 1.1}
    if ranks > 1:
        limits |= {ZERO: 0.9, ZERO_VIEW: 0.9, FSDP: 0.5}
    found = [
        Bar(f"{SHARDED} / {base}", ratio(relative, SHARDED, base), at_most=limit)
        for base, limit in limits.items()
        if base in relative
    ]
    state = {row["name"]: row["state_bytes"] for row in results}
    # Padding is below 1 %.
    share = Spread.of([state[SHARDED] / state[DDP] * ranks])
    return [*found, Bar(f"state of {SHARDED} x {ranks} / of {DDP}", share, at_most=1.01)]


def times_table(results: Rows) -> Table:
    table = Table(title="one step")
    for column in ("", "ms: median (quartiles)", f"of {DDP}", "CPU ms", "loss"):
        table.add_column(column, justify="right" if column else "left")
    for result in results:
        table.add_row(
            result["name"],
            Spread(**result["step_seconds"]).text(scale=1e3, digits=1),
            Spread(**result["against_ddp"]).text(),
            f"{result['cpu_seconds'] * 1e3:.0f}",
            f"{result['loss']:.6f}",
        )
    return table


def costs_table(results: Rows) -> Table:
    table = Table(title="a rank's memory, and what it sends in one step")
    columns = (
        "state MB",
        "peak MB",
        "sent MB",
        "sent MB (measured)",
        "collectives",
        "waits for GPU",
    )
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left")
    for result in results:
        traffic = result["traffic"]
        waits = traffic["host_synchronizations"]
        calls = [f"{calls:g} {kind}" for kind, calls in sorted(traffic["collectives"].items())]
        table.add_row(
            result["name"],
            _megabytes(result["state_bytes"]),
            _megabytes(result.get("peak_bytes")),
            _megabytes(sent_bytes(traffic), 2),
            _megabytes(traffic["loopback_bytes"], 2),
            ", ".join(calls),
            "" if waits is None else str(waits),
        )
    return table


def _megabytes(count: float | None, digits: int = 1) -> str:
    return "" if count is None else f"{count / 1e6:.{digits}f}"
