"""How buckets move between ranks: one class for each way, over 1-D tensors of N equal parts.

Which of torch's ways is used where is decided by measurement (benchmarks/bench_comm.py). On gloo a
bucket is exchanged by pairs of isend and irecv: at 25 and 64 MiB they beat gloo's own
ReduceScatter by 2.5 to 3.7 times and its AllGather by 1.3 to 2.9, and are about level with its
all-to-all and broadcasts. NCCL's own collectives are used as they are.

Whatever is handed to a transport must stay as it is until the result was waited for. On a GPU
`Pending.wait` orders the current stream behind the collective and does not hold the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from fusedshard.dense import Chunks
from fusedshard.pending import Pending, explaining

# torch 2.13 renamed both, and warns of the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Channel(NamedTuple):
    """One optimizer's part of the gloo connections that all optimizers on a group share.

    Messages between two ranks arrive in the order in which they were sent, for each tag. Every
    optimizer has tags of its own, and each kind of message, since the buckets of two optimizers
    may be started in another order on each rank, as may a bucket and the gathering of an earlier
    one. And where ranks are in different calls, messages of different sizes must not meet: gloo
    would end the process.

    Attributes:
        gloo: a ProcessGroupGloo over the ranks.
        number: of the optimizer, the same on every rank.
    """

    gloo: Any
    number: int

    def tag(self, kind: int) -> int:
        return self.number * len(_KINDS) + kind


_KINDS = EXCHANGE, GATHER, STATUS, SIZES, OBJECTS, FINGERPRINTS = 0, 1, 2, 3, 4, 5


class Transport(Protocol):
    """Collectives over the ranks of one group. All are collective.

    Attributes:
        prefers_ordered: whether adding the chunks ourselves is the faster way, too.
    """

    prefers_ordered: bool

    @staticmethod
    def received_chunks(world_size: int) -> int:
        """Chunks that `exchange_chunks` wants room for."""

    def overlaps(self, *, ordered: bool) -> bool:
        """Whether backward may start exchanges of gradients, added by us or by the backend."""

    def exchange_chunks(self, send: torch.Tensor, receive: torch.Tensor) -> tuple[Chunks, Pending]:
        """Chunk r of ``send`` goes to rank r; the chunks meant for this rank, in rank order."""

    def all_gather_(self, flat: torch.Tensor) -> Pending:
        """This rank's part of ``flat`` to all others, in place."""

    def reduce_scatter(self, send: torch.Tensor, out: torch.Tensor) -> Pending:
        """The sum of this rank's part of ``send`` into ``out``."""

    def all_reduce_(self, buffer: torch.Tensor) -> Pending:
        """The sum, in place."""

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> None:
        """The values of rank ``source``, in place."""


