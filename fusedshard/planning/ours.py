"""What fusedshard takes, by the rules that its optimizers allocate by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import torch

from fusedshard.comm import bytes_of_others
from fusedshard.flat import FlatFormats
from fusedshard.gradients import LANES, wire_arrays
from fusedshard.kernels import MASTER_DTYPES, wide_dtype
from fusedshard.layout import FlatLayout, Layout, ParamSpec, build_layout
from fusedshard.moments import Array
from fusedshard.options import ParallelOptions
from fusedshard.params import spec_of
from fusedshard.planning.models import Model
from fusedshard.planning.usage import Usage, all_reduced
from fusedshard.transport import GlooPairs, GroupCollectives, Transport

BACKENDS: dict[str, type[Transport]] = {"nccl": GroupCollectives, "gloo": GlooPairs}
# Of a parameter's step count: int64, and its fp32 mirror.
_STEP_BYTES = 12
# What each rank tells the others at a step: a digest, two flags, a byte for each bucket and each
# parameter.
_STATUS_BYTES = 10


class Ours:
    """An optimizer of ours over all of a model's parameters.

    Args:
        model: its parameters.
        options: the optimizer's.
        backend: of its process group, a name in `BACKENDS`.
    """

    def __init__(self, model: Model, options: ParallelOptions, backend: str) -> None:
        self._model = model
        self._options = options
        self._transport = BACKENDS[backend]
        self._sharded = options.mode == "sharded"
        self._ordered = options.ordered(model.dtypes, preferred=self._transport.prefers_ordered)
        meta = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in model.parameters]
        precision = options.precision
        self._specs = tuple(spec_of(i, tensor, precision) for i, tensor in enumerate(meta))

    def usage(self, ranks: int) -> Usage:
        """On any of the ranks: all hold equally much."""
        layout = _layout(self._specs, ranks, self._options.bucket_cap_bytes)
        held = dict.fromkeys(("parameters", "moments", "masters", "reduced"), 0)
        grads_read = 0
        buckets: list[Array] = []
        for flat in layout.flats:
            owned = flat.numel // (ranks if self._sharded else 1)
            formats = self._formats(flat, ranks)
            for name, arrays in formats.arrays(flat.numel, owned).items():
                held[name] += sum(array.nbytes for array in arrays)
            real = formats.param.to_real()
            grads_read += Array(owned, formats.reduced or real).nbytes
            buckets += [Array(bucket.numel, real) for bucket in flat.buckets]
        gradients = self._model.nbytes
        buffers = {"reduced": held["reduced"], **self._wire(buckets, ranks)}
        if ranks > 1 and self._options.grad_sync == "external":
            buffers["ddp_buckets"] = gradients
        owned_parameters = held["parameters"] // (ranks if self._sharded else 1)
        updated = owned_parameters + held["moments"] + held["masters"]
        return Usage(
            parameters=held["parameters"],
            gradients=gradients,
            masters=held["masters"],
            exp_avg=held["moments"] // 2,
            exp_avg_sq=held["moments"] // 2,
            steps=_STEP_BYTES * len(self._specs),
            buffers=buffers,
            sent=self._sent(buckets, ranks) if ranks > 1 else {},
            moved=2 * updated + grads_read,
        )

    def _reduces(self, ranks: int) -> bool:
        return ranks > 1 and self._options.grad_sync != "external"

    def _formats(self, flat: FlatLayout, ranks: int) -> FlatFormats:
        return FlatFormats.of(
            flat.kind,
            self._options.precision,
            sharded=self._sharded,
            reduces=self._reduces(ranks),
        )

    def _wire(self, buckets: Sequence[Array], ranks: int) -> dict[str, int]:
        """Send and receive buffers: buckets take turns in lanes that grow to the largest."""
        lanes: list[dict[str, int]] = [{} for _ in range(LANES)]
        for turn, bucket in enumerate(buckets if self._reduces(ranks) else ()):
            arrays = wire_arrays(
                bucket,
                wide_dtype(bucket.dtype),
                bucket.numel // ranks * self._transport.received_chunks(ranks),
                ordered=self._ordered,
                in_place=not self._sharded,
            )
            lane = lanes[turn % LANES]
            for name, array in arrays.items():
                lane[name] = max(lane.get(name, 0), array.nbytes)
        send = sum(lane.get(name, 0) for lane in lanes for name in ("send", "wide"))
        return {"send": send, "receive": sum(lane.get("receive", 0) for lane in lanes)}

    def _sent(self, buckets: Sequence[Array], ranks: int) -> dict[str, int]:
        """By the names of `fusedshard.stats.Stats`, and what DDP sends beside it."""
        sent: Counter[str] = Counter()
        for bucket in buckets:
            sent.update(self._bucket_sends(bucket, ranks))
        row = _STATUS_BYTES + len(buckets) + len(self._specs)
        # In replicated mode backward ends with one agreement, and step() begins with another.
        times = 2 if not self._sharded and self._options.grad_sync == "backward" else 1
        sent["status"] = times * (ranks - 1) * row
        if self._options.grad_sync == "external":
            sent["ddp_all_reduce"] = all_reduced(self._model.nbytes, ranks)
        return dict(+sent)

    def _bucket_sends(self, bucket: Array, ranks: int) -> Counter[str]:
        mean = Array(bucket.numel, wide_dtype(bucket.dtype))
        share, mean_share = (bytes_of_others(array.nbytes, ranks) for array in (bucket, mean))
        sent: Counter[str] = Counter()
        if self._reduces(ranks) and self._ordered:
            sent["all_to_all"] = share
        elif self._reduces(ranks) and self._sharded:
            sent["reduce_scatter"] = mean_share
        elif self._reduces(ranks):
            sent["all_reduce"] = 2 * mean_share
        if self._sharded:
            sent["all_gather"] = share
        elif "all_to_all" in sent:
            sent["all_gather"] = mean_share
        return sent


@lru_cache(maxsize=128)
def _layout(specs: tuple[ParamSpec, ...], ranks: int, bucket_cap_bytes: int) -> Layout:
    return build_layout(specs, ranks, bucket_cap_bytes)


def masters_of(model: Model) -> tuple[bool | None, ...]:
    """The values of ``master_weights`` that make a difference."""
    narrow = [dtype for dtype in model.dtypes if dtype in MASTER_DTYPES]
    if torch.bfloat16 in narrow:
        return None, True, False
    return (None, False) if narrow else (None,)
