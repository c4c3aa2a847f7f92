"""Real gloo ranks for tests: started once, then handed functions.

Importing torch costs seconds, so the processes stay, and those of other pools share one import. A
function for them must be importable by name (module level of a test module); its first argument is
a `Rank`.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

MAX_RANKS = 4
# Collectives that wait for a rank longer than this raise, in the ranks.
GROUP_TIMEOUT = datetime.timedelta(seconds=60)
# Beyond this a call of `RankPool.run` gives its ranks up.
CALL_TIMEOUT = 180.0
# More than a function creates.
GROUPS_OF_A_CALL = 100


@dataclass(frozen=True)
class Rank:
    """What a function on a rank gets: its number and its group of ``world_size`` ranks."""

    rank: int
    world_size: int
    group: dist.ProcessGroup


class RanksFailed(AssertionError):
    """Some ranks raised or never answered; the message holds their tracebacks."""


class RankPool:
    """`MAX_RANKS` processes in one gloo world; groups of the first 1, 2, ... of them.

    Args:
        scratch: where they meet.
        fresh: whether each imports torch itself, in this process's environment of the moment,
            instead of being forked off one process that has.
    """

    def __init__(self, scratch: Path, *, fresh: bool = False) -> None:
        self._scratch = scratch
        self._context: Any = multiprocessing.get_context("spawn" if fresh else "forkserver")
        self._started = self._calls = 0
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(rank, *args)`` on the first ``world_size`` ranks; results in order."""
        if not self._processes:
            self._start()
        self._calls += 1
        message = pickle.dumps((self._calls, world_size, function, args))
        for pipe in self._pipes[:world_size]:
            pipe.send_bytes(message)
        answers = self._collect(world_size)
        failures = [
            f"rank {rank}: {answers.get(rank, (False, 'no answer'))[1]}"
            for rank in range(world_size)
            if not answers.get(rank, (False, None))[0]
        ]
        if failures:
            # Ranks may be left inside different collectives: start afresh.
            self.stop()
            raise RanksFailed("\n".join(failures))
        return [answers[rank][1] for rank in range(world_size)]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        self._started += 1
        _start_server(self._context, self._scratch)
        rendezvous = self._scratch / f"rendezvous-{self._started}"
        for rank in range(MAX_RANKS):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(rank, f"file://{rendezvous}", theirs, sys.path), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, world_size: int) -> dict[int, tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {self._pipes[rank]: rank for rank in range(world_size)}
        while waiting:
            ready = wait(list(waiting), timeout=CALL_TIMEOUT)
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    answers[rank] = (False, "the process died")
        return answers


def _start_server(context: Any, folder: Path) -> None:
    """It imports from the folder that it is started in, too, which must not hold our sources."""
    context.set_forkserver_preload(["fusedshard"])
    before = Path.cwd()
    os.chdir(folder)
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(before)


def _serve(rank: int, init_method: str, pipe: Connection, path: list[str]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=init_method, rank=rank, world_size=MAX_RANKS, timeout=GROUP_TIMEOUT
    )
    groups = {
        size: dist.new_group(list(range(size)), timeout=GROUP_TIMEOUT)
        for size in range(1, MAX_RANKS + 1)
    }
    while True:
        try:
            call, world_size, function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        # A new group's name counts those before it, of which ranks that were left out know nothing.
        distributed_c10d._world.group_count = GROUPS_OF_A_CALL * call
        try:
            answer = (True, function(Rank(rank, world_size, groups[world_size]), *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
