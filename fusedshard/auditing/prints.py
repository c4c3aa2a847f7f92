"""Fingerprints of what a rank holds."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from fusedshard.auditing.pieces import Held
from fusedshard.auditing.verdicts import Array
from fusedshard.dense import is_dense
from fusedshard.kernels import fingerprints
from fusedshard.native import BACKENDS


def fingerprints_of(held: Sequence[Held], by_index: Collection[Array] = ()) -> list[int]:
    """A 64-bit number for each piece, of the bits of its elements: as they lie in memory, or in
    the order of indices for the arrays ``by_index``. Waits for the device."""
    tensors = [in_memory(item.tensor, by_index=item.piece.array in by_index) for item in held]
    found = [0] * len(tensors)
    for places in by_device(tensors):
        prints = fingerprints([tensors[place] for place in places]).tolist()
        for place, fingerprint in zip(places, prints, strict=True):
            found[place] = fingerprint
    return found


def by_device(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The places of those on each device."""
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(place)
    return list(places.values())


def in_memory(tensor: torch.Tensor, *, by_index: bool = False) -> torch.Tensor:
    """The tensor itself where its elements fill their memory and our kernels reach it, else a copy
    that is in the order of indices, as it is anyway where that is asked for."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor._is_zerotensor():
        tensor = tensor.clone()
    if tensor.device.type not in BACKENDS:
        tensor = tensor.cpu()
    return tensor.contiguous() if by_index or not is_dense(tensor) else tensor
