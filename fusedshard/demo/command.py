"""`fusedshard demo`: start the ranks, follow them, and report what they found."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from fusedshard.demo import report as demo_report
from fusedshard.demo.model import load_corpus, standard_library
from fusedshard.demo.train import DTYPES, STATE_DTYPES, VARIANTS, Settings, run_variants
from fusedshard.display import make_console, require_packages

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}
# When a rank dies the others fail as well, and may be heard first: so long is waited for all
# reasons before the earliest is reported.
REASONS_TIMEOUT_S = 1.0


class RankFailed(RuntimeError):
    """A rank died or raised; `details` is its traceback, where there is one."""

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class Step:
    """Sent by rank 0 after each step."""

    variant: str
    step: int
    loss: float


@dataclass(frozen=True)
class Result:
    """Sent by every rank at its end: what `run_variants` returned."""

    report: dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """Why a rank has none to send. `when` is in seconds, and 0 for one that said nothing."""

    when: float
    reason: str
    details: str = ""


@dataclass(frozen=True)
class Rank:
    index: int
    process: SpawnProcess
    pipe: Connection


# -- the command ----------------------------------------------------------------------------------


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `demo` to the subcommands."""
    parser = commands.add_parser(
        "demo",
        help="train a small GPT on several ranks four ways, and compare their optimizer states",
        description="Train the same small GPT on several CPU ranks four ways (DDP, replicated, "
        "sharded, and with a classic mistake), compare time, memory and optimizer state, and "
        "check that each is what it must be. Exits with 1 if one is not.",
    )
    parser.add_argument(
        "--ranks", type=_at_least(2), default=Settings.ranks, metavar="N",
        help="processes to train on, at least 2 since ranks are compared (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=_at_least(2), default=Settings.steps, metavar="K",
        help="training steps of each of the four (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=_at_least(0), default=Settings.seed, metavar="S",
        help="of the initial weights and of the batches (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), default=Settings.dtype,
        help="of the parameters; bf16 ones have master weights (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--state-dtype", choices=tuple(STATE_DTYPES), default=Settings.state_dtype,
        help="of fusedshard's moments (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=_writable_folder, metavar="DIR",
        help="write report.json and report.png into this folder",
    )  # fmt: skip
    parser.set_defaults(run=run)


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"got {text!r}, wanted an integer, at least {least}")
        return value

    return parse


def _writable_folder(text: str) -> Path:
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, wanted a folder that can be written to: {error.strerror}"
        ) from None
    return folder


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and return its exit status: 0, 1, or 130 after Ctrl-C."""
    names = ("ranks", "steps", "seed", "dtype", "state_dtype")
    settings = Settings(**{name: getattr(arguments, name) for name in names})
    try:
        require_packages("rich", *(["matplotlib"] if arguments.out else []))
        report = train_and_report(settings, arguments.out)
    except (RankFailed, ModuleNotFoundError, FileNotFoundError) as error:
        print(getattr(error, "details", ""), end="", file=sys.stderr)
        print(f"fusedshard demo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fusedshard demo: interrupted, all ranks ended", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0 if report["ok"] else 1


def train_and_report(settings: Settings, out: Path | None) -> dict[str, Any]:
    started = time.perf_counter()
    text = load_corpus(standard_library())  # each rank reads it again: this finds errors early
    console = make_console()
    console.print(demo_report.headline(settings, len(text), threads_per_rank(settings.ranks)))
    with sigterm_as_exit(), progress(console, settings) as on_step:
        rank_reports = run_ranks(settings, on_step)
    report = demo_report.summarize(
        settings, rank_reports, threads_per_rank(settings.ranks), time.perf_counter() - started
    )
    demo_report.show(report, console)
    if out is not None:
        demo_report.write(report, out)
        console.out(f"wrote {out / 'report.json'} and {out / 'report.png'}")
    return report


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that the ranks end with this process."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def progress(console: Console, settings: Settings) -> Iterator[Callable[[Step], None]]:
    """Show each `Step`: bars on a terminal, else a line for each variant that is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description:10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        yield _step_printer(bars, console, settings)


def _step_printer(bars: Progress, console: Console, settings: Settings) -> Callable[[Step], None]:
    tasks = {variant: bars.add_task(variant, total=settings.steps, loss="") for variant in VARIANTS}

    def on_step(message: Step) -> None:
        loss = f"loss {message.loss:.3f} on rank 0"
        bars.update(tasks[message.variant], completed=message.step, loss=loss)
        if message.step == settings.steps and not console.is_terminal:
            console.print(f"{message.variant}: {message.step} steps, {loss}")

    return on_step


