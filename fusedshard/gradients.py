"""From every rank's own gradients to their mean: packing, exchange, and where the mean goes.

::

    p.grad of each parameter --pack--> send lane --exchange--> N chunks --mean--> destination

The wire buffer is never ``p.grad`` itself. Two lanes take turns: bucket i is finished before
bucket i+2 is packed, so memory stays bounded and one exchange runs while the next is packed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from fusedshard import kernels
from fusedshard.comm import Communicator
from fusedshard.flat import BucketMemory
from fusedshard.transport import Pending

LANES = 2


@dataclass
class Lane:
    """A send and a receive buffer, grown to the largest bucket they have carried."""

    memory: dict[str, torch.Tensor] = field(default_factory=dict)

    def buffer(self, name: str, numel: int, like: torch.Tensor) -> torch.Tensor:
        """``numel`` elements of the dtype and on the device of ``like``."""
        nbytes = numel * like.dtype.itemsize
        if name not in self.memory or self.memory[name].numel() < nbytes:
            self.memory[name] = kernels.flat_memory(nbytes, torch.uint8, like.device)
        return self.memory[name][:nbytes].view(like.dtype)

    def nbytes(self, name: str) -> int:
        return self.memory[name].numel() if name in self.memory else 0


@dataclass
class InFlight:
    """A bucket whose exchange was started."""

    bucket: BucketMemory
    send: torch.Tensor
    chunks: list[torch.Tensor]
    pending: Pending


class GradientReducer:
    """Averages gradients over the ranks of a group.

    Args:
        comm: the group.
        ordered: True: the mean is ``(g_0 + g_1 + ...) / N``, added in rank order by our kernel,
            so it depends neither on the bucket size nor on the backend. False: the backend's
            ReduceScatter or AllReduce adds, in an order of its own.

    Buckets' ``packing`` tables must point at this rank's gradients and be uploaded; a parameter
    without one counts as zero.
    """

    def __init__(self, comm: Communicator, *, ordered: bool) -> None:
        self._comm = comm
        self._ordered = ordered
        self.lanes = [Lane() for _ in range(LANES)]

    @property
    def shard_scale(self) -> float:
        """What turns a shard that `reduce_to_shards` left into the mean: the update multiplies by
        it, which spares a pass over the backend's sum."""
        return 1.0 if self._ordered else 1.0 / self._comm.world_size

    def reduce_to_shards(self, buckets: Sequence[BucketMemory]) -> None:
        """Leave what this rank owns in each bucket's ``reduced``: the mean once multiplied by
        `shard_scale`. Collective.

        Args:
            buckets: the same on every rank; each has a ``reduced`` array.
        """
        self._run(buckets, self._start_shard, self._finish_shard)

    def reduce_in_place(self, buckets: Sequence[BucketMemory]) -> None:
        """Overwrite each gradient by the mean, as DDP does. Collective."""
        self._run(buckets, self._start_full, self._finish_full)

    def _run(
        self,
        buckets: Sequence[BucketMemory],
        start: Callable[[InFlight, Lane], None],
        finish: Callable[[InFlight], None],
    ) -> None:
        flights: deque[InFlight] = deque()
        for index, bucket in enumerate(buckets):
            if len(flights) == LANES:
                finish(flights.popleft())
            lane = self.lanes[index % LANES]
            flight = self._pack(bucket, lane)
            start(flight, lane)
            flights.append(flight)
        while flights:
            finish(flights.popleft())

    def _pack(self, bucket: BucketMemory, lane: Lane) -> InFlight:
        send = lane.buffer("send", bucket.layout.numel, bucket.param)
        kernels.pack_(send, bucket.packing)
        return InFlight(bucket, send, [], Pending())

    def _start_shard(self, flight: InFlight, lane: Lane) -> None:
        if self._ordered:
            self._start_exchange(flight, lane)
        else:
            assert flight.bucket.reduced is not None
            flight.pending = self._comm.reduce_scatter(flight.send, flight.bucket.reduced)

    def _finish_shard(self, flight: InFlight) -> None:
        flight.pending.wait()
        reduced = flight.bucket.reduced
        assert reduced is not None
        if self._ordered:
            kernels.mean_(reduced, flight.chunks)

    def _start_full(self, flight: InFlight, lane: Lane) -> None:
        if self._ordered:
            self._start_exchange(flight, lane)
        else:
            flight.pending = self._comm.all_reduce_(flight.send)

    def _finish_full(self, flight: InFlight) -> None:
        flight.pending.wait()
        send = flight.send
        if self._ordered:
            # All sends are done, so the buffer can take the mean and be gathered in place.
            own = send.split(send.numel() // self._comm.world_size)[self._comm.rank]
            kernels.mean_(own, flight.chunks)
            self._comm.all_gather_(send).wait()
        else:
            send.div_(self._comm.world_size)
        kernels.unpack_(send, flight.bucket.packing)

    def _start_exchange(self, flight: InFlight, lane: Lane) -> None:
        send = flight.send
        count = self._comm.received_chunks(send.device)
        receive = lane.buffer("receive", flight.bucket.layout.shard_numel * count, send)
        flight.chunks, flight.pending = self._comm.exchange_chunks(flight.send, receive)
