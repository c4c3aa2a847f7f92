"""The memory behind a layout: flat parameters, and the moments of what this rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fusedshard.comm import Communicator
from fusedshard.kernels import flat_memory
from fusedshard.layout import Bucket, FlatLayout, Segment, Slot
from fusedshard.native import BACKENDS, AdamState
from fusedshard.tables import SegmentTable


@dataclass
class BucketMemory:
    """One bucket on this rank.

    Its arrays hold reals, two for each complex number.

    Attributes:
        layout: its place in the flat buffer.
        dtype: of its parameters.
        param: the whole bucket of the flat parameters.
        segments: all of it; ``shard_start`` counts from the bucket's first element.
        owned: what this rank owns of it.
        state: parameters and moments of what this rank owns.
        reduced: the averaged gradient of what this rank owns (or the sum over the ranks, where
            the backend has added it), or None where the kernel reads each parameter's own.
        packing: the table of `segments`, to pack and unpack gradients.
        table: the kernel's view of `owned`. Both are set by the engine, which makes those of all
            buckets together.
    """

    layout: Bucket
    dtype: torch.dtype
    param: torch.Tensor
    segments: list[Segment]
    owned: list[Segment]
    state: AdamState
    reduced: torch.Tensor | None
    packing: SegmentTable = field(init=False)
    table: SegmentTable = field(init=False)


class Piece(NamedTuple):
    """``length`` reals of a parameter that this rank owns, from ``param_start`` in the
    parameter's storage order and from ``owned_start`` in the flat buffer's owned moments."""

    param_start: int
    owned_start: int
    length: int


class FlatBuffer:
    """The arrays of one `FlatLayout`: of reals, also where its parameters are complex.

    Parameters are re-homed into it: each `torch.nn.Parameter` stays the same object with the
    same shape and strides, but its elements now lie in ``param``, in a storage of its own size
    over that memory. (A view of the whole buffer would make ``torch.save`` of one bias write the
    bucket.)

    Args:
        layout: where things lie.
        comm: the ranks that share the work.
        sharded: whether this rank owns one shard of each bucket, or all of it.
        keep_reduced: whether averaged gradients get an array of their own.
    """

    def __init__(
        self, layout: FlatLayout, comm: Communicator, *, sharded: bool, keep_reduced: bool
    ) -> None:
        self.layout = layout
        dtype, _, device = layout.kind.partition("@")
        self.dtype = getattr(torch, dtype)
        self.device = torch.device(device)
        self.owners = comm.world_size if sharded else 1
        self.rank = comm.rank if sharded else 0
        self.param = self._new(layout.numel)
        owned = layout.numel // self.owners
        self.exp_avg = self._new(owned)
        self.exp_avg_sq = self._new(owned)
        self.max_exp_avg_sq: torch.Tensor | None = None
        self.reduced = self._new(owned) if keep_reduced else None
        self.buckets = [self._bucket(bucket) for bucket in layout.buckets]
        self.pieces = self._owned_pieces()

    def adopt(self, params: Sequence[torch.nn.Parameter], comm: Communicator | None) -> None:
        """Move the parameters in here, as the group's first rank has them. Collective, unless
        ``comm`` is None: then as this rank has them.

        Their old memory is released at the end of this call, so that at any time at most one
        flat buffer exists beside the parameters it replaces.
        """
        slots = self.layout.slots
        homes = [view_as_param(self.param, slot, params[slot.param]) for slot in slots]
        for slot, home in zip(slots, homes, strict=True):
            home.copy_(params[slot.param].detach())
        if comm is not None:
            comm.broadcast_(self.param)
        for slot, home in zip(slots, homes, strict=True):
            BACKENDS[self.device.type].about_to_free(params[slot.param].detach())
            params[slot.param].data = home

    def copy_moments(self, other: FlatBuffer) -> None:
        """Those of another buffer of the same layout."""
        if other.max_exp_avg_sq is not None:
            self.ensure_max_exp_avg_sq()
        theirs = other.owned_moments()
        for name, moment in self.owned_moments().items():
            moment.copy_(theirs[name])

    def ensure_max_exp_avg_sq(self) -> None:
        """Make room for amsgrad's third moment, zero at first."""
        if self.max_exp_avg_sq is None:
            self.max_exp_avg_sq = self._new(self.exp_avg.numel())
            for bucket in self.buckets:
                bucket.state = self._state(bucket.layout)

    def owned_moments(self) -> dict[str, torch.Tensor]:
        """The moments of what this rank owns of the buffer, 1-D, by torch's names."""
        moments = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        if self.max_exp_avg_sq is not None:
            moments["max_exp_avg_sq"] = self.max_exp_avg_sq
        return moments

    def moment_view(self, name: str, slot: Slot, like: torch.Tensor) -> torch.Tensor:
        """What this rank owns of a parameter's moment: of the shape and strides of ``like``
        where that is all of it, else 1-D in storage order and possibly empty; complex where the
        parameter is."""
        moment = self.owned_moments()[name]
        if self.owners == 1:
            return view_as_param(moment, slot, like)
        pieces = self.pieces.get(slot.param, [])
        length = sum(piece.length for piece in pieces)
        # A parameter that spans several buckets has its buffer to itself, so its pieces adjoin.
        return moment.narrow(0, pieces[0].owned_start if pieces else 0, length).view(self.dtype)

    def address_of(self, slot: Slot) -> int:
        """Where the elements of a parameter lie."""
        return self.param.data_ptr() + slot.start * self.layout.itemsize

    def _new(self, numel: int) -> torch.Tensor:
        return flat_memory(numel, self.dtype.to_real(), self.device)

    def _owned_pieces(self) -> dict[int, list[Piece]]:
        pieces: dict[int, list[Piece]] = {}
        for bucket in self.buckets:
            base = bucket.layout.start // self.owners
            for s in bucket.owned:
                piece = Piece(s.param_start, base + s.shard_start, s.length)
                pieces.setdefault(s.param, []).append(piece)
        return pieces

    def _bucket(self, bucket: Bucket) -> BucketMemory:
        segments = self.layout.segments(bucket.start, bucket.numel)
        owned_start, owned_numel = self._owned_range(bucket)
        owned = self.layout.segments(owned_start, owned_numel)
        reduced = None
        if self.reduced is not None:
            reduced = self.reduced.narrow(0, bucket.start // self.owners, owned_numel)
        param = self.param.narrow(0, bucket.start, bucket.numel)
        state = self._state(bucket)
        return BucketMemory(bucket, self.dtype, param, segments, owned, state, reduced)

    def _owned_range(self, bucket: Bucket) -> tuple[int, int]:
        numel = bucket.numel // self.owners
        return bucket.start + self.rank * numel, numel

    def _state(self, bucket: Bucket) -> AdamState:
        start, numel = self._owned_range(bucket)
        moments = {
            name: moment.narrow(0, bucket.start // self.owners, numel)
            for name, moment in self.owned_moments().items()
        }
        return AdamState(
            self.param.narrow(0, start, numel),
            moments["exp_avg"],
            moments["exp_avg_sq"],
            moments.get("max_exp_avg_sq"),
        )


def view_as_param(flat: torch.Tensor, slot: Slot, like: torch.Tensor) -> torch.Tensor:
    """The slot's stretch of ``flat`` with the shape and strides of ``like``, complex where that
    is, in a storage of its own size that keeps the flat memory alive."""
    itemsize = flat.dtype.itemsize
    first = (flat.storage_offset() + slot.start) * itemsize
    storage = flat.untyped_storage()[first : first + slot.numel * itemsize]
    dtype = flat.dtype.to_complex() if like.is_complex() else flat.dtype
    return flat.new_empty(0, dtype=dtype).set_(storage, 0, like.size(), like.stride())
