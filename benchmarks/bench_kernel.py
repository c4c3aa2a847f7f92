"""The update alone: in fp32 against torch.optim.AdamW's three implementations and DeepSpeed's, and
in every configuration of formats, each beside the roofline; then a whole step of 1,000 small
tensors.

    python benchmarks/bench_kernel.py [--elements N...] [--threads 1 2] [--isa all] [--quick]
    python benchmarks/bench_kernel.py --device cuda

The roofline is a loop that reads four arrays and writes three in place, as an update must, and
computes next to nothing: it runs on the very buffers that fusedshard updates. The read floor only
reads four arrays: no update can be faster, whatever it does about its writes. On a GPU the roofline
is a copy. README.md says how to read the figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cold_copies import CACHES, last_level_cache
from gpu_stage import DeviceClock
from harness import Samples, Spread, ratio
from kernel_chart import draw, grouped, size_text
from kernel_contenders import DEEPSPEED, FOREACH, SMALL_TENSORS, TORCH
from kernel_measure import READ_FLOOR, ROOFLINE, Plan, distances, fits, measure_size
from kernel_small import OURS, measure_small
from load import wait_for_idle
from record import (
    Bar,
    add_common_options,
    bars_table,
    busy,
    folder_of,
    header,
    machine,
    open_console,
    positive,
    write,
)
from rich.console import Console
from rich.table import Table

from fusedshard import _C

SIZES = [1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 25, 1 << 28]
QUICK_SIZES, QUICK_COPIES, QUICK_TENSORS = [1 << 10, 1 << 14], 3, 50
JUDGED = 1 << 25  # elements that bars are about
# By threads: at least so many times as fast as torch's fused, and such a share of the roofline.
AGAINST_TORCH, OF_ROOFLINE = {1: 1.6, 2: 1.4}, {1: 0.95, 2: 0.9}
AGAINST_DEEPSPEED, AGAINST_FOREACH = 1.2, 3.0


@dataclass(frozen=True)
class Bounded(Bar):
    """A claim of speed, beside what an update that only reads would reach."""

    ceiling: Spread = field(kw_only=True)

    def as_json(self) -> dict[str, Any]:
        return super().as_json() | {"ceiling": asdict(self.ceiling)}


def threads_text(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def fp32_bars(samples: Samples, ours: str, count: int, elements: int, device: str) -> list[Bar]:
    """Of one number of threads; a GPU's bars are gpu_check.py's."""
    if device != "cpu" or count not in AGAINST_TORCH:
        return []
    where = f"{size_text(elements)} fp32 elements, {threads_text(count)}"
    found: list[Bar] = []
    for rival, wanted in ((TORCH, AGAINST_TORCH[count]), (DEEPSPEED, AGAINST_DEEPSPEED)):
        if rival in samples and (rival == TORCH or count == 1):
            speed, ceiling = ratio(samples, rival, ours), ratio(samples, rival, READ_FLOOR)
            claim = f"speed against {rival}, {where}"
            # Of small arrays the floor's own calls decide.
            beyond = elements >= JUDGED
            found.append(
                Bounded(claim, speed, at_least=wanted, ceiling=ceiling)
                if beyond
                else Bar(claim, speed, at_least=wanted)
            )
    share = ratio(samples, ROOFLINE, ours)
    return [*found, Bar(f"share of the roofline, {where}", share, at_least=OF_ROOFLINE[count])]


def small_bar(samples: Samples, count: int, tensors: int) -> Bar:
    claim = f"step of {tensors:,} small tensors: speed against {FOREACH}, {threads_text(count)}"
    return Bar(claim, ratio(samples, FOREACH, OURS), at_least=AGAINST_FOREACH)


def sizes_table(results: Sequence[dict[str, Any]], differences: dict[str, float]) -> Table:
    """All sizes at one number of threads: GB/s, and their share of the roofline's."""
    title = f"{threads_text(results[0]['threads'])}: GB/s (share of the roofline)"
    table = Table(
        "", "bytes", *(size_text(r["elements"]) for r in results), "from fp64", title=title
    )
    rows = [{row["name"]: row for row in result["rows"]} for result in results]
    for name in dict.fromkeys(name for found in rows for name in found):
        known = [found.get(name) for found in rows]
        moved = next(row["bytes_an_element"] for row in known if row)
        table.add_row(
            name,
            str(moved),
            *("" if row is None else _bandwidth_text(row) for row in known),
            f"{differences[name]:.1e}" if name in differences else "",
        )
    cores = (result["other_cores"] for result in results)
    idle = ("" if busy is None else f"{busy:.2f}" for busy in cores)
    table.add_row("others' busy cores", "", *idle, "", style="dim")
    return table


def _bandwidth_text(row: dict[str, Any]) -> str:
    share = row["share_of_roofline"]["median"]
    return f"{row['gigabytes_per_second']:.1f} ({share:.2f})"


