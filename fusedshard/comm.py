"""The ranks' communication: what they agree on, and buckets by `fusedshard.transport`. Nothing
else calls torch.distributed.

Each group that an optimizer is given gets gloo connections of its own beside it: sockets to every
peer and two threads, shared by all optimizers on that group. They carry what the ranks agree on,
which lies in host memory, whatever backend the group has; and CPU tensors.
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import pickle
import weakref
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fusedshard.dense import Chunks
from fusedshard.pending import Pending
from fusedshard.stats import Stats
from fusedshard.transport import (
    FINGERPRINTS,
    OBJECTS,
    SIZES,
    STATUS,
    Channel,
    GlooPairs,
    Transport,
    choose_transport,
)

T = TypeVar("T")

# Kinds of errors that every rank raises as they are; others become RuntimeError.
_SHARED_ERRORS = {kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError)}

# Our own gloo connections beside each group we were given, so that buckets never interleave with
# the user's collectives. Kept while the given group lives: they cost a rendezvous and threads.
_connections: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
# How many optimizers have used each, copies of optimizers apart.
_channels: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

# Numbers of optimizers, and of copies behind them: six tags for each stay below 1 << 31.
_MOST_OPTIMIZERS, _MOST_COPIES = 1 << 20, 1 << 28
# Audits have no optimizer's tags, and nothing of them is on its way when one has ended.
_AUDITS = _MOST_OPTIMIZERS - 1


class Communicator:
    """Collectives over the ranks of one data-parallel group.

    Args:
        process_group: the group; None means the default group, or a world of one rank where
            torch.distributed was not initialized.
        stats: where collectives and bytes are counted.
        number: of the optimizer, the same on every rank; None: the next that is free.

    Constructing it is collective over the group. Every method is, too, and must be called by
    all its ranks in the same order.

    Raises:
        TypeError: ``process_group`` is not a process group.
        ValueError: this rank is not in it.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None, stats: Stats, number: int | None = None
    ) -> None:
        self.stats = stats
        self.process_group = process_group
        self.rank, self.world_size = 0, 1
        self._copies = 0
        self._given = _given_group(process_group)
        if self._given is None:
            return
        self.rank, self.world_size = dist.get_rank(self._given), dist.get_world_size(self._given)
        if self.world_size > 1:
            gloo = _connect(self._given)
            number = _next_number(self._given, gloo) if number is None else number
            self._open(Channel(gloo, number))

    @classmethod
    def for_audit(cls, process_group: dist.ProcessGroup | None) -> Communicator:
        """One that all audits over a group share. Collective where the group has no connections
        of ours yet."""
        return cls(process_group, Stats(), _AUDITS)

    def for_copy(self, stats: Stats) -> Communicator:
        """One for a copy of the optimizer, over the same connections. Without communication: the
        ranks agree on its tags if all have made as many copies of this optimizer."""
        twin = copy.copy(self)
        twin.stats, twin._copies = stats, 0
        if self.world_size > 1:
            self._copies += 1
            place = f"{self._channel.number}/{self._copies}".encode()
            number = _MOST_OPTIMIZERS + zlib.crc32(place) % _MOST_COPIES
            twin._open(self._channel._replace(number=number))
        return twin

    def _open(self, channel: Channel) -> None:
        self._channel = channel
        self._control = GlooPairs(channel)
        self._transports: dict[str, Transport] = {}

    @property
    def number(self) -> int:
        """Of the optimizer among those on its group: the same on every rank."""
        return self._channel.number

    @property
    def ranks(self) -> list[int]:
        """The group's, by their numbers in the default group."""
        return [0] if self._given is None else dist.get_process_group_ranks(self._given)

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

    def received_chunks(self, device: torch.device) -> int:
        """Chunks that `exchange_chunks` wants room for in ``receive``, of tensors on ``device``."""
        return self._on(device).received_chunks(self.world_size)

    def prefers_ordered(self, device: torch.device) -> bool:
        """Whether on ``device`` adding gradients ourselves is no slower than the backend's way."""
        return self.world_size == 1 or self._on(device).prefers_ordered

    def overlaps(self, device: torch.device, *, ordered: bool) -> bool:
        """Whether backward may start exchanges of gradients, added by us or by the backend."""
        return self._on(device).overlaps(ordered=ordered)

    def exchange_chunks(self, send: torch.Tensor, receive: torch.Tensor) -> tuple[Chunks, Pending]:
        """Start an all-to-all: chunk r of ``send`` goes to rank r.

        Args:
            send: 1-D, N equal chunks; must stay as it is until the result was waited for.
            receive: 1-D, room for `received_chunks` chunks.

        Returns:
            The N chunks meant for this rank, in rank order (its own may lie in ``send``), and the
            handle to wait for before reading them.
        """
        self.stats.count("all_to_all", self._bytes_of_others(send))
        return self._on(send.device).exchange_chunks(send, receive)

    def all_gather_(self, flat: torch.Tensor) -> Pending:
        """Start an all-gather in place: ``flat`` is 1-D, N equal parts, of which this rank's is
        filled in and the others are overwritten."""
        self.stats.count("all_gather", self._bytes_of_others(flat))
        return self._on(flat.device).all_gather_(flat)

    def reduce_scatter(self, send: torch.Tensor, out: torch.Tensor) -> Pending:
        """Start the backend's own ReduceScatter (sum) of ``send`` (1-D, N equal parts) into
        ``out`` (one part)."""
        self.stats.count("reduce_scatter", self._bytes_of_others(send))
        return self._on(send.device).reduce_scatter(send, out)

    def all_reduce_(self, buffer: torch.Tensor) -> Pending:
        """Start the backend's own AllReduce (sum) in place."""
        self.stats.count("all_reduce", 2 * self._bytes_of_others(buffer))
        return self._on(buffer.device).all_reduce_(buffer)

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite ``tensor`` by that of one rank of the group, the first by default."""
        if self.world_size > 1:
            self.stats.count("broadcast", tensor.nbytes if self.rank == source else 0)
            self._on(tensor.device).broadcast_(tensor, source)

    def gather_fingerprints(self, row: torch.Tensor) -> torch.Tensor:
        """As `gather_rows`, of a 64-bit number for each of many tensors."""
        return self.gather_rows(row, FINGERPRINTS, "fingerprints")

    def gather_rows(
        self, row: torch.Tensor, kind: int = STATUS, name: str = "status"
    ) -> torch.Tensor:
        """A small all-gather: ``row`` is 1-D, the result (N, len(row)) in rank order. Rows of one
        ``kind`` have one length; they are counted under ``name``."""
        rows = row.new_empty(self.world_size, row.numel())
        rows[self.rank] = row
        self.stats.count(name, (self.world_size - 1) * row.nbytes)
        self._control.all_gather_(rows.view(-1), kind).wait()
        return rows

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's ``value`` (picklable), in rank order."""
        if self.world_size == 1:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = (
            self.gather_rows(torch.tensor([data.numel()], device="cpu"), SIZES).flatten().tolist()
        )
        padded = data.new_zeros(max(sizes))
        padded[: data.numel()] = data
        rows = self.gather_rows(padded, OBJECTS)
        return [
            pickle.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)
        ]

    def raise_everywhere(self, error: Exception | None) -> None:
        """Raise on every rank if any rank brings an error: its own on the rank that has one, on
        the others one of the same kind that quotes the first rank's."""
        raise_shared(error, self.gather_objects(describe_error(error)))

    def _on(self, device: torch.device) -> Transport:
        if device.type not in self._transports:
            chosen = choose_transport(self._given, self._channel, device)
            self._transports[device.type] = chosen
        return self._transports[device.type]

    def _bytes_of_others(self, buffer: torch.Tensor) -> int:
        return bytes_of_others(buffer.nbytes, self.world_size)


