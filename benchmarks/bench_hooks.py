"""What exchanging gradients from within backward costs, and how much of the exchange it hides.

    python benchmarks/bench_hooks.py [--ranks 1 2] [--quick]

Overhead: 1,000 parameters of 4 elements, with gradients that are there beforehand. Nothing is
left to compute, so that hooks, calls and Python decide. Overlap, on more than one rank: a GPT with
a batch so large that backward takes as long as the exchange, with and without hooks. README.md
says how to read the figures.
"""

from __future__ import annotations

import argparse

import hooks_overhead
import hooks_overlap
from fresh_ranks import run_ranks
from record import add_common_options
from runner import choose_gpt

PARTS = ("overhead", "overlap")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hooks in backward: overhead and overlap.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="start these, in turn")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--tensors", type=int, help="tiny parameters, for the overhead")
    parser.add_argument("--overhead-steps", type=int, help="of a variant's turn in a round")
    parser.add_argument("--steps", type=int, default=3, help="the same, for the overlap")
    parser.add_argument("--batch", type=int, help="sequences a rank and step, for the overlap")
    parser.add_argument("--bucket-mb", type=float, help="size of a bucket in MiB, for the overlap")
    add_common_options(parser)
    args = parser.parse_args()
    small = args.quick
    args.repeats = args.repeats or (2 if small else 15)
    args.tensors = args.tensors or (100 if small else 1000)
    args.overhead_steps = args.overhead_steps or (2 if small else 20)
    args.batch = args.batch or (2 if small else 16)
    args.bucket_mb = args.bucket_mb or (0.25 if small else 25)
    choose_gpt(args)
    return args


def main() -> None:
    args = parse()
    for ranks in args.ranks:
        if "overhead" in args.parts:
            run_ranks(ranks, hooks_overhead.measure, args)
        if "overlap" in args.parts and ranks > 1:
            run_ranks(ranks, hooks_overlap.measure, args)


if __name__ == "__main__":
    main()
