"""The `fusedshard` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import fusedshard
from fusedshard import _C
from fusedshard.auditing import command as audit
from fusedshard.demo import command as demo
from fusedshard.planning import command as plan


def version() -> str:
    """Of the package, and what its extension was built for."""
    build = _C.cuda_build()
    cuda = f"CUDA {build['architectures']}" if build["built"] else f"no CUDA: {build['note']}"
    return f"fusedshard {fusedshard.__version__} ({cuda})"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fusedshard", description="Sharded (ZeRO-1), fused Adam and AdamW for PyTorch."
    )
    parser.add_argument("--version", action="version", version=version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    demo.add_command(commands)
    audit.add_command(commands)
    plan.add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (by default the process's own) and return its exit status."""
    arguments = build_parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output, as head does, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 1
    return status


if __name__ == "__main__":
    raise SystemExit(main())
