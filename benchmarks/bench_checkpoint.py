"""Saving and loading the optimizer's state: memory and time, beside FSDP2's.

    python benchmarks/bench_checkpoint.py [--ranks 2] [--quick]

By torch.distributed.checkpoint (DCP), where each rank writes what it has, and as one file that the
first rank writes. README.md says how to read the figures.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from charts import Panel, spreads_of
from checkpoint_ways import JOBS, MIXED, PIECES, WAYS, full_state
from fresh_ranks import run_ranks
from harness import (
    Samples,
    Spread,
    gather,
    interleave,
    progress_bar,
    ratio,
    slowest_rank,
    start_round,
)
from load import median_other_cores
from peak import peak_of, return_freed_memory
from record import Bar, add_common_options, busy, header, open_console
from rich.table import Table
from runner import TextRunner, choose_gpt, publish, rank_count
from step_variants import SHARDED

import fusedshard


class Files:
    """Where the ways save: each to a new place every time, and only the last stays."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._turn = folder, 0
        self._last: dict[str, Path] = {}

    def save(self, runners: Mapping[str, TextRunner], name: str) -> None:
        self._turn += 1
        path = self._folder / f"{self._turn}"
        WAYS[name].save(runners[WAYS[name].job], path)
        dist.barrier()
        before, self._last[name] = self._last.get(name), path
        if before is not None and dist.get_rank() == 0:
            shutil.rmtree(before) if before.is_dir() else before.unlink()

    def load(self, runners: Mapping[str, TextRunner], name: str) -> None:
        WAYS[name].load(runners[WAYS[name].job], self._last[name])

    def sizes(self) -> dict[str, int]:
        """Bytes, by way."""
        return {
            name: sum(file.stat().st_size for file in [path, *path.glob("*")] if file.is_file())
            for name, path in self._last.items()
        }


def measure(args: argparse.Namespace, folder: Path) -> None:
    """Save and load on the ranks of the default group; its first rank reports. Collective."""
    torch.set_num_threads(args.threads)
    runners = {name: TextRunner(build, args) for name, build in JOBS.items()}
    for runner in runners.values():
        runner.step()
    files = Files(folder)
    samples, other_cores = seconds(runners, files, args)
    return_freed_memory()
    peaks = gather(memory(runners, files, args.measured))
    states = gather(full_states(runners, args.measured))
    if dist.get_rank() == 0:
        found = header("checkpoint", args)
        found["settings"] |= {
            "ranks": len(peaks),
            "parameters": runners[SHARDED].parameters,
        }
        found |= {
            "other_cores": other_cores,
            "results": rows(samples, peaks, files.sizes()),
            "full_state_dict": full_rows(states),
            "units": units(runners),
        }
        report(found, args)


def seconds(
    runners: Mapping[str, TextRunner], files: Files, args: argparse.Namespace
) -> tuple[Samples, float | None]:
    """Seconds of each act for the slowest rank. Collective."""

    def timed(act: Callable[..., None], name: str) -> float:
        dist.barrier()
        start = time.perf_counter()
        act(runners, name)
        return time.perf_counter() - start

    for name in WAYS:
        files.save(runners, name)
    acts = {"save": files.save, "load": files.load}
    timing = interleave(
        {f"{act}, {name}": partial(timed, acts[act], name) for name in WAYS for act in acts},
        args.repeats,
        before_round=partial(start_round, args.idle_wait),
        progress=dist.get_rank() == 0,
    )
    return slowest_rank(timing.samples), median_other_cores(gather(timing.rounds))


def memory(runners: Mapping[str, TextRunner], files: Files, times: int) -> dict[str, list[int]]:
    """What this rank needs for each act beside what it has, each time. Collective."""
    acts = {"save": files.save, "load": files.load}
    peaks: dict[str, list[int]] = {f"{act}, {name}": [] for name in WAYS for act in acts}
    with progress_bar(dist.get_rank() == 0) as bar:
        for key in bar.track([*peaks] * times, description="memory"):
            act, name = key.split(", ", 1)
            dist.barrier()
            peaks[key].append(peak_of(partial(acts[act], runners, name))[0])
    return peaks


def full_states(runners: Mapping[str, TextRunner], times: int) -> dict[str, list[dict[str, int]]]:
    """The same of `full_state_dict`, where only the first rank keeps it, with what that takes.
    Collective."""
    found: dict[str, list[dict[str, int]]] = {name: [] for name in runners}
    for name in [*runners] * times:
        dist.barrier()
        peak, state = peak_of(partial(full_state, runners[name]))
        arrays = [v for values in state.get("state", {}).values() for v in values.values()]
        found[name].append({"peak": peak, "result": sum(array.nbytes for array in arrays)})
    return found


def units(runners: Mapping[str, TextRunner]) -> dict[str, dict[str, int]]:
    """Bytes of the largest bucket and parameter of ours, in fp32."""
    found = {}
    for name, runner in runners.items():
        if isinstance(runner.optimizer, fusedshard.AdamW):
            flats = runner.optimizer.layout.flats
            found[name] = {
                "bucket": 4 * max(bucket.numel for flat in flats for bucket in flat.buckets),
                "parameter": 4 * max(param.numel() for param in runner.model.parameters()),
            }
    return found


