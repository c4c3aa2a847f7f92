"""What the demo found, in words, in a table and as files: pure functions of the ranks' numbers.

report.json holds what `summarize` returns:

=========================  =======================================================================
fusedshard, torch, python  versions
machine                    platform, cpu_variant (the kernels' instruction set), cores,
                           threads_per_rank, backend
settings                   the fields of `train.Settings`
seconds                    wall time of the training, from the start of the command
parameters                 name and numel of each parameter, in the optimizer's order
variants                   by "ddp", "replicated", "sharded", "mistake", see below
sharded_vs_replicated      by name, a difference after the last step
caught                     the mistake once more, with audits: audit_every, and by rank the
                           DivergenceError's step, part and message, or null
verdicts                   name, ok, text, measured of each verdict
ok                         whether every verdict is what it must be
=========================  =======================================================================

A variant holds:

=========================  =======================================================================
loss                       nats a byte at each step, the mean over the ranks' batches
ms                         by phase (total, forward_backward, exchange, update, gather): the
                           median over ranks and steps, the first steps left out
moment_bytes               of exp_avg and exp_avg_sq, by rank
master_bytes               of the fp32 copies, or the remainders, of bf16 parameters, by rank
wire_bytes                 sent in one step, by rank
comparisons                after some steps (after_step), how much the ranks differ: by name
                           (parameters, step, exp_avg, exp_avg_sq, and of bf16 parameters
                           master_weights, but for DDP's) the largest difference of any rank from
                           rank 0. Moments and masters are left out where they are sharded
difference_from_ddp        of the parameters after the last step
held, owned                by rank: elements of exp_avg by parameter; (parameter, start, stop) of
                           what it owns
buckets                    by bucket: (parameter, start, stop) of what it holds
audit                      what `fusedshard.audit` says after the last step: kind, ok, headline
=========================  =======================================================================

A difference is {identical: are all bits the same, max_abs, relative: the norm of the difference
over that of the reference}. What is not a finite number is null in the file.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import fusedshard
from fusedshard import _C
from fusedshard.demo.model import GPT
from fusedshard.demo.train import UNTIMED_STEPS, VARIANTS, Settings, audit_every
from fusedshard.demo.verdicts import Report, formats, judge

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PHASES = ("total", "forward_backward", "exchange", "update", "gather")
# Numbers of benchmarks/results/consistency.json.
OUTLOOK = (
    "Over 2,000 steps (benchmarks/consistency.py, a smaller model): where averaging is forgotten, "
    "two ranks end with weights 86 % apart and held-out losses 6 % and 7 % above DDP's, and the "
    "average of their weights with one 11 % above. Another order of summation parts the weights of "
    "two runs by 0.001 %, and no ranks."
)
DDP = "DistributedDataParallel + torch.optim.AdamW(fused=True)"


def headline(settings: Settings, text_bytes: int, threads: int) -> str:
    numel = sum(parameter["numel"] for parameter in describe_parameters(settings))
    lines = [
        f"Training a byte-level GPT of {numel:,} parameters on {text_bytes / 1e6:.1f} MB of the "
        f"standard library's sources, {settings.steps} steps, four times",
        f"{settings.ranks} ranks on CPU over gloo, threads a rank: {threads}; "
        f"{formats(asdict(settings))}",
        *(f"  {variant:10}  {text}" for variant, text in describe_variants(settings).items()),
    ]
    return "\n".join(lines)


def describe_variants(settings: Settings) -> dict[str, str]:
    chosen = {
        "fp32": "",
        "bf16": ", state_dtype=torch.bfloat16",
        "8bit": ", state_dtype=torch.uint8",
    }[settings.state_dtype]
    return {
        "ddp": DDP if settings.dtype == "fp32" else f"{DDP} on fp32 copies of the parameters",
        "replicated": f'fusedshard.AdamW(mode="replicated"{chosen})',
        "sharded": f'fusedshard.AdamW(mode="sharded"{chosen})',
        "mistake": "each rank steps on its own gradients, before any averaging",
    }


def describe_parameters(settings: Settings) -> list[dict[str, Any]]:
    with torch.device("meta"):
        model = GPT(settings.width, settings.depth, settings.heads, settings.context)
    return [{"name": name, "numel": p.numel()} for name, p in model.named_parameters()]


# -- numbers --------------------------------------------------------------------------------------


def summarize(
    settings: Settings, ranks: Sequence[dict[str, Any]], threads: int, seconds: float
) -> Report:
    """Bring together what `run_variants` returned on each rank, and judge it."""
    report: Report = {
        "fusedshard": fusedshard.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": {
            "platform": platform.platform(),
            "cpu_variant": _C.cpu_variant(),
            "cores": len(os.sched_getaffinity(0)),
            "threads_per_rank": threads,
            "backend": "gloo",
        },
        "settings": asdict(settings),
        "seconds": seconds,
        "parameters": describe_parameters(settings),
        "variants": {
            variant: summarize_variant([rank["variants"][variant] for rank in ranks])
            for variant in VARIANTS
        },
        "sharded_vs_replicated": {
            name: worst(rank["sharded_vs_replicated"][name] for rank in ranks)
            for name in ranks[0]["sharded_vs_replicated"]
        },
        "caught": {"audit_every": audit_every(settings), "by_rank": each(ranks, "caught")},
    }
    report["verdicts"] = [asdict(verdict) for verdict in judge(report)]
    report["ok"] = all(verdict["ok"] for verdict in report["verdicts"])
    return report


def summarize_variant(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One variant of all ranks."""
    return {
        "loss": [statistics.fmean(losses) for losses in zip(*each(ranks, "losses"), strict=True)],
        "ms": {phase: median_ms(each(each(ranks, "seconds"), phase)) for phase in PHASES},
        "moment_bytes": each(ranks, "moment_bytes"),
        "master_bytes": each(ranks, "master_bytes"),
        "wire_bytes": each(ranks, "wire_bytes"),
        "comparisons": [
            {"after_step": probes[0]["step"]}
            | {
                name: worst(probe["from_rank_0"][name] for probe in probes)
                for name in probes[0]["from_rank_0"]
            }
            for probes in zip(*each(ranks, "probes"), strict=True)
        ],
        "difference_from_ddp": worst(each(ranks, "difference_from_ddp")),
        "held": each(ranks, "held"),
        "owned": each(ranks, "owned"),
        "buckets": ranks[0]["buckets"],
        "audit": ranks[0]["audit"],  # the same on every rank
    }


