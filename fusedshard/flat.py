"""The memory behind a layout: flat parameters, and moments and masters of what this rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fusedshard.comm import Communicator
from fusedshard.kernels import MASTER_DTYPES, flat_memory, wide_dtype
from fusedshard.layout import Bucket, FlatLayout, Segment, Slot
from fusedshard.moments import Array, Masters, Moment, Piece, master_arrays, moment_arrays
from fusedshard.native import BACKENDS, AdamState
from fusedshard.precision import Precision
from fusedshard.tables import SegmentTable


class FlatFormats(NamedTuple):
    """The dtypes of a flat buffer's arrays, which hold reals where ``param`` is complex.

    Attributes:
        param: of its parameters.
        moment: of their moments.
        master: of what is kept beside them, or None.
        reduced: of averaged gradients that get an array of their own, or None: where the
            parameters' ``p.grad`` is not the place, as it is narrower, or stays as it is.
    """

    param: torch.dtype
    moment: torch.dtype
    master: torch.dtype | None
    reduced: torch.dtype | None

    @staticmethod
    def of(kind: str, precision: Precision, *, sharded: bool, reduces: bool) -> FlatFormats:
        """Those of a layout's ``kind``; ``reduces``: whether gradients are averaged here."""
        param, moment = (getattr(torch, name) for name in kind.partition("@")[0].split("/"))
        keeps = reduces and (sharded or param in MASTER_DTYPES)
        reduced = wide_dtype(param).to_real() if keeps else None
        return FlatFormats(param, moment, precision.master_of(param), reduced)

    def arrays(self, numel: int, owned: int) -> dict[str, list[Array]]:
        """All that lies in memory, by the names of `fusedshard.Adam.memory`: of ``numel`` reals of
        which this rank owns ``owned``."""
        return {
            "parameters": [Array(numel, self.param.to_real())],
            "moments": 2 * moment_arrays(owned, self.moment),
            "masters": [] if self.master is None else master_arrays(owned, self.master),
            "reduced": [] if self.reduced is None else [Array(owned, self.reduced)],
        }


