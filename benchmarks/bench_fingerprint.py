"""Fingerprints on the CPU: their speed beside a plain sum of the same tensor, and changes that they
must tell.

    python benchmarks/bench_fingerprint.py [--elements N] [--threads 1 2] [--fuzz N] [--quick]

Then so many random changes of tensors: single bits that flip, and elements that change places.
Exits with 1 where one of them is not seen. README.md says how to read the figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from charts import Panel, save_bars, spreads_of
from fingerprint_fuzz import COPIES, SMALL_CASES, Case, Tally, fuzz
from harness import Spread, Timing, interleave, ratio, rows_beside, threads
from load import median_other_cores, wait_for_idle
from record import Bar, add_common_options, bars_table, busy, folder_of, header, open_console, write
from rich.console import Console
from rich.table import Table

from fusedshard import _C
from fusedshard.kernels import FingerprintTable, fingerprints

Work = Callable[[], object]

SUM, READ = "torch.sum", "read floor"
ONE_CALL, REBUILT = "fingerprints, one call", "fingerprints, one call, with its checks"
SUM_EACH = "torch.sum of each"
SMALL_TENSORS, LARGEST_SMALL = 1000, 10_000
MOST = 1.2  # times of a plain sum
LARGE_CHANGES = 200


def ours(isa: str) -> str:
    return f"fingerprint {isa}"


def with_isa(isa: str, work: Work) -> None:
    before = _C.cpu_variant()
    _C.set_cpu_variant(isa)
    work()
    _C.set_cpu_variant(before)


def contenders(elements: int) -> dict[str, Work]:
    """All of them read one fp32 tensor."""
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    table = FingerprintTable([x])
    halves = x[: elements // 2], x[elements - elements // 2 :]
    found: dict[str, Work] = {
        ours(isa): partial(with_isa, isa, table.fingerprints) for isa in reversed(_C.cpu_variants())
    }
    return found | {SUM: x.sum, READ: partial(torch.dot, *halves)}


def small_contenders() -> dict[str, Work]:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, LARGEST_SMALL + 1, (SMALL_TENSORS,), generator=generator).tolist()
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    table = FingerprintTable(tensors)
    return {
        ONE_CALL: table.fingerprints,
        REBUILT: partial(fingerprints, tensors),
        SUM_EACH: lambda: [tensor.sum() for tensor in tensors],
    }


def counted(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(works: dict[str, Work], args: argparse.Namespace) -> Timing:
    variants = {name: partial(counted, work) for name, work in works.items()}
    idle = partial(wait_for_idle, args.idle_wait)
    return interleave(variants, args.repeats, before_round=idle)


def measure_threads(count: int, args: argparse.Namespace) -> tuple[dict[str, Any], Bar]:
    with threads(count):
        timing = measure(contenders(args.elements), args)
        small = measure(small_contenders(), args)
    best = ours(_C.cpu_variants()[-1])
    claim = f"time of {best} against {SUM}, {count} thread{'s' * (count > 1)}"
    result = {
        "threads": count,
        "other_cores": median_other_cores([timing.rounds]),
        "rows": rows_beside(timing.samples, SUM, 4 * args.elements),
        "small_tensors": rows_beside(small.samples, SUM_EACH),
    }
    return result, Bar(claim, ratio(timing.samples, best, SUM), at_most=MOST)


def results_table(result: dict[str, Any]) -> Table:
    table = Table(title=f"threads: {result['threads']}, {busy(result['other_cores'])}")
    for column in ("", "ms: median (quartiles)", "GB/s", "time against torch.sum"):
        table.add_column(column, justify="right" if column else "left")
    for row in (*result["rows"], *result["small_tensors"]):
        bandwidth = row.get("gigabytes_per_second")
        table.add_row(
            row["name"],
            Spread(**row["seconds"]).text(scale=1e3),
            "" if bandwidth is None else f"{bandwidth:.1f}",
            Spread(**row["time_against_base"]).text(),
        )
    return table


def as_row(case: Case, tally: Tally) -> dict[str, Any]:
    return {
        "dtype": str(case.dtype).removeprefix("torch."),
        "content": case.content,
        "bytes": case.nbytes,
        **asdict(tally),
        "wrong": tally.wrong,
    }


def run_fuzz(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The changes, shared out to the small cases, and then some of a large tensor."""
    if args.fuzz == 0:
        return []
    each = -(-args.fuzz // len(SMALL_CASES))
    with threads(1):
        found = [
            as_row(case, fuzz(case, each, COPIES, args.seed + index))
            for index, case in enumerate(SMALL_CASES)
        ]
    large = Case(torch.float32, "normal", args.elements)  # a quarter of what is measured
    return [*found, as_row(large, fuzz(large, min(LARGE_CHANGES, args.fuzz), 1, args.seed))]


def print_fuzz(found: list[dict[str, Any]], console: Console) -> None:
    table = Table("tensor", "bits flipped", "not seen", "exchanges", "not seen", "false alarms")
    for row in found:
        names = ("flips", "unseen_flips", "exchanges", "unseen_exchanges", "false_alarms")
        name = f"{row['dtype']}, {row['content']}, {row['bytes']:,} bytes"
        table.add_row(name, *(f"{row[column]:,}" for column in names))
    console.print(table)


def panels(report: dict[str, Any]) -> list[Panel]:
    found = []
    for result in report["results"]:
        of = f"threads: {result['threads']}"
        large = spreads_of(result["rows"], "time_against_base")
        small = spreads_of(result["small_tensors"], "time_against_base")
        found += [
            Panel(f"one large tensor, {of}", large, f"time / time of {SUM}", MOST),
            Panel(f"{SMALL_TENSORS} small tensors, {of}", small, f"time / time of {SUM_EACH}", 1.0),
        ]
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fingerprints on the CPU.")
    parser.add_argument("--elements", type=int, help="of the fp32 tensor (default: 64 Mi)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="(default: 1 2)")
    parser.add_argument("--fuzz", type=int, metavar="N", help="changes (default: 10 million)")
    parser.add_argument("--seed", type=int, default=0, help="of the changes (default: 0)")
    add_common_options(parser)
    args = parser.parse_args()
    args.elements = args.elements or (1 << 18 if args.quick else 64 << 20)
    args.repeats = args.repeats or (3 if args.quick else 15)
    if args.fuzz is None:
        args.fuzz = 20_000 if args.quick else 10_000_000
    return args


def main() -> None:
    args = parse()
    console = open_console()
    measured = [measure_threads(count, args) for count in args.threads]
    found_bars = [bar for _, bar in measured]
    found = run_fuzz(args)
    report = header("fingerprint", args) | {
        "results": [result for result, _ in measured],
        "bars": [bar.as_json() for bar in found_bars],
        "fuzz": found,
    }
    console.print(f"{args.elements} fp32 elements, {args.repeats} interleaved rounds")
    for result, _ in measured:
        console.print(results_table(result))
    print_fuzz(found, console)
    console.print(bars_table(found_bars, quick=args.quick))
    write(report, folder_of(args), "fingerprint", console)
    title = f"Fingerprints of {args.elements} fp32 elements"
    save_bars(report, folder_of(args), "fingerprint", title, panels(report), console)
    wrong = sum(row["wrong"] for row in found)
    sys.exit(f"{wrong} changes were not told rightly" if wrong else 0)


if __name__ == "__main__":
    main()