def each(rows: Iterable[dict[str, Any]], key: str) -> list[Any]:
    return [row[key] for row in rows]


def median_ms(seconds: Sequence[Sequence[float]]) -> float:
    """Over ranks and steps, without the first steps where enough others are left."""
    skipped = min(UNTIMED_STEPS, len(seconds[0]) - 1)
    return 1e3 * statistics.median(spent for of_rank in seconds for spent in of_rank[skipped:])


def worst(differences: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The largest of several differences; NaN is larger than any number."""
    found = list(differences)
    return {"identical": all(each(found, "identical"))} | {
        key: max(each(found, key), key=lambda value: (math.isnan(value), value))
        for key in ("max_abs", "relative")
    }


# -- words ----------------------------------------------------------------------------------------


def show(report: Report, console: Console) -> None:
    """Print the table, the notes to it, and the verdicts."""
    for table in make_tables(report, console):
        console.print(table)
    console.print(
        "Times are medians of host time in ms; exchange includes waiting for the slowest rank; in "
        "brackets: inside backward. MB are 10^6 bytes: state is exp_avg, exp_avg_sq and master "
        "weights of one rank, also as bytes a parameter of the model, moments + masters; wire what "
        "a rank sends in a step. Identical: to the bit, on all ranks, after every compared step. "
        "Gap: the largest of a parameter, after the last step.\n"
    )
    console.print(make_verdict_list(report))
    console.print(f"\n{OUTLOOK}")
    failed = [verdict["name"] for verdict in report["verdicts"] if not verdict["ok"]]
    if failed:
        console.print(f"Not what it must be: {', '.join(failed)}", style="bold red")


def make_verdict_list(report: Report) -> Table:
    from rich.table import Table
    from rich.text import Text

    lines = Table.grid(padding=(0, 2))
    for verdict in report["verdicts"]:
        mark = Text("ok", "green") if verdict["ok"] else Text("FAILED", "bold red")
        lines.add_row(mark, Text(verdict["text"]))
    return lines


def make_tables(report: Report, console: Console) -> list[Table]:
    """A row a variant; in several tables where one would be too wide."""
    unlimited = console.options.update(max_width=1000)

    def fits(columns: Sequence[Column]) -> bool:
        table = make_table(report, columns)
        return console.measure(table, options=unlimited).maximum <= console.width

    tables: list[list[Column]] = [[]]
    for column in number_columns(report) + agreement_columns(report):
        if tables[-1] and not fits([*tables[-1], column]):
            tables.append([])
        tables[-1].append(column)
    return [make_table(report, columns) for columns in tables]


Column = tuple[str, Callable[[str], str]]  # its header, and the cell of a variant


def make_table(report: Report, columns: Sequence[Column]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("\nvariant", no_wrap=True)
    for header, _ in columns:
        table.add_column(header, justify="right", no_wrap=True)
    for variant in report["variants"]:
        table.add_row(variant, *(cell(variant) for _, cell in columns))
    return table


def number_columns(report: Report) -> list[Column]:
    variants = report["variants"]

    def ms(phase: str) -> Callable[[str], str]:
        return lambda v: f"{variants[v]['ms'][phase]:.1f}"

    numel = sum(parameter["numel"] for parameter in report["parameters"])

    def bytes_a_parameter(v: str) -> str:
        parts = (max(variants[v][key]) / numel for key in ("moment_bytes", "master_bytes"))
        return "+".join(f"{part:.2f}" for part in parts if part)

    def exchange(v: str) -> str:
        return f"({ms('exchange')(v)})" if v == "ddp" else ms("exchange")(v)

    return [
        ("first\nloss", lambda v: f"{variants[v]['loss'][0]:.3f}"),
        ("last\nloss", lambda v: f"{variants[v]['loss'][-1]:.3f}"),
        ("step\nms", ms("total")),
        ("forward,\nbackward", ms("forward_backward")),
        ("exchange\nms", exchange),
        ("update\nms", ms("update")),
        ("gather\nms", ms("gather")),
        ("state\nMB", lambda v: f"{max(state_bytes(variants[v])) / 1e6:.1f}"),
        ("bytes a\nparameter", bytes_a_parameter),
        ("wire\nMB", lambda v: f"{max(variants[v]['wire_bytes']) / 1e6:.1f}"),
    ]


def state_bytes(variant: dict[str, Any]) -> list[int]:
    """Moments and masters, by rank."""
    return [
        sum(parts) for parts in zip(variant["moment_bytes"], variant["master_bytes"], strict=True)
    ]


def agreement_columns(report: Report) -> list[Column]:
    variants = report["variants"]

    def agrees(name: str) -> Callable[[str], str]:
        return lambda v: describe_agreement(variants[v]["comparisons"], name)

    def from_ddp(v: str) -> str:
        return "" if v == "ddp" else f"{variants[v]['difference_from_ddp']['max_abs']:.1e}"

    return [
        ("\nexp_avg", agrees("exp_avg")),
        ("\nexp_avg_sq", agrees("exp_avg_sq")),
        ("\nparameters", agrees("parameters")),
        ("gap from\nDDP", from_ddp),
    ]


def describe_agreement(comparisons: Sequence[dict[str, Any]], name: str) -> str:
    if name not in comparisons[0]:
        return "[cyan]own shard[/]"
    same = all(comparison[name]["identical"] for comparison in comparisons)
    return "[green]identical[/]" if same else "[red]different[/]"


# -- files ----------------------------------------------------------------------------------------


def write(report: Report, folder: Path) -> None:
    """Write report.json and report.png."""
    from fusedshard.demo.plot import plot

    text = json.dumps(only_finite(report), indent=1, allow_nan=False)
    (folder / "report.json").write_text(text + "\n")
    plot(report, folder / "report.png")


def only_finite(value: Any) -> Any:
    """The same with None for numbers that JSON does not know."""
    if isinstance(value, dict):
        return {key: only_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [only_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