@dataclass
class BucketMemory:
    """One bucket on this rank.

    Its arrays hold reals, two for each complex number.

    Attributes:
        layout: its place in the flat buffer.
        dtype: of its averaged gradients: that of its parameters, but fp32 for bf16 and fp16.
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


class FlatBuffer:
    """The arrays of one `FlatLayout`: of reals, also where its parameters are complex.

    Parameters are re-homed into it: each `torch.nn.Parameter` stays the same object with the
    same shape and strides, but its elements now lie in ``param``, in a storage of its own size
    over that memory. (A view of the whole buffer would make ``torch.save`` of one bias write the
    bucket.)

    Args:
        layout: where things lie.
        comm: the ranks that share the work.
        precision: in which formats.
        sharded: whether this rank owns one shard of each bucket, or all of it.
        reduces: whether gradients are averaged here.

    Attributes:
        param: all of it.
        moments: by torch's names, of what this rank owns.
        masters: likewise, or None.
        reduced: the averaged gradient of what this rank owns, or None.
        wide: the dtype of averaged gradients and of full moments.
        pieces: what this rank owns of each parameter.
    """

    def __init__(
        self,
        layout: FlatLayout,
        comm: Communicator,
        precision: Precision,
        *,
        sharded: bool,
        reduces: bool,
    ) -> None:
        self.layout = layout
        formats = FlatFormats.of(layout.kind, precision, sharded=sharded, reduces=reduces)
        self._moment_dtype = formats.moment
        self.device = torch.device(layout.kind.partition("@")[2])
        self.wide = wide_dtype(formats.param)
        self._seed = precision.rounding_seed
        self.owners = comm.world_size if sharded else 1
        self.rank = comm.rank if sharded else 0
        owned = layout.numel // self.owners
        arrays = formats.arrays(layout.numel, owned)
        self.param = self._new(*arrays["parameters"][0])
        self.moments = {
            "exp_avg": Moment(owned, self._moment_dtype, self._new, signed=True),
            "exp_avg_sq": Moment(owned, self._moment_dtype, self._new, signed=False),
        }
        master = formats.master
        self.masters = None if master is None else Masters(self.param, owned, master, self._new)
        self.reduced = self._new(*arrays["reduced"][0]) if arrays["reduced"] else None
        self.shows_reduced = self.reduced is not None and not sharded
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

    def copy_state(self, other: FlatBuffer) -> None:
        """That of another buffer of the same layout."""
        if "max_exp_avg_sq" in other.moments:
            self.ensure_max_exp_avg_sq()
        for name, moment in self.moments.items():
            moment.copy_(other.moments[name])
        if self.masters is not None and other.masters is not None:
            self.masters.copy_(other.masters)

    def ensure_max_exp_avg_sq(self) -> None:
        """Make room for amsgrad's third moment, zero at first."""
        if "max_exp_avg_sq" not in self.moments:
            owned = self.layout.numel // self.owners
            third = Moment(owned, self._moment_dtype, self._new, signed=False)
            self.moments["max_exp_avg_sq"] = third
            for bucket in self.buckets:
                bucket.state = self._state(bucket.layout)

    @property
    def is_plain(self) -> bool:
        """Whether its moments lie in memory as state dicts have them, and are all there is."""
        return self.masters is None and self._moment_dtype == self.wide.to_real()

    def visible_moments(self, slot: Slot, like: torch.Tensor) -> dict[str, torch.Tensor]:
        """What this rank owns of a parameter's moments: of the shape and strides of ``like``
        where that is all of it, else 1-D in storage order and possibly empty; complex where the
        parameter is. Beside codes their exponents, 1-D."""
        pieces = self.pieces.get(slot.param, [])
        start = pieces[0].owned_start if pieces else 0
        # A parameter that spans several buckets has its buffer to itself, so its pieces adjoin.
        length = sum(piece.length for piece in pieces)
        visible = {}
        for name, moment in self.moments.items():
            values, exponents = moment.arrays(start, length)
            whole = self.owners == 1
            visible[name] = (
                view_as_param(moment.values, slot, like)
                if whole
                else values.view(self.wide if like.is_complex() else values.dtype)
            )
            if exponents is not None:
                visible[f"{name}_exponents"] = exponents
        return visible

    def visible_masters(self, slot: Slot, like: torch.Tensor) -> torch.Tensor:
        """The same of its masters: fp32, or remainders, int16."""
        assert self.masters is not None
        if self.owners == 1:
            return view_as_param(self.masters.values, slot, like)
        pieces = self.pieces.get(slot.param, [])
        start = pieces[0].owned_start if pieces else 0
        return self.masters.values.narrow(0, start, sum(piece.length for piece in pieces))

    def mean_view(self, slot: Slot, like: torch.Tensor) -> torch.Tensor:
        """A parameter's averaged gradient, where this rank has all of it."""
        assert self.reduced is not None
        return view_as_param(self.reduced, slot, like)

    def read_masters_to(self, start: int, out: torch.Tensor) -> None:
        """Write a bucket's part of what this rank owns, fp32, to ``out``, 1-D; padding is left
        out."""
        assert self.masters is not None
        for pieces in self.pieces.values():
            for piece in pieces:
                if start <= piece.owned_start < start + len(out):
                    mine = out.narrow(0, piece.owned_start - start, piece.length)
                    self.masters.read_to(piece, mine)

    def address_of(self, slot: Slot) -> int:
        """Where the elements of a parameter lie."""
        return self.param.data_ptr() + slot.start * self.layout.itemsize

    def _new(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return flat_memory(numel, dtype, self.device)

    def _owned_pieces(self) -> dict[int, list[Piece]]:
        pieces: dict[int, list[Piece]] = {}
        for bucket in self.buckets:
            base = bucket.layout.start // self.owners
            start, _ = self._owned_range(bucket.layout)
            for s in bucket.owned:
                at = base + s.shard_start
                piece = Piece(s.param_start, at, start + s.shard_start, s.length)
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
        return BucketMemory(bucket, self.wide, param, segments, owned, state, reduced)

    def _owned_range(self, bucket: Bucket) -> tuple[int, int]:
        numel = bucket.numel // self.owners
        return bucket.start + self.rank * numel, numel

    def _state(self, bucket: Bucket) -> AdamState:
        start, numel = self._owned_range(bucket)
        at = bucket.start // self.owners
        moments = [moment.arrays(at, numel) for moment in self.moments.values()]
        third = (None, None) if len(moments) == 2 else moments[2]
        master, checks = None, None
        if self.masters is not None:
            master, checks = self.masters.arrays(at, numel)
        return AdamState(
            self.param.narrow(0, start, numel),
            moments[0][0],
            moments[1][0],
            third[0],
            master,
            (moments[0][1], moments[1][1], third[1]),
            self._seed,
            checks,
        )


def view_as_param(flat: torch.Tensor, slot: Slot, like: torch.Tensor) -> torch.Tensor:
    """The slot's stretch of ``flat`` with the shape and strides of ``like``, complex where that
    is, in a storage of its own size that keeps the flat memory alive."""
    itemsize = flat.dtype.itemsize
    first = (flat.storage_offset() + slot.start) * itemsize
    storage = flat.untyped_storage()[first : first + slot.numel * itemsize]
    dtype = flat.dtype.to_complex() if like.is_complex() else flat.dtype
    return flat.new_empty(0, dtype=dtype).set_(storage, 0, like.size(), like.stride())