# -- ranks ----------------------------------------------------------------------------------------


def threads_per_rank(ranks: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def run_ranks(settings: Settings, on_step: Callable[[Step], None]) -> list[dict[str, Any]]:
    """Run `run_variants` on ranks of our own and return what each found, in rank order.

    However this ends, no rank outlives it.

    Raises:
        RankFailed: a rank died or raised; says which, and why.
    """
    with tempfile.TemporaryDirectory(prefix="fusedshard-demo-") as folder:
        ranks: list[Rank] = []
        try:
            with temporary_files_in(folder):
                start_ranks(ranks, settings, str(Path(folder) / "rendezvous"))
            return follow(ranks, on_step)
        finally:
            for rank in ranks:
                rank.process.kill()
            for rank in ranks:
                rank.process.join()


@contextmanager
def temporary_files_in(folder: str) -> Iterator[None]:
    """For processes that are started inside: what torch makes in them as it is imported would else
    stay behind where they are killed."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def start_ranks(ranks: list[Rank], settings: Settings, store_path: str) -> None:
    """Append every rank as it starts."""
    context = torch.multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # would unblock signals if it were started below
    with deferred_signals():
        for index in range(settings.ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=run_rank, args=(index, settings, store_path, sender), daemon=True
            )
            process.start()
            sender.close()  # the rank's is then the only one, and its death reads as end of file
            ranks.append(Rank(index, process, receiver))


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Deliver the stop signals that arrive inside at the end; processes started inside inherit
    them blocked.

    A rank interrupted half started or while it imports would print a traceback: it unblocks them
    in `run_rank`. Blocking is not enough here, since another thread may take a signal, upon which
    Python runs the handler in this one.
    """
    arrived: list[int] = []
    handlers = {
        stop: signal.signal(stop, lambda number, _: arrived.append(number)) for stop in STOP_SIGNALS
    }
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        for stop, handler in handlers.items():
            signal.signal(stop, handler)
    for number in arrived:
        signal.raise_signal(number)


def run_rank(index: int, settings: Settings, store_path: str, pipe: Connection) -> None:
    """The body of rank `index`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it at once, also inside a collective
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        pipe.send(Result(_train_in_group(index, settings, store_path, pipe)))
    except Exception as error:
        reason = f"failed: {type(error).__name__}: {error}"
        pipe.send(Failure(time.time(), reason, traceback.format_exc()))
        os._exit(1)  # an orderly exit could wait for the other ranks for ever


def _exit_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _train_in_group(
    index: int, settings: Settings, store_path: str, pipe: Connection
) -> dict[str, Any]:
    torch.set_num_threads(threads_per_rank(settings.ranks))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    store = dist.FileStore(store_path, settings.ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=index, world_size=settings.ranks)

    def on_step(variant: str, step: int, loss: float) -> None:
        if index == 0:
            pipe.send(Step(variant, step, loss))

    report = run_variants(settings, load_corpus(standard_library()), on_step)
    dist.destroy_process_group()
    return report


def follow(ranks: Sequence[Rank], on_step: Callable[[Step], None]) -> list[dict[str, Any]]:
    """Pass on every `Step` until all ranks have sent their result, and return these in rank order.

    Raises:
        RankFailed: at least one has not; its reason is the one that came first.
    """
    waiting: dict[Any, Rank] = {rank.pipe: rank for rank in ranks}
    reports: dict[int, dict[str, Any]] = {}
    failures: dict[int, Failure] = {}
    deadline: float | None = None
    while waiting and (deadline is None or time.monotonic() < deadline):
        for pipe in wait(list(waiting), timeout=REASONS_TIMEOUT_S if failures else None):
            rank = waiting[pipe]
            message = receive(rank)
            if isinstance(message, Step):
                on_step(message)
                continue
            del waiting[pipe]
            if isinstance(message, Result):
                reports[rank.index] = message.report
            else:
                failures[rank.index] = message
                deadline = deadline or time.monotonic() + REASONS_TIMEOUT_S
    if failures:
        index, failure = min(failures.items(), key=lambda item: item[1].when)
        raise RankFailed(f"rank {index} of {len(ranks)} {failure.reason}", failure.details)
    return [reports[rank.index] for rank in ranks]


def receive(rank: Rank) -> Step | Result | Failure:
    """The rank's next message; a `Failure` where it has died."""
    try:
        message: Step | Result | Failure = rank.pipe.recv()
        return message
    except (EOFError, OSError):
        rank.process.join(REASONS_TIMEOUT_S)
        return Failure(0.0, describe_exit(rank.process.exitcode))


def describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code} and without a result"