class GlooPairs:
    """CPU tensors over gloo connections of our own.

    Args:
        channel: the part of them that is this optimizer's.
    """

    prefers_ordered = True

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._gloo = channel.gloo
        self._rank, self._world_size = self._gloo.rank(), self._gloo.size()

    @staticmethod
    def received_chunks(world_size: int) -> int:
        return world_size - 1

    def overlaps(self, *, ordered: bool) -> bool:
        # gloo's own collectives have no tags, so those of two optimizers would be mistaken.
        return ordered

    @property
    def _peers(self) -> list[int]:
        """The other ranks, beginning after this one, so that not all send to the same first."""
        return [(self._rank + i) % self._world_size for i in range(1, self._world_size)]

    def exchange_chunks(
        self, send: torch.Tensor, receive: torch.Tensor
    ) -> tuple[list[torch.Tensor], Pending]:
        length = send.numel() // self._world_size
        chunks = list(send.split(length))
        arriving = dict(zip(self._peers, receive.split(length), strict=True))
        pending = self._send_and_receive(EXCHANGE, chunks, arriving)
        arriving[self._rank] = chunks[self._rank]
        return [arriving[rank] for rank in range(self._world_size)], pending

    def all_gather_(self, flat: torch.Tensor, kind: int = GATHER) -> Pending:
        parts = flat.split(flat.numel() // self._world_size)
        own = [parts[self._rank]] * self._world_size
        return self._send_and_receive(kind, own, {peer: parts[peer] for peer in self._peers})

    def _send_and_receive(
        self, kind: int, leaving: Sequence[torch.Tensor], arriving: Mapping[int, torch.Tensor]
    ) -> Pending:
        tag = self._channel.tag(kind)
        with explaining():
            works = [self._gloo.recv([arriving[peer]], peer, tag) for peer in self._peers]
            works += [self._gloo.send([leaving[peer]], peer, tag) for peer in self._peers]
        return Pending(works)

    def reduce_scatter(self, send: torch.Tensor, out: torch.Tensor) -> Pending:
        return Pending([self._gloo._reduce_scatter_base(out, send)])

    def all_reduce_(self, buffer: torch.Tensor) -> Pending:
        return Pending([self._gloo.allreduce([buffer])])

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> None:
        self._gloo.broadcast(tensor, source).wait()


class StagedPairs:
    """Tensors of a device that gloo does not reach, by way of host memory.

    For tests and odd machines, since every call waits for the device.

    Args:
        pairs: moves the copies.
        world_size: ranks.
        rank: this one.
    """

    prefers_ordered = True

    def overlaps(self, *, ordered: bool) -> bool:
        return False

    def __init__(self, pairs: GlooPairs, world_size: int, rank: int) -> None:
        self._pairs = pairs
        self._world_size, self._rank = world_size, rank

    @staticmethod
    def received_chunks(world_size: int) -> int:
        return world_size  # so that the chunks lie at equal distances on the device

    def exchange_chunks(
        self, send: torch.Tensor, receive: torch.Tensor
    ) -> tuple[torch.Tensor, Pending]:
        host_send = _host_copy(send)
        arriving = self._pairs.received_chunks(self._world_size)
        room = send.numel() // self._world_size * arriving
        chunks, pending = self._pairs.exchange_chunks(host_send, host_send.new_empty(room))

        def finish() -> None:
            pending.wait()
            receive.copy_(torch.cat(chunks))

        return receive.view(self._world_size, -1), Pending(then=finish)

    def all_gather_(self, flat: torch.Tensor) -> Pending:
        return self._in_place(self._pairs.all_gather_, flat)

    def reduce_scatter(self, send: torch.Tensor, out: torch.Tensor) -> Pending:
        host_out = out.new_empty(out.size(), device="cpu")
        pending = self._pairs.reduce_scatter(_host_copy(send), host_out)

        def finish() -> None:
            pending.wait()
            out.copy_(host_out)

        return Pending(then=finish)

    def all_reduce_(self, buffer: torch.Tensor) -> Pending:
        return self._in_place(self._pairs.all_reduce_, buffer)

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> None:
        host = _host_copy(tensor)
        self._pairs.broadcast_(host, source)
        tensor.copy_(host)

    def _in_place(
        self, collective: Callable[[torch.Tensor], Pending], tensor: torch.Tensor
    ) -> Pending:
        host = _host_copy(tensor)
        pending = collective(host)

        def finish() -> None:
            pending.wait()
            tensor.copy_(host)

        return Pending(then=finish)


class GroupCollectives:
    """The collectives of the given group's own backend, as NCCL has them.

    They run on the backend's stream behind what the current stream holds already.

    Args:
        group: the process group.
    """

    prefers_ordered = False

    def overlaps(self, *, ordered: bool) -> bool:
        return True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)

    @staticmethod
    def received_chunks(world_size: int) -> int:
        return world_size

    def exchange_chunks(
        self, send: torch.Tensor, receive: torch.Tensor
    ) -> tuple[torch.Tensor, Pending]:
        work = dist.all_to_all_single(receive, send, group=self._group, async_op=True)
        # As one tensor: at thousands of ranks that many of their own would take long to make.
        return receive.view(self._world_size, -1), Pending([work], holds_host=False)

    def all_gather_(self, flat: torch.Tensor) -> Pending:
        length = flat.numel() // self._world_size
        own = flat.narrow(0, self._rank * length, length)
        work = _all_gather(flat, own, group=self._group, async_op=True)
        return Pending([work], holds_host=False)

    def reduce_scatter(self, send: torch.Tensor, out: torch.Tensor) -> Pending:
        # SUM, and the kernel divides: AVG is not there for every backend and dtype.
        work = _reduce_scatter(out, send, op=dist.ReduceOp.SUM, group=self._group, async_op=True)
        return Pending([work], holds_host=False)

    def all_reduce_(self, buffer: torch.Tensor) -> Pending:
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        return Pending([work], holds_host=False)

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> None:
        dist.broadcast(tensor, dist.get_global_rank(self._group, source), group=self._group)


def choose_transport(group: dist.ProcessGroup, channel: Channel, device: torch.device) -> Transport:
    """The way for tensors of a device: the group's own backend for it, unless that is gloo."""
    pairs = GlooPairs(channel)
    if device.type == "cpu":
        return pairs
    if _backend_name(group, device) == "gloo":
        return StagedPairs(pairs, channel.gloo.size(), channel.gloo.rank())
    return GroupCollectives(group)


def _backend_name(group: Any, device: torch.device) -> str:
    """The group's backend for a device; gloo, which we have ourselves, where it has none."""
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:
        return "gloo"


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)
