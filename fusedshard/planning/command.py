"""`fusedshard plan`: memory and traffic of a training job, before it runs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fusedshard.display import make_console, require_packages
from fusedshard.options import GRAD_SYNCS, REDUCTIONS
from fusedshard.planning import sizes, words
from fusedshard.planning.models import DTYPES, Model, UnusableModel, read, transformer
from fusedshard.planning.ours import BACKENDS
from fusedshard.planning.plan import STATES, Question, as_json, plan

DESCRIPTION = """\
Say what a rank holds, sends and moves in a step of Adam, by DDP, ZeroRedundancyOptimizer, FSDP2 and
fusedshard, to the byte and without allocating it; and on how many ranks each fits.

A model is a number of parameters, for which a decoder-only transformer of that size is taken, or
a file: safetensors, a model.safetensors.index.json with its files beside it, or JSON as
{"name": {"shape": [3, 5], "dtype": "bf16"}, "other": [7]}.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `plan` to the subcommands."""
    parser = commands.add_parser(
        "plan",
        help="say what memory a training job takes on a rank, and what it sends",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--params", type=sizes.count, metavar="COUNT", help="as 10B or 124M")
    model.add_argument("--model", type=Path, metavar="FILE", help="names and shapes")
    parser.add_argument("--ranks", type=sizes.ranks, required=True, metavar="N")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of parameters (default: as in FILE; else bf16)"
    )
    parser.add_argument(
        "--state",
        choices=[*STATES, "all"],
        default="fp32",
        help="fusedshard's state_dtype (default %(default)s)",
    )
    parser.add_argument("--reduction", choices=REDUCTIONS, default="auto", help="fusedshard's")
    parser.add_argument("--grad-sync", choices=GRAD_SYNCS, default="backward", help="fusedshard's")
    parser.add_argument(
        "--bucket-cap-mb", type=sizes.megabytes, default=25, metavar="MB", help="fusedshard's"
    )
    parser.add_argument("--backend", choices=BACKENDS, default="nccl", help="default %(default)s")
    parser.add_argument("--gpu-memory", type=sizes.byte_size, metavar="SIZE", help="as 80GiB")
    parser.add_argument(
        "--bandwidth", type=sizes.rate, metavar="RATE", help="that a rank sends with, as 450GB/s"
    )
    parser.add_argument(
        "--memory-bandwidth", type=sizes.rate, metavar="RATE", help="of a rank, as 3.35TB/s"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan and return the exit status."""
    try:
        if not arguments.json:
            require_packages("rich")
        question = _question(arguments)
    except (UnusableModel, ModuleNotFoundError, OSError) as error:
        print(f"fusedshard plan: error: {error}", file=sys.stderr)
        return 2
    rows, notes = plan(question)
    if arguments.json:
        print(json.dumps(as_json(question, rows, notes), indent=2))
    else:
        words.show(question, rows, notes, make_console())
    return 0


def _question(arguments: argparse.Namespace) -> Question:
    names = ["ranks", "reduction", "grad_sync", "bucket_cap_mb", "backend", "gpu_memory"]
    names += ["bandwidth", "memory_bandwidth"]
    states = tuple(STATES) if arguments.state == "all" else (arguments.state,)
    chosen = {name: getattr(arguments, name) for name in names}
    return Question(_model(arguments), states=states, **chosen)


def _model(arguments: argparse.Namespace) -> Model:
    if arguments.params is not None:
        return transformer(arguments.params, DTYPES[arguments.dtype or "bf16"])
    dtype = None if arguments.dtype is None else DTYPES[arguments.dtype]
    return read(arguments.model, dtype)