def details_table(result: dict[str, Any]) -> Table:
    """Times of one size, with their spread."""
    size, count = size_text(result["elements"]), threads_text(result["threads"])
    table = Table(title=f"{size} elements, {count}, {busy(result['other_cores'])}")
    for column in ("", "us: median (quartiles)", "GB/s", "of roofline", "against torch fused"):
        table.add_column(column, justify="right" if column else "left")
    for row in result["rows"]:
        table.add_row(
            row["name"],
            Spread(**row["seconds"]).text(scale=1e6, digits=1),
            f"{row['gigabytes_per_second']:.1f}",
            Spread(**row["share_of_roofline"]).text(),
            Spread(**row["speed_against_torch_fused"]).text(),
        )
    return table


def small_table(result: dict[str, Any]) -> Table:
    title = f"step of {result['tensors']:,} small tensors, {threads_text(result['threads'])}"
    table = Table(title=f"{title}, {busy(result['other_cores'])}")
    for column in ("", "ms: median (quartiles)", "GB/s", "against torch foreach", "from fp64"):
        table.add_column(column, justify="right" if column else "left")
    for row in result["rows"]:
        table.add_row(
            row["name"],
            Spread(**row["seconds"]).text(scale=1e3),
            f"{row['gigabytes_per_second']:.1f}",
            Spread(**row["speed_against_torch_foreach"]).text(),
            f"{row['largest_difference_from_fp64']:.1e}",
        )
    return table


def available_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith("MemAvailable:"))
    return int(found.split()[1]) << 10


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The update alone.")
    variants = _C.cpu_variants()
    parser.add_argument(
        "--elements", type=positive, nargs="+", help="of each array (default: 1 Ki to 256 Mi)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: cpu)")
    parser.add_argument("--threads", type=positive, nargs="+", help="(default: 1 2; one of a GPU)")
    parser.add_argument(
        "--isa",
        nargs="+",
        choices=[*variants, "all"],
        default=[_C.cpu_variant()],
        help="compiled variants to measure; bars and roofline are of the first",
    )
    add_common_options(parser)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda, which torch does not find here, wanted cpu")
    if "all" in args.isa:
        args.isa = variants[::-1]
    if args.device == "cuda":
        args.isa = [None]
    args.elements = sorted(set(args.elements or (QUICK_SIZES if args.quick else SIZES)))
    args.threads = sorted(set(args.threads or ([1, 2] if args.device == "cpu" else [1])))
    args.repeats = args.repeats or (3 if args.quick else 15)
    return args


def plan_of(args: argparse.Namespace) -> Plan:
    on_cpu = args.device == "cpu"
    return Plan(
        device=args.device,
        isas=args.isa,
        threads=args.threads,
        repeats=args.repeats,
        cold_bytes=CACHES * last_level_cache() if on_cpu else 0,  # a GPU's clock flushes its own
        most_copies=QUICK_COPIES if args.quick else 1 << 20,
        before_round=partial(wait_for_idle, args.idle_wait),
        device_seconds=None if on_cpu else DeviceClock().seconds,
    )


def measure(
    plan: Plan, args: argparse.Namespace, console: Console
) -> tuple[dict[str, Any], list[Bar]]:
    """All of it, as the report has it, and the bars."""
    measured = [size for size in args.elements if fits(size, available_bytes(plan.device))]
    left_out = [size for size in args.elements if size not in measured]
    if not measured:
        raise SystemExit("no size fits into memory")
    if left_out:
        names = ", ".join(map(size_text, left_out))
        console.print(f"left out, as memory does not suffice: {names} elements")
    small, small_samples = measure_small(plan, QUICK_TENSORS if args.quick else SMALL_TENSORS)
    results: list[dict[str, Any]] = []
    bars: list[Bar] = []
    judged = max((size for size in measured if size <= JUDGED), default=measured[0])
    for elements in measured:
        of_size, samples = measure_size(plan, elements)
        results += of_size
        if elements == judged:
            for count in plan.threads:
                ours = plan.names[0]
                bars += fp32_bars(samples[count], ours, count, elements, plan.device)
    for of_small in small:
        count = of_small["threads"]
        bars.append(small_bar(small_samples[count], count, of_small["tensors"]))
    found = {
        "device_name": torch.cuda.get_device_name() if plan.device == "cuda" else machine()["cpu"],
        "cold_bytes": plan.cold_bytes,
        "left_out": left_out,
        "largest_difference_from_fp64": distances(plan),
        "results": results,
        "small_tensors": small,
        "bars": [bar.as_json() for bar in bars],
    }
    return found, bars


def print_report(report: dict[str, Any], bars: Sequence[Bar], console: Console) -> None:
    for results in grouped(report["results"]).values():
        console.print(sizes_table(results, report["largest_difference_from_fp64"]))
        console.print(details_table(results[-1]))
    for result in report["small_tensors"]:
        console.print(small_table(result))
    console.print(bars_table(bars, quick=report["settings"]["quick"]))
    for bar in bars:
        if isinstance(bar, Bounded):
            most = bar.ceiling.text()
            console.print(f"{bar.claim}: no update can reach more than {most}: the read floor")


def main() -> None:
    args = parse()
    console = open_console()
    measured, bars = measure(plan_of(args), args, console)
    report = header("kernel", args) | measured
    print_report(report, bars, console)
    write(report, folder_of(args), "kernel", console)
    draw(report, folder_of(args), console)


if __name__ == "__main__":
    main()
