"""Where each element lives: flat buffers, buckets, shards and segments, as plain integers.

A layout is a pure function of the parameters' sizes and kinds and of the world size, so every
rank computes the same one without communication, and it can be tested without a process group.
It never depends on the order in which autograd happens to produce gradients.

Elements are real numbers throughout: a complex one is two, real part first, which no shard parts.

::

    flat buffer   one contiguous allocation; holds whole parameters in storage order
      slot        a parameter's place in a flat buffer
      bucket      a stretch of a flat buffer that is exchanged in one collective
        shard     a bucket's N equal parts; rank r owns part r
          segment the part of one slot inside one shard: a row of the kernel's table
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Slots and shards begin at multiples of this many bytes: a cache line pair, room for every vector
# width, and whole complex numbers.
ALIGNMENT_BYTES = 128
# A shard of a bucket holds at least this much, where there is as much to share out, so that
# per-rank padding (below ALIGNMENT_BYTES) stays far under one per cent whatever the world size.
MIN_SHARD_BYTES = 128 * 1024


@dataclass(frozen=True)
class ParamSpec:
    """What the layout needs to know of a parameter.

    Attributes:
        index: position in the optimizer's flat parameter order.
        numel: elements.
        kind: parameters of different kinds never share a flat buffer, e.g. ``"float32@cpu"``.
        itemsize: bytes an element.
        block: of how many elements a shard holds whole blocks, counted from the parameter's first.
    """

    index: int
    numel: int
    kind: str
    itemsize: int
    block: int = 1

    @property
    def multiple(self) -> int:
        """Elements at whose multiples slots and shards begin."""
        return math.lcm(ALIGNMENT_BYTES // self.itemsize, self.block)


@dataclass(frozen=True)
class Slot:
    """Elements ``[start, start + numel)`` of a flat buffer belong to parameter ``param``."""

    param: int
    start: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """Elements ``[start, start + numel)`` of a flat buffer, exchanged together.

    ``numel`` is a multiple of the world size; ``shard_numel`` is what each rank owns of it.
    """

    start: int
    numel: int
    shard_numel: int

    def shard_start(self, rank: int) -> int:
        """First element of ``rank``'s shard, counted in the flat buffer."""
        return self.start + rank * self.shard_numel


@dataclass(frozen=True)
class Segment:
    """A stretch of one parameter inside one shard.

    Attributes:
        param: the parameter's index.
        param_start: first element, counted in the parameter's storage order.
        shard_start: the same element, counted in the shard.
        length: elements.
    """

    param: int
    param_start: int
    shard_start: int
    length: int


@dataclass(frozen=True)
class FlatLayout:
    """One flat buffer: ``numel`` elements with padding, cut into buckets without gaps."""

    kind: str
    itemsize: int
    numel: int
    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]

    def segments(self, start: int, length: int) -> list[Segment]:
        """Segments of the stretch ``[start, start + length)``; their ``shard_start`` counts
        from ``start``."""
        found = []
        for slot in self.slots:
            begin = max(slot.start, start)
            end = min(slot.start + slot.numel, start + length)
            if begin < end:
                found.append(Segment(slot.param, begin - slot.start, begin - start, end - begin))
        return found


@dataclass(frozen=True)
class Layout:
    """All flat buffers of an optimizer, in the order in which their buckets are exchanged."""

    world_size: int
    flats: tuple[FlatLayout, ...]

    @property
    def bucket_count(self) -> int:
        return sum(len(flat.buckets) for flat in self.flats)

    @property
    def padded_numel(self) -> int:
        """Elements with padding; a rank owns ``padded_numel / world_size`` of them."""
        return sum(flat.numel for flat in self.flats)


def build_layout(params: Sequence[ParamSpec], world_size: int, bucket_cap_bytes: int) -> Layout:
    """Place parameters into flat buffers and cut these into buckets.

    Parameters are taken in reverse, as DDP does: backward tends to finish the last layers first.
    Small ones fill a flat buffer of one bucket up to the cap; one that is larger than the cap
    gets a flat buffer of its own, cut into buckets of about equal size where there is another
    rank to exchange them with. The cap grows with the world size, and nothing is cut into shards
    smaller than `MIN_SHARD_BYTES`.
    """
    cap_bytes = max(bucket_cap_bytes, world_size * MIN_SHARD_BYTES)
    flats: list[FlatLayout] = []
    filling: dict[str, list[ParamSpec]] = {}
    filled_bytes: dict[str, int] = {}
    for spec in reversed(params):
        size = _aligned(spec.numel, spec.multiple) * spec.itemsize
        if size > cap_bytes:
            flats.append(_build_flat([spec], world_size, cap_bytes))
            continue
        if filled_bytes.get(spec.kind, 0) + size > cap_bytes:
            flats.append(_build_flat(filling.pop(spec.kind), world_size, cap_bytes))
            filled_bytes[spec.kind] = 0
        if spec.numel > 0:
            filling.setdefault(spec.kind, []).append(spec)
            filled_bytes[spec.kind] = filled_bytes.get(spec.kind, 0) + size
    flats += [_build_flat(specs, world_size, cap_bytes) for specs in filling.values()]
    return Layout(world_size, tuple(flats))


def owned_ranges(layout: Layout, rank: int) -> dict[int, list[tuple[int, int]]]:
    """What ``rank`` owns: for each parameter index its ``[start, stop)`` ranges, in elements of
    the parameter's storage order. Parameters of which it owns nothing are left out."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for flat, bucket in iterate_buckets(layout):
        for segment in flat.segments(bucket.shard_start(rank), bucket.shard_numel):
            stop = segment.param_start + segment.length
            ranges.setdefault(segment.param, []).append((segment.param_start, stop))
    return ranges


def iterate_buckets(layout: Layout) -> Iterator[tuple[FlatLayout, Bucket]]:
    """Every bucket with its flat buffer, in the order of exchange."""
    for flat in layout.flats:
        for bucket in flat.buckets:
            yield flat, bucket


def _aligned(numel: int, multiple: int) -> int:
    return math.ceil(numel / multiple) * multiple


def _build_flat(specs: Sequence[ParamSpec], world_size: int, cap_bytes: int) -> FlatLayout:
    first = specs[0]  # of one kind all have the same size and blocks
    slots = []
    end = 0
    for spec in specs:
        slots.append(Slot(spec.index, end, spec.numel))
        end += _aligned(spec.numel, spec.multiple)
    buckets = _cut_buckets(end, first, world_size, cap_bytes)
    numel = sum(bucket.numel for bucket in buckets)
    return FlatLayout(first.kind, first.itemsize, numel, tuple(slots), buckets)


def _cut_buckets(
    numel: int, spec: ParamSpec, world_size: int, cap_bytes: int
) -> tuple[Bucket, ...]:
    nbytes = numel * spec.itemsize
    most = max(1, nbytes // (world_size * MIN_SHARD_BYTES)) if world_size > 1 else 1
    even = math.ceil(numel / min(most, math.ceil(nbytes / cap_bytes)))
    buckets = []
    start = 0
    while start < numel:
        shard = _aligned(math.ceil(min(even, numel - start) / world_size), spec.multiple)
        buckets.append(Bucket(start, shard * world_size, shard))
        start += shard * world_size
    return tuple(buckets)
