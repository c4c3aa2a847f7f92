"""How a bucket moves fastest over gloo: what the choice in fusedshard/comm.py rests on.

    python benchmarks/bench_comm.py [--ranks 2 4] [--megabytes 4 25 64] [--quick]

Exchange: every rank ends with the mean, in rank order, of its chunk of all ranks' buffers. Gather:
every rank owns one slice of a flat buffer and ends with all of it, in place. fusedshard's own way
is called through its Communicator; the rest is what torch.distributed offers. AllReduce, which
does the work of both, is the reference.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from charts import Panel, save_bars, spreads_of
from fresh_ranks import run_ranks
from harness import (
    Samples,
    Spread,
    gather,
    interleave,
    ratio,
    slowest_rank,
    start_round,
)
from load import median_other_cores
from record import add_common_options, busy, folder_of, header, open_console, write
from rich.console import Console
from rich.table import Table

from fusedshard.comm import Communicator
from fusedshard.kernels import mean_
from fusedshard.stats import Stats

ALL_REDUCE = "all_reduce"
OUR_EXCHANGE = "exchange: fusedshard (send and recv pairs), mean"
OUR_GATHER = "gather: fusedshard (send and recv pairs)"

# The names since torch 2.13, where the older ones warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Transfers:
    """Every way to exchange and to gather one buffer, by name."""

    def __init__(self, numel: int) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.comm = Communicator(None, Stats())
        self.chunk = numel // self.ranks
        self.send = torch.ones(self.chunk * self.ranks)
        self.receive = torch.ones_like(self.send)
        self.out = torch.ones(self.chunk)
        self.ways: dict[str, Callable[[], object]] = {
            ALL_REDUCE: lambda: dist.all_reduce(self.send),
            OUR_EXCHANGE: self.exchange_pairs,
            "exchange: all_to_all_single, mean": self.exchange_all_to_all,
            "exchange: scatter from each, mean": self.exchange_scatters,
            "exchange: reduce_scatter": lambda: reduce_scatter_single(self.out, self.send),
            OUR_GATHER: lambda: self.comm.all_gather_(self.receive).wait(),
            "gather: broadcast from each": self.gather_broadcasts,
            "gather: all_gather of one tensor": self.gather_single,
            "gather: all_gather of a list": self.gather_list,
        }

    def exchange_pairs(self) -> None:
        room = self.receive[: self.chunk * (self.ranks - 1)]
        chunks, pending = self.comm.exchange_chunks(self.send, room)
        pending.wait()
        mean_(self.out, chunks)

    def exchange_all_to_all(self) -> None:
        dist.all_to_all_single(self.receive, self.send)
        mean_(self.out, self.receive.split(self.chunk))

    def exchange_scatters(self) -> None:
        chunks = list(self.send.split(self.chunk))
        arriving = list(self.receive.split(self.chunk))
        works = [
            dist.scatter(arriving[r], chunks if r == self.rank else None, src=r, async_op=True)
            for r in range(self.ranks)
        ]
        wait_all(works)
        mean_(self.out, arriving)

    def gather_broadcasts(self) -> None:
        slices = self.receive.split(self.chunk)
        wait_all([dist.broadcast(s, src=r, async_op=True) for r, s in enumerate(slices)])

    def gather_single(self) -> None:
        all_gather_single(self.receive, self.receive.split(self.chunk)[self.rank])

    def gather_list(self) -> None:
        slices = list(self.receive.split(self.chunk))
        dist.all_gather(slices, slices[self.rank])


def wait_all(works: list[Any]) -> None:
    for work in works:
        work.wait()


def begun_together(way: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def measure(args: argparse.Namespace) -> None:
    """Time every way on the ranks of the default group; its first rank reports. Collective."""
    torch.set_num_threads(1)
    first = dist.get_rank() == 0
    report = header("comm", args)
    report["settings"]["ranks"] = dist.get_world_size()
    report["results"] = []
    for megabytes in args.megabytes:
        ways = Transfers(int(megabytes * 2**20) // torch.float32.itemsize).ways
        timing = interleave(
            {name: partial(begun_together, way) for name, way in ways.items()},
            args.repeats,
            before_round=partial(start_round, args.idle_wait),
            progress=first,
        )
        other_cores = median_other_cores(gather(timing.rounds))
        found = rows(slowest_rank(timing.samples))
        report["results"].append(
            {"megabytes": megabytes, "other_cores": other_cores, "rows": found}
        )
    if first:
        publish(report, args, open_console())


def rows(samples: Samples) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "seconds": asdict(Spread.of(seconds)),
            "against_all_reduce": asdict(ratio(samples, name, ALL_REDUCE)),
            "samples": seconds,
        }
        for name, seconds in samples.items()
    ]


def publish(report: dict[str, Any], args: argparse.Namespace, console: Console) -> None:
    ranks = report["settings"]["ranks"]
    for result in report["results"]:
        title = f"{ranks} ranks, {result['megabytes']} MiB of fp32, {busy(result['other_cores'])}"
        table = Table("", "ms: median (quartiles)", f"of {ALL_REDUCE}", title=title)
        for row in result["rows"]:
            times = Spread(**row["seconds"]).text(scale=1e3)
            table.add_row(row["name"], times, Spread(**row["against_all_reduce"]).text())
        console.print(table)
    name = f"comm_{ranks}_ranks"
    write(report, folder_of(args), name, console)
    title = f"One bucket over gloo, {ranks} ranks"
    save_bars(report, folder_of(args), name, title, panels(report), console)


def panels(report: dict[str, Any]) -> list[Panel]:
    label = f"time / time of {ALL_REDUCE}"
    return [
        Panel(
            f"{result['megabytes']} MiB",
            spreads_of(result["rows"], "against_all_reduce"),
            label,
            1.0,
        )
        for result in report["results"]
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How a bucket moves fastest over gloo.")
    parser.add_argument("--ranks", type=int, nargs="+", help="start these many, in turn")
    parser.add_argument("--megabytes", type=float, nargs="+", help="MiB of the buffers")
    add_common_options(parser)
    args = parser.parse_args()
    args.repeats = args.repeats or (2 if args.quick else 15)
    args.ranks = args.ranks or ([2] if args.quick else [2, 4])
    args.megabytes = args.megabytes or ([0.25] if args.quick else [4, 25, 64])
    return args


def main() -> None:
    args = parse()
    for ranks in args.ranks:
        run_ranks(ranks, measure, args)


if __name__ == "__main__":
    main()
