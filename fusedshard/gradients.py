"""From every rank's own gradients to their mean: packing, exchange, and where the mean goes.

::

    p.grad of each parameter --pack--> send lane --exchange--> N chunks --mean--> destination

The wire buffer is never ``p.grad`` itself. Two lanes take turns: bucket i is finished before
bucket i+2 is packed, so memory stays bounded and one exchange runs while the next is packed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from fusedshard import kernels
from fusedshard.comm import Communicator
from fusedshard.flat import BucketMemory
from fusedshard.moments import Array
from fusedshard.pending import Pending

LANES = 2

# What happens to a bucket: each stage but the last ends with what has to arrive before the next.
Stages = Iterator[Pending]


def wire_arrays(
    bucket: Array, mean: torch.dtype, received: int, *, ordered: bool, in_place: bool
) -> dict[str, Array]:
    """The buffers that a bucket of gradients needs on its way.

    Args:
        bucket: its elements, and the dtype of its parameters.
        mean: the dtype of the means.
        received: elements that arrive where chunks are exchanged.
        ordered, in_place: as in `GradientReducer`.
    """
    arrays = {"send": bucket}
    if ordered:
        arrays["receive"] = Array(received, bucket.dtype)
    elif not in_place and mean != bucket.dtype:
        arrays["wide"] = Array(bucket.numel, mean)
    return arrays


@dataclass
class Lane:
    """A send and a receive buffer, grown to the largest bucket they have carried."""

    memory: dict[str, torch.Tensor] = field(default_factory=dict)

    def buffer(self, name: str, array: Array, device: torch.device) -> torch.Tensor:
        """Room for ``array``."""
        nbytes = array.nbytes
        if name not in self.memory or self.memory[name].numel() < nbytes:
            self.memory[name] = kernels.flat_memory(nbytes, torch.uint8, device)
        return self.memory[name][:nbytes].view(array.dtype)

    def nbytes(self, *names: str) -> int:
        return sum(self.memory[name].numel() for name in names if name in self.memory)


class Flight:
    """A bucket on its way.

    Attributes:
        started: time.perf_counter() when its exchange was.
        arrived: the same when the last of its stages could go on.
    """

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._pending: Pending | None = next(stages)
        self.started = self.arrived = time.perf_counter()

    @property
    def holds_host(self) -> bool:
        """Whether `finish` would keep this thread waiting."""
        return self._pending is not None and self._pending.holds_host

    def finish(self) -> None:
        while self._pending is not None:
            self.arrived = self._pending.wait()
            self._pending = next(self._stages, None)


class GradientReducer:
    """Averages gradients over the ranks of a group, bucket by bucket.

    Args:
        comm: the group.
        ordered: True: the mean is ``(g_0 + g_1 + ...) / N``, added in rank order by our kernel,
            so it depends neither on the bucket size nor on the backend. False: the backend's
            ReduceScatter or AllReduce adds, in an order of its own.
        in_place: False: what this rank owns goes to each bucket's ``reduced``: the mean once
            multiplied by `shard_scale`. True: each gradient is overwritten by the mean, as DDP
            does; the mean of bf16 and fp16 gradients is fp32, goes to ``reduced``, and they are
            overwritten by its rounding.

    16-bit gradients are sent as they are where our kernel adds them; a backend, which would round
    at every hop, gets them in fp32.

    Buckets' ``packing`` tables must point at this rank's gradients and be uploaded; a parameter
    without one counts as zero. Every rank starts the same buckets in the same order.
    """

    def __init__(self, comm: Communicator, *, ordered: bool, in_place: bool) -> None:
        self._comm = comm
        self._ordered = ordered
        self._in_place = in_place
        self._turn = 0
        self._flights: deque[Flight] = deque()
        self.lanes = [Lane() for _ in range(LANES)]

    @property
    def shard_scale(self) -> float:
        """What turns ``reduced`` into the mean: the update multiplies by it, which spares a pass
        over the backend's sum."""
        return 1.0 if self._ordered else 1.0 / self._comm.world_size

    def overlaps(self, device: torch.device) -> bool:
        """Whether a bucket may be started while backward goes on."""
        return self._comm.overlaps(device, ordered=self._ordered)

    def has_room(self) -> bool:
        """Whether `start` would not keep this thread waiting."""
        return len(self._flights) < LANES or not self._flights[0].holds_host

    def start(self, bucket: BucketMemory) -> None:
        """Pack a bucket and start its exchange; wait for the one before the last, if need be."""
        if len(self._flights) == LANES:
            self._land()
        # The first when none is in use, so that a single bucket needs no second one.
        self._turn = (self._turn + 1) % LANES if self._flights else 0
        stages = self._to_all if self._in_place else self._to_shard
        self._flights.append(Flight(stages(bucket, self.lanes[self._turn])))

    def finish(self) -> None:
        """Wait for all that was started."""
        while self._flights:
            self._land()

    def _land(self) -> None:
        flight = self._flights.popleft()
        flight.finish()
        self._comm.stats.exchanges.append((flight.started, flight.arrived))

    def _to_shard(self, bucket: BucketMemory, lane: Lane) -> Stages:
        buffers, reduced = self._pack(bucket, lane), bucket.reduced
        assert reduced is not None
        if self._ordered:
            chunks, pending = self._comm.exchange_chunks(buffers["send"], buffers["receive"])
            yield pending
            kernels.mean_(reduced, chunks)
        else:
            send = buffers["send"]
            if "wide" in buffers:
                send = buffers["wide"].copy_(send)
            yield self._comm.reduce_scatter(send, reduced)

    def _to_all(self, bucket: BucketMemory, lane: Lane) -> Stages:
        buffers = self._pack(bucket, lane)
        send = buffers["send"]
        # All sends are done by then, so the buffer can take the mean and be gathered in place.
        mean = send if bucket.reduced is None else bucket.reduced
        if self._ordered:
            chunks, pending = self._comm.exchange_chunks(send, buffers["receive"])
            yield pending
            length = bucket.layout.shard_numel
            kernels.mean_(mean.narrow(0, self._comm.rank * length, length), chunks)
            yield self._comm.all_gather_(mean)
        else:
            if mean is not send:
                mean.copy_(send)
            yield self._comm.all_reduce_(mean)
            mean.div_(self._comm.world_size)
        if mean is not send:
            send.copy_(mean)
        kernels.unpack_(send, bucket.packing)

    def _pack(self, bucket: BucketMemory, lane: Lane) -> dict[str, torch.Tensor]:
        """The buffers that it needs, with its gradients in ``"send"``."""
        numel, device = bucket.layout.numel, bucket.param.device
        received = bucket.layout.shard_numel * self._comm.received_chunks(device)
        arrays = wire_arrays(
            Array(numel, bucket.param.dtype),
            bucket.dtype.to_real(),
            received,
            ordered=self._ordered,
            in_place=self._in_place,
        )
        buffers = {name: lane.buffer(name, array, device) for name, array in arrays.items()}
        kernels.pack_(buffers["send"], bucket.packing)
        return buffers