def rows(
    samples: Samples, peaks: Sequence[Mapping[str, list[int]]], sizes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """One a way; of memory what the rank that needs most needs."""
    found = []
    for name, way in WAYS.items():
        row: dict[str, Any] = {"name": name, "file_bytes": sizes[name]}
        for act in ("save", "load"):
            seconds = samples[f"{act}, {name}"]
            worst = [
                max(values) for values in zip(*(p[f"{act}, {name}"] for p in peaks), strict=True)
            ]
            row |= {
                f"{act}_seconds": asdict(Spread.of(seconds)),
                f"{act}_against_fsdp": asdict(
                    ratio(samples, f"{act}, {name}", f"{act}, {way.base}")
                ),
                f"{act}_samples": seconds,
                f"{act}_peak_bytes": asdict(Spread.of(worst)),
            }
        found.append(row)
    return found


def full_rows(states: Sequence[Mapping[str, list[dict[str, int]]]]) -> list[dict[str, Any]]:
    """Of each job: on the first rank what it needs beyond its result, on the others all."""
    found = []
    for name in JOBS:
        kept = [one["peak"] - one["result"] for one in states[0][name]]
        others = [
            max(one["peak"] for one in turn)
            for turn in zip(*(rank[name] for rank in states[1:]), strict=True)
        ]
        found.append(
            {
                "name": name,
                "result_bytes": states[0][name][0]["result"],
                "beyond_result_bytes": asdict(Spread.of(kept)),
                "other_ranks_bytes": asdict(Spread.of(others)),
            }
        )
    return found


def bars(found: Mapping[str, Any]) -> list[Bar]:
    saved = {row["name"]: row for row in found["results"]}
    full = {row["name"]: row for row in found["full_state_dict"]}
    made = []
    for name, way in ((SHARDED, f"{SHARDED}: DCP"), (MIXED, PIECES)):
        bucket, parameter = (1 / found["units"][name][unit] for unit in ("bucket", "parameter"))
        made += [
            Bar(
                f"buckets to save, {way}",
                Spread(**saved[way]["save_peak_bytes"]).scaled(bucket),
                at_most=1.0,
            ),
            Bar(
                f"parameters beyond full_state_dict, {name}",
                Spread(**full[name]["beyond_result_bytes"]).scaled(parameter),
                at_most=1.0,
            ),
            Bar(
                f"buckets where none is kept, {name}",
                Spread(**full[name]["other_ranks_bytes"]).scaled(bucket),
                at_most=1.1,  # and what it takes to call anything
            ),
        ]
    return made


def report(found: dict[str, Any], args: argparse.Namespace) -> None:
    """Print it and write it."""
    console = open_console()
    console.print(
        f"{rank_count(found)}, {found['settings']['parameters']} parameters, {args.repeats} "
        f"interleaved rounds, {busy(found['other_cores'])}"
    )
    console.print(ways_table(found["results"]), full_table(found["full_state_dict"]))
    title = "Saving and loading the optimizer's state"
    publish(found, bars(found), console, args, (title, panels(found)))


def panels(found: Mapping[str, Any]) -> list[Panel]:
    results, full = found["results"], found["full_state_dict"]
    peaks = {row["name"]: Spread(**row["save_peak_bytes"]).scaled(1e-6) for row in results}
    beyond = {row["name"]: Spread(**row["beyond_result_bytes"]).scaled(1e-6) for row in full}
    return [
        Panel("Save", spreads_of(results, "save_seconds"), "seconds"),
        Panel("Load", spreads_of(results, "load_seconds"), "seconds"),
        Panel("Peak memory of a save, beside what was there", peaks, "MB on the rank with most"),
        Panel("Peak memory of the full state, beyond itself", beyond, "MB on the first rank"),
    ]


def ways_table(results: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="optimizer state")
    columns = ["", "MB written"]
    for act in ("save", "load"):
        columns += [f"{act}: s", "of FSDP2's", "peak MB"]
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for row in results:
        cells = [row["name"], f"{row['file_bytes'] / 1e6:.1f}"]
        for act in ("save", "load"):
            cells += [
                Spread(**row[f"{act}_seconds"]).text(digits=3),
                Spread(**row[f"{act}_against_fsdp"]).text(),
                f"{Spread(**row[f'{act}_peak_bytes']).median / 1e6:.1f}",
            ]
        table.add_row(*cells)
    return table


def full_table(full: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="the full state on the first rank")
    for column in ("", "result MB", "peak MB beyond it", "peak MB on the others"):
        table.add_column(column, justify="right" if column else "left")
    for row in full:
        peaks = (row["beyond_result_bytes"], row["other_ranks_bytes"])
        texts = [Spread(**peak).text(scale=1e-6, digits=1) for peak in peaks]
        table.add_row(row["name"], f"{row['result_bytes'] / 1e6:.1f}", *texts)
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Saving and loading on CPU ranks over gloo.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="start these, in turn")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--files", type=Path, help="folder to save to, instead of a temporary one")
    add_common_options(parser)
    args = parser.parse_args()
    small = args.quick
    args.steps = args.batch = 1
    args.measured = 1 if small else 3  # times that memory is
    args.repeats = args.repeats or (1 if small else 9)
    choose_gpt(args)
    return args


def main() -> None:
    args = parse()
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory(dir=args.files) as folder:
            args.files = None  # not in the report
            run_ranks(ranks, measure, args, Path(folder))


if __name__ == "__main__":
    main()
