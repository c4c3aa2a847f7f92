"""The ranks' communication: the only module that calls torch.distributed collectives.

Which of torch's ways to move data is used on a backend is decided here, by measurement
(benchmarks/bench_comm.py). On gloo a bucket is exchanged by pairs of isend and irecv: at 25 and
64 MiB they beat gloo's own ReduceScatter by 2.6 to 3.3 times and its AllGather by 1.3 to 3.3, and
are about level with its all-to-all and broadcasts.

Each group that an optimizer is given gets gloo connections of its own beside it: sockets to every
peer and two threads, shared by all optimizers on that group.
"""

from __future__ import annotations

import datetime
import uuid
import weakref
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fusedshard.stats import Stats

T = TypeVar("T")

# Kinds of errors that every rank raises as they are; others become RuntimeError.
_SHARED_ERRORS = {kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError)}

# Our own gloo connections beside each group we were given, so that buckets never interleave with
# the user's collectives. Kept while the given group lives: they cost a rendezvous and threads.
_connections: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

_TAG = 0  # messages between two ranks arrive in the order in which they were sent


class Waitable(Protocol):
    def wait(self) -> Any: ...


class Pending:
    """A collective that was started: `wait` returns when its results may be used."""

    def __init__(self, works: Sequence[Waitable | None] = ()) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()


class Communicator:
    """Collectives over the ranks of one data-parallel group.

    Args:
        process_group: the group; None means the default group, or a world of one rank where
            torch.distributed was not initialized.
        stats: where collectives and bytes are counted.

    Constructing it is collective over the group. Every method is, too, and must be called by
    all its ranks in the same order.

    Raises:
        TypeError: ``process_group`` is not a process group.
        ValueError: this rank is not in it.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, stats: Stats) -> None:
        self.stats = stats
        self.process_group = process_group
        self.rank, self.world_size = 0, 1
        self._given = _given_group(process_group)
        if self._given is None:
            return
        self.rank, self.world_size = dist.get_rank(self._given), dist.get_world_size(self._given)
        if self.world_size > 1:
            self._gloo = _connect(self._given)

    def check_world(self) -> None:
        """Raise RuntimeError where torch.distributed came up only after a world of one rank was
        assumed: the ranks would train apart."""
        if self._given is None:
            given = _given_group(self.process_group)
            if given is not None and dist.get_world_size(given) > 1:
                raise RuntimeError(
                    "process_group: the optimizer was built before init_process_group, for one "
                    "rank: build it afterwards"
                )

    @property
    def peers(self) -> list[int]:
        """The other ranks, beginning after this one, so that not all send to the same first."""
        return [(self.rank + i) % self.world_size for i in range(1, self.world_size)]

    def exchange_chunks(
        self, send: torch.Tensor, receive: torch.Tensor
    ) -> tuple[list[torch.Tensor], Pending]:
        """Start an all-to-all: chunk r of ``send`` goes to rank r.

        Args:
            send: 1-D, N equal chunks; must stay as it is until the result was waited for.
            receive: 1-D, room for N-1 chunks.

        Returns:
            The N chunks meant for this rank, in rank order (its own lies in ``send``), and the
            handle to wait for before reading them.
        """
        length = send.numel() // self.world_size
        chunks = list(send.split(length))
        arriving = dict(zip(self.peers, receive.split(length), strict=True))
        works = [self._gloo.recv([arriving[peer]], peer, _TAG) for peer in self.peers]
        works += [self._gloo.send([chunks[peer]], peer, _TAG) for peer in self.peers]
        self.stats.count("all_to_all", self._bytes_of_others(send))
        arriving[self.rank] = chunks[self.rank]
        return [arriving[rank] for rank in range(self.world_size)], Pending(works)

    def all_gather_(self, flat: torch.Tensor) -> Pending:
        """Start an all-gather in place: ``flat`` is 1-D, N equal parts, of which this rank's is
        filled in and the others are overwritten."""
        parts = flat.split(flat.numel() // self.world_size)
        works = [self._gloo.recv([parts[peer]], peer, _TAG) for peer in self.peers]
        works += [self._gloo.send([parts[self.rank]], peer, _TAG) for peer in self.peers]
        self.stats.count("all_gather", self._bytes_of_others(flat))
        return Pending(works)

    def reduce_scatter(self, send: torch.Tensor, out: torch.Tensor) -> Pending:
        """Start the backend's own ReduceScatter (sum) of ``send`` (1-D, N equal parts) into
        ``out`` (one part)."""
        self.stats.count("reduce_scatter", self._bytes_of_others(send))
        return Pending([self._gloo._reduce_scatter_base(out, send)])

    def all_reduce_(self, buffer: torch.Tensor) -> Pending:
        """Start the backend's own AllReduce (sum) in place."""
        self.stats.count("all_reduce", 2 * self._bytes_of_others(buffer))
        return Pending([self._gloo.allreduce([buffer])])

    def broadcast_(self, tensor: torch.Tensor) -> None:
        """Overwrite ``tensor`` by that of the group's first rank."""
        if self.world_size == 1:
            return
        self.stats.count("broadcast", tensor.nbytes if self.rank == 0 else 0)
        self._gloo.broadcast(tensor, 0).wait()

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """A small all-gather: ``row`` is 1-D, the result (N, len(row)) in rank order."""
        rows = row.new_empty(self.world_size * row.numel())
        self.stats.count("status", (self.world_size - 1) * row.nbytes)
        self._gloo._allgather_base(rows, row).wait()
        return rows.view(self.world_size, -1)

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's ``value`` (picklable), in rank order."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._given)
        return values

    def raise_everywhere(self, error: Exception | None) -> None:
        """Raise on every rank if any rank brings an error: its own on the rank that has one, on
        the others one of the same kind that quotes the first rank's."""
        raise_shared(error, self.gather_objects(describe_error(error)))

    def _bytes_of_others(self, buffer: torch.Tensor) -> int:
        return buffer.nbytes // self.world_size * (self.world_size - 1)


