"""Ranks that are new processes for each piece of work, so that none inherits another's memory.

They are forked off one process that has imported torch, and cost a tenth of a second each.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

# What of torch takes long to import. Of nothing else, since that process also imports from the
# folder that it is started in.
PRELOADED = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.optim"]


@dataclass(frozen=True)
class Place:
    """Of a rank.

    Attributes:
        meeting: the file, or host and port of torchrun's store, where the ranks meet.
        run: distinguishes those who meet at one store one after another.
        device: what it trains on.
    """

    rank: int
    ranks: int
    meeting: Path | tuple[str, int]
    run: int
    device: str

    def store(self) -> Store:
        if isinstance(self.meeting, Path):
            return PrefixStore(str(self.run), FileStore(str(self.meeting), -1))
        return PrefixStore(f"fresh{self.run}", TCPStore(*self.meeting, is_master=False))


class FreshRanks:
    """The ranks of a job that this process starts: all of them, or under torchrun one.

    Args:
        own: their numbers.
        ranks: all.
        meeting: where they meet.
        device: what each trains on.
    """

    def __init__(
        self, own: Sequence[int], ranks: int, meeting: Path | tuple[str, int], device: str
    ) -> None:
        self.own, self.ranks, self.device = own, ranks, device
        self._meeting = meeting
        self._runs = 0

    @property
    def reports(self) -> bool:
        """Whether this process speaks for all."""
        return 0 in self.own

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """`work(device, *args)` on new ranks of a default group: the first one's result.

        `work` is collective, as is this call: every process of the job makes the same ones.
        """
        self._runs += 1
        # Its environment is that of the first call.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        processes, pipes = [], []
        for rank in self.own:
            ours, theirs = context.Pipe()
            place = Place(rank, self.ranks, self._meeting, self._runs, self.device)
            process = context.Process(target=_be, args=(place, theirs, work, args), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            return _answers(pipes)[0]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answers(pipes: Sequence[Connection]) -> list[Any]:
    """Of every rank; raises what the first to fail raised."""
    answers: dict[Any, Any] = {}
    while len(answers) < len(pipes):
        for pipe in wait([pipe for pipe in pipes if pipe not in answers]):
            assert isinstance(pipe, Connection)
            try:
                good, answers[pipe] = pipe.recv()
            except EOFError:
                good, answers[pipe] = False, "the process died"
            if not good:
                raise RuntimeError(f"rank {pipes.index(pipe)}: {answers[pipe]}")
    return [answers[pipe] for pipe in pipes]


def _be(place: Place, pipe: Connection, work: Callable[..., Any], args: Any) -> NoReturn:
    """Ends without an orderly exit once all ranks are done: while gloo's threads of one rank wind
    up, the teardown in another now and then aborts (terminate called without an active
    exception)."""
    status = 0
    try:
        backend = "gloo"
        if place.device != "cpu":
            torch.cuda.set_device(place.device)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend, store=place.store(), rank=place.rank, world_size=place.ranks
        )
        answer = work(place.device, *args)
        dist.barrier()
        pipe.send((True, answer))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def ranks_here(count: int) -> Iterator[FreshRanks]:
    """CPU ranks that this process starts."""
    # Ranks on one machine talk over loopback, whatever its host name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        yield FreshRanks(range(count), count, Path(folder) / "store", "cpu")


def run_ranks(count: int, work: Callable[..., Any], *args: Any) -> Any:
    """`work(*args)` on so many CPU ranks: the first one's result."""
    with ranks_here(count) as ranks:
        return ranks.run(_without_device, work, args)


def _without_device(_: str, work: Callable[..., Any], args: Sequence[Any]) -> Any:
    return work(*args)


def rank_of_torchrun() -> FreshRanks:
    """The one that this process is: on its GPU, where the machine has any."""
    environment = os.environ
    device = f"cuda:{environment['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    meeting = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return FreshRanks([int(environment["RANK"])], int(environment["WORLD_SIZE"]), meeting, device)
