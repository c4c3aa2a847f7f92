"""Where a rank's part of a saved DTensor lies. torch's own answer is cached for all ranks' meshes
that look alike, and is then another rank's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fusedshard.auditing.pieces import Held, Index, box


def is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def held_in_dtensor(param: str, part: str, tensor: Any, ranks: int) -> Sequence[Held]:
    """The piece that a loaded DTensor has.

    Raises:
        TypeError: it is of partial sums, or of shards that are no boxes.
    """
    mesh, local = tensor.device_mesh, tensor.to_local()
    kinds = [type(placement).__name__ for placement in tensor.placements]
    if not set(kinds) <= {"Shard", "Replicate"} or mesh.get_coordinate() is None:
        raise TypeError(f"{part} of {param}: got a DTensor of {kinds}, wanted shards or copies")
    sharded = [
        (placement.dim, *of_mesh)
        for placement, of_mesh in zip(
            tensor.placements, zip(mesh.get_coordinate(), mesh.shape, strict=True), strict=True
        )
        if placement.is_shard()
    ]
    offset, size = _box(tuple(tensor.shape), sharded)
    if size != tuple(local.shape):
        raise TypeError(
            f"{part} of {param}: got a shard of shape {tuple(local.shape)}, wanted {size}"
        )
    shards = math.prod(count for _, _, count in sharded)
    copies = max(1, ranks // shards)
    return [box(param, part, tuple(tensor.shape), offset, local.detach(), copies)]


def _box(shape: Index, sharded: Sequence[tuple[int, int, int]]) -> tuple[Index, Index]:
    """Of the shard with a number among so many in each dimension that is sharded, one after
    another: all but the last have as many rows as it takes for all of them."""
    offset, size = [0] * len(shape), list(shape)
    for dim, number, count in sharded:
        rows = -(-size[dim] // count)
        start = min(number * rows, size[dim])
        offset[dim] += start
        size[dim] = min(rows, size[dim] - start)
    return tuple(offset), tuple(size)