def bytes_of_others(nbytes: int, world_size: int) -> int:
    """Of a buffer of N equal parts, what all parts but one take."""
    return nbytes // world_size * (world_size - 1)


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


def _next_number(given: Any, gloo: Any) -> int:
    """Of an optimizer on ``given``. Collective over its ranks, which need not have made equally
    many before, as where one of them failed."""
    counts = torch.zeros(gloo.size(), dtype=torch.int64, device="cpu")
    gloo._allgather_base(counts, torch.tensor([_channels.get(given, 0)], device="cpu")).wait()
    number = int(counts.amax())
    _channels[given] = number + 1
    return number


def _connect(given: Any) -> Any:
    """A gloo backend of our own over the ranks of ``given``. Collective over these ranks only,
    which `torch.distributed.new_group` is not where ranks have created other groups before."""
    if given not in _connections:
        rank, size = dist.get_rank(given), dist.get_world_size(given)
        store = _store_for(given, rank)
        try:
            gloo = dist.ProcessGroupGloo(store, rank, size, timeout=_timeout_of(given))
        except RuntimeError as error:
            raise RuntimeError(
                f"process_group: rank {rank} cannot connect to the others over gloo, which carries "
                f"what ranks agree on: {error}. Where the host's name does not lead to an "
                "interface that they reach, set GLOO_SOCKET_IFNAME to one that they do"
            ) from error
        _connections[given] = gloo
    return _connections[given]


def _store_for(given: Any, rank: int) -> Any:
    """Where the ranks of a group find each other, and nobody else.

    Disjoint groups may share a name, and a store may outlive a group whose name comes again: so
    the place is named by the ranks, too, and by how many times each of them has come here.
    """
    ranks = repr(dist.get_process_group_ranks(given))
    name = f"fusedshard/{given.group_name}/{hashlib.sha256(ranks.encode()).hexdigest()[:16]}"
    store = distributed_c10d._get_default_store()
    turn = store.add(f"{name}/{rank}", 1)
    return distributed_c10d.PrefixStore(f"{name}/turn {turn}", store)


def _timeout_of(group: Any) -> datetime.timedelta:
    """The timeout the user chose for ``group``, else torch's default."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):
            continue  # no backend for this device, or a debug wrapper around it
    return distributed_c10d.default_pg_timeout