def describe_error(error: Exception | None) -> tuple[str, str] | None:
    """Kind and text of an error, to send to the other ranks."""
    return None if error is None else (type(error).__name__, str(error))


def raise_shared(error: Exception | None, descriptions: Sequence[tuple[str, str] | None]) -> None:
    """Raise ``error``, or where this rank has none the first that another rank described."""
    if error is not None:
        raise error
    for rank, description in enumerate(descriptions):
        if description is not None:
            kind, text = description
            raise _SHARED_ERRORS.get(kind, RuntimeError)(f"on rank {rank}: {text}")


def _given_group(process_group: Any) -> Any:
    if process_group is None:
        initialized = dist.is_available() and dist.is_initialized()
        return dist.group.WORLD if initialized else None
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("process_group: this rank is not a member of it")
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"process_group: got {type(process_group).__name__}, wanted a ProcessGroup or None"
        )
    return process_group


def _connect(given: Any) -> Any:
    """A gloo backend of our own over the ranks of ``given``. Collective over these ranks only,
    which `torch.distributed.new_group` is not where ranks have created other groups before."""
    if given not in _connections:
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, dist.get_global_rank(given, 0), group=given)
        world_store = distributed_c10d._get_default_store()
        store = distributed_c10d.PrefixStore(f"fusedshard/{name[0]}", world_store)
        rank, size = dist.get_rank(given), dist.get_world_size(given)
        _connections[given] = dist.ProcessGroupGloo(store, rank, size, timeout=_timeout_of(given))
    return _connections[given]


def _timeout_of(group: Any) -> datetime.timedelta:
    """The timeout the user chose for ``group``, else torch's default."""
    try:
        return group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        # No CPU backend in it (NCCL only), or a debug wrapper around it.
        return distributed_c10d.default_pg_timeout
