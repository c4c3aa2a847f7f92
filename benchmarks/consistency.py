"""Are Adam's moments the same on every rank, and what becomes of a job in which they are not?

    python benchmarks/consistency.py [--ranks 2] [--order-ranks 3] [--quick]

Trains the same small GPT from the same weights again and again: as DDP does, sharded, with the
classic mistakes, and with gradients added in another order. README.md says how to read it. The exit
status is 1 if a claim does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from consistency_audits import catch_all
from consistency_claims import judge
from consistency_jobs import AUDITED_JOBS, ORDER_JOBS, RANK_JOBS, TWO_RANK_JOBS, Job
from consistency_plot import plot
from consistency_train import train_all
from fresh_ranks import run_ranks
from record import add_run_options, folder_of, header, open_console, write
from rich.console import Console
from rich.table import Table

from fusedshard.demo.model import load_corpus, standard_library
from fusedshard.demo.report import make_verdict_list

PARTS = ("ranks", "order", "audits")
# What ranks do with jobs: of jobs, text and arguments.
Work = tuple[Callable[[Any, bytes, argparse.Namespace], dict[str, Any]], Mapping[str, Job]]


def run(ranks: int, works: Mapping[str, Work], args: argparse.Namespace) -> dict[str, Any]:
    """What so many ranks found, by part."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        run_ranks(ranks, work, works, path, args)
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def work(works: Mapping[str, Work], path: Path, args: argparse.Namespace) -> None:
    """Each part in turn; the first rank writes what was found to `path`. Collective."""
    torch.set_num_threads(1)
    text = load_corpus(standard_library())
    found = {part: of_jobs(jobs, text, args) for part, (of_jobs, jobs) in works.items()}
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))


def runs_table(title: str, found: Mapping[str, Any]) -> Table:
    """What became of each job at its end."""
    table = Table(title=title)
    columns = ("", "steps", "m", "v", "weights", "loss: own", "held out", "of the average")
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for name, job in found.items():
        last = job["probes"][-1]
        gaps = last["between_ranks"]
        table.add_row(
            name,
            str(last["step"]),
            *(gap_text(gaps.get(part)) for part in ("exp_avg", "exp_avg_sq", "parameters")),
            " ".join(f"{loss:.3f}" for loss in last["train_loss"]),
            " ".join(f"{loss:.4f}" for loss in sorted(set(last["held_out"]))),
            f"{last['held_out_of_average']:.4f}" if "held_out_of_average" in last else "",
        )
    return table


def gap_text(gap: Mapping[str, Any] | None) -> str:
    if gap is None:
        return "own shard"
    return f"{gap['relative']:.1e}" if gap["differing"] else "identical"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Adam's state on every rank, right and wrong.")
    parser.add_argument("--ranks", type=int, default=2, help="that are compared with each other")
    parser.add_argument(
        "--order-ranks", type=int, default=3, help="whose gradients are added in other orders"
    )
    parser.add_argument("--steps", type=int, help="of each job")
    parser.add_argument("--batch", type=int, default=2, help="windows of text a rank and step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--parts", choices=PARTS, nargs="+", default=PARTS,
        help="run these, and keep what the report in the folder has of the others",
    )  # fmt: skip
    add_run_options(parser)
    args = parser.parse_args()
    small = args.quick
    args.steps = args.steps or (12 if small else 2000)
    args.width, args.depth, args.heads, args.context = (32, 1, 2, 16) if small else (64, 2, 4, 64)
    args.held_out = 8 if small else 128  # windows
    args.lost_after = args.steps // 5
    return args


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The report but for its verdicts: parts that are run, and those that are kept."""
    two_ranks = TWO_RANK_JOBS if args.ranks == 2 else {}
    works: dict[str, tuple[int, Work]] = {
        "ranks": (args.ranks, (train_all, RANK_JOBS | two_ranks)),
        "audits": (args.ranks, (catch_all, AUDITED_JOBS)),
        "order": (args.order_ranks, (train_all, ORDER_JOBS)),
    }
    report = header("consistency", args)
    del report["settings"]["parts"]  # told by what was made when
    made = {name: report[name] for name in ("date", "commit")}
    kept = {} if set(args.parts) == set(PARTS) else json.loads(path_of(args).read_text())
    if kept and kept["settings"] != report["settings"]:
        sys.exit(f"{path_of(args)} was made with other settings: run all parts")
    report["made"] = kept.get("made", {}) | dict.fromkeys(args.parts, made)
    report |= {part: kept[part] for part in PARTS if part not in args.parts}
    for ranks in sorted({args.ranks, args.order_ranks}):
        mine = {part: works[part][1] for part in args.parts if works[part][0] == ranks}
        report |= run(ranks, mine, args) if mine else {}
    return report


def path_of(args: argparse.Namespace) -> Path:
    return folder_of(args) / "consistency.json"


def show(report: dict[str, Any], console: Console) -> None:
    settings = report["settings"]
    for part, ranks in (("ranks", settings["ranks"]), ("order", settings["order_ranks"])):
        title = f"{ranks} ranks; differences between them are relative, in norm"
        console.print(runs_table(title, report[part]))
    console.print(make_verdict_list(report))


def main() -> None:
    args = parse()
    report = measure(args)
    claims = judge(report)
    report["verdicts"] = [asdict(claim) for claim in claims]
    console = open_console()
    show(report, console)
    write(report, folder_of(args), "consistency", console, indent=None)
    plot(report, folder_of(args) / "consistency.png")
    sys.exit(0 if all(claim.ok for claim in claims) else 1)


if __name__ == "__main__":
    main()
