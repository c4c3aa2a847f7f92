"""`fusedshard audit`: the audit of saved files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fusedshard.auditing import words
from fusedshard.auditing.files.contents import UnusableFile
from fusedshard.auditing.files.saved import read
from fusedshard.auditing.local import compare
from fusedshard.display import make_console, require_packages

DESCRIPTION = """\
Compare what the ranks of a job have saved: a file for each rank, in rank order. Exits with 0 if the
state is what it should be, 1 if it is not, 2 if that cannot be told.

A file is what torch.save wrote of an optimizer's state dict, a model's, or dicts with such. What
all files have must have the same bits. Where most parameters have state in one file alone, each
must. One-dimensional state that is shorter than its parameter, whose shape a model in one of the
files must show, is taken for consecutive stretches, in the order of the files. DTensors know their
place.

Or a folder that torch.distributed.checkpoint wrote: each element must be in one of its files. With
other paths it counts as one file.
"""
EPILOG = """\
Nothing in the files is run: pickles that hold other than tensors, numbers, text, lists and dicts
are refused.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `audit` to the subcommands."""
    parser = commands.add_parser(
        "audit",
        help="compare the optimizer states that the ranks of a job have saved",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a file of each rank")
    parser.add_argument("--all", action="store_true", help="a row for each parameter")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all findings here")
    parser.add_argument("--plot", type=_picture, metavar="FILE.png", help="draw them here")
    parser.set_defaults(run=run)


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".png":
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a name that ends in .png")
    return path


def run(arguments: argparse.Namespace) -> int:
    """Audit the files and return the exit status."""
    try:
        require_packages("rich", *(["matplotlib"] if arguments.plot else []))
        report = compare(*read(arguments.paths))
        console = make_console()
        console.print(words.table(report, every=arguments.all))
        console.print(f"files: {', '.join(report.ranks)}", markup=False)
        if arguments.json:
            arguments.json.write_text(report.to_json() + "\n")
        if arguments.plot:
            report.plot(arguments.plot)
    except (UnusableFile, ModuleNotFoundError, OSError) as error:
        print(f"fusedshard audit: error: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # what is in a file may be anything
        kind = type(error).__name__
        print(f"fusedshard audit: error: cannot make sense of it: {kind}: {error}", file=sys.stderr)
        return 2
    return 0 if report.ok else 1
