"""Norms of the averaged gradient, each element counted once, whoever holds it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from fusedshard import kernels
from fusedshard.comm import Communicator
from fusedshard.flat import BucketMemory
from fusedshard.params import in_storage_order

# Elements from which on our sum of squares is faster than torch's norm in fp64.
_LARGE = 1 << 15


def check_norm_type(norm_type: float) -> float:
    """``norm_type`` as a float; raise ValueError for one that no norm has."""
    value = float(norm_type)
    if not value > 0:
        raise ValueError(f"norm_type: got {norm_type!r}, wanted a number above 0 or inf")
    return value


def norm_of_shards(
    buckets: Sequence[BucketMemory],
    params: Collection[int] | None,
    norm_type: float,
    comm: Communicator,
) -> torch.Tensor:
    """Norm over all ranks' shards of the averaged gradient, fp64, on their device. Collective.

    Partial norms are gathered and combined by every rank in the same order, so that all get the
    same bits.

    Args:
        buckets: those that were exchanged.
        params: the parameters to count; None: all.
    """
    pieces = [piece for bucket in buckets for piece in _pieces(bucket, params)]
    own = _norm([_norm([piece], norm_type) for piece in pieces], norm_type)
    device = buckets[0].param.device if buckets else kernels.CPU
    partials = torch.zeros(comm.world_size, dtype=torch.float64, device=device)
    partials[comm.rank] = own
    comm.all_gather_(partials).wait()
    return _norm([partials], norm_type)


def norm_of_gradients(
    grads: Sequence[torch.Tensor | None], params: Collection[int] | None, norm_type: float
) -> torch.Tensor:
    """Norm of whole gradients, fp64, without communication. ``params`` as for `norm_of_shards`."""
    norms = [
        _norm([in_storage_order(grad)], norm_type)
        if norm_type == 2.0 and grad.numel() >= _LARGE
        else _vector_norm(grad, norm_type)
        for index, grad in enumerate(grads)
        if grad is not None and grad.numel() and (params is None or index in params)
    ]
    return _norm(norms, norm_type)


def shards_found_inf(
    buckets: Sequence[BucketMemory], found_inf: torch.Tensor, comm: Communicator
) -> None:
    """Set ``found_inf`` (one fp32 element on the shards' device) to 1 on every rank where a shard
    of any is not finite; else leave it. Collective."""
    for bucket in buckets:
        assert bucket.reduced is not None
        kernels.found_inf_(found_inf, bucket.reduced)
    flags = found_inf.new_zeros(comm.world_size)
    flags[comm.rank] = found_inf
    comm.all_gather_(flags).wait()
    found_inf.copy_(flags.amax())


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """As torch.nn.utils.clip_grad_norm_ has it: at most 1, and NaN where the norm is."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def scale(gradient: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply a dense tensor in place, the parts of complex numbers each for itself."""
    reals = in_storage_order(gradient)
    reals.mul_(factor.to(kernels.wide_dtype(reals.dtype)))


def scale_pieces(
    buckets: Sequence[BucketMemory], params: Collection[int], factor: torch.Tensor
) -> None:
    """Multiply this rank's shards of some parameters' averaged gradients."""
    for bucket in buckets:
        for piece in _pieces(bucket, params):
            scale(piece, factor)


def _pieces(bucket: BucketMemory, params: Collection[int] | None) -> list[torch.Tensor]:
    assert bucket.reduced is not None
    if params is None:  # padding, and what has no gradient, is zero in it
        return [bucket.reduced.view(bucket.dtype)]
    return [
        bucket.reduced.narrow(0, segment.shard_start, segment.length).view(bucket.dtype)
        for segment in bucket.owned
        if segment.param in params
    ]


def _norm(parts: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Of 1-D parts, or of 0-dim norms of parts, as one vector; fp64."""
    if len(parts) == 1 and norm_type == 2.0 and parts[0].dim() == 1:
        return kernels.square_sum(in_storage_order(parts[0])).sqrt()
    if len(parts) == 1 and parts[0].dim() == 1:
        return _vector_norm(parts[0], norm_type)
    if not parts:
        return torch.zeros((), dtype=torch.float64)
    return torch.linalg.vector_norm(torch.stack(list(parts)), norm_type)


def _vector_norm(numbers: torch.Tensor, norm_type: float) -> torch.Tensor:
    """In fp64; of complex numbers by their absolute values."""
    wide = torch.complex128 if numbers.is_complex() else torch.float64
    return torch.linalg.vector_norm(numbers, norm_type, dtype=wide)
