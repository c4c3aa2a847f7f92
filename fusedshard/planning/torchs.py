"""What torch's own ways take: DistributedDataParallel, ZeroRedundancyOptimizer and FSDP2."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import torch

from fusedshard.kernels import MASTER_DTYPES, wide_dtype
from fusedshard.planning.models import Model, Parameter
from fusedshard.planning.usage import Usage, all_reduced, passed_on

_STEP_BYTES = 4  # an fp32 tensor of one element for each parameter
_PASSES = 7  # parameter and moments are read and written, the gradient is read


def ddp(model: Model, ranks: int, *, masters: bool = False, bucket_view: bool = False) -> Usage:
    """DDP, with torch.optim.AdamW on each rank.

    Args:
        model: its parameters.
        ranks: of them.
        masters: AdamW trains fp32 copies of 16-bit parameters, whose gradients are fp32 copies,
            too. Else it trains the parameters, in their own dtype.
        bucket_view: gradients lie in DDP's buckets (``gradient_as_bucket_view=True``), instead of
            being copied there and back.
    """
    parameters, own = model.parameters, model.nbytes
    narrow = [p for p in parameters if p.dtype in MASTER_DTYPES] if masters else []
    copies = 4 * sum(p.numel for p in narrow)
    narrow_bytes = sum(p.nbytes for p in narrow)
    trained = own - narrow_bytes + copies
    buffers = {} if bucket_view else {"ddp_buckets": own}
    if narrow:
        buffers["master_gradients"] = copies
    # Gradients to fp32, and fp32 back to parameters, each read once and written once.
    casts = 2 * (narrow_bytes + copies)
    return Usage(
        parameters=own,
        gradients=own,
        masters=copies,
        exp_avg=trained,
        exp_avg_sq=trained,
        steps=_STEP_BYTES * len(parameters),
        buffers=buffers,
        sent={"all_reduce": all_reduced(own, ranks)} if ranks > 1 else {},
        moved=_PASSES * trained + casts,
    )


def zero_redundancy(model: Model, ranks: int, rank: int | None = None) -> Usage:
    """ZeroRedundancyOptimizer with torch.optim.AdamW, under DDP.

    Args:
        model: its parameters.
        ranks: of them.
        rank: which; None: the one that holds the most.
    """
    parts = zero_partition(model.parameters, ranks)
    sizes = [sum(p.nbytes for p in part) for part in parts]
    rank = sizes.index(max(sizes)) if rank is None else rank
    own, mine = model.nbytes, sizes[rank]
    sent = {"all_reduce": all_reduced(own, ranks), "broadcast": passed_on(own, ranks)}
    return Usage(
        parameters=own,
        gradients=own,
        masters=0,
        exp_avg=mine,
        exp_avg_sq=mine,
        steps=_STEP_BYTES * len(parts[rank]),
        buffers={"ddp_buckets": own},
        sent=sent if ranks > 1 else {},
        moved=_PASSES * mine,
    )


def zero_partition(parameters: Sequence[Parameter], ranks: int) -> list[list[Parameter]]:
    """Whole parameters, the largest first, each to the rank that has the fewest elements."""
    parts: list[list[Parameter]] = [[] for _ in range(ranks)]
    fewest = [(0, rank) for rank in range(ranks)]
    for parameter in sorted(parameters, key=lambda p: p.numel, reverse=True):
        numel, rank = fewest[0]
        heapq.heapreplace(fewest, (numel + parameter.numel, rank))
        parts[rank].append(parameter)
    return parts


class FSDP2:
    """`fully_shard` of each block and then of the model, with torch.optim.AdamW on the shards.

    Each parameter is cut along its first dimension into equal chunks, which are padded.

    Args:
        model: its parameters.
        mixed: shards are fp32, and gathered in the parameters' own dtype
            (``MixedPrecisionPolicy(param_dtype=..., reduce_dtype=torch.float32)``). Else all is in
            the parameters' dtype.
    """

    def __init__(self, model: Model, *, mixed: bool = False) -> None:
        self._parameters = model.parameters
        self._mixed = mixed
        groups: dict[str | None, list[Parameter]] = {}
        for parameter in model.parameters:
            groups.setdefault(parameter.block, []).append(parameter)
        self._root = groups.pop(None, [])
        self._blocks = list(groups.values())

    @property
    def problem(self) -> str:
        """Why it cannot train this model; empty where it can."""
        for parameter in self._parameters:
            if not parameter.shape:
                return f"takes no parameters of 0 dimensions, as {parameter.name}"
        for group in (self._root, *self._blocks):
            if len({self._kept(p) for p in group}) > 1:
                return f"wants one dtype in a block, got several in that of {group[0].name}"
        return ""

    def usage(self, ranks: int, rank: int = 0) -> Usage:
        """On the first rank, which has the most, or any other."""
        kept = moment = 0
        for p in self._parameters:
            size = self._kept(p).itemsize
            kept += size * _padded(p, ranks)
            moment += size * _chunk(p, ranks, rank)
        return Usage(
            parameters=kept,
            gradients=kept,
            masters=0,
            exp_avg=moment,
            exp_avg_sq=moment,
            steps=_STEP_BYTES * len(self._parameters),
            buffers=self._peak(ranks),
            sent=self._sent(ranks) if ranks > 1 else {},
            moved=_PASSES * moment,
        )

    def _kept(self, parameter: Parameter) -> torch.dtype:
        return wide_dtype(parameter.dtype) if self._mixed else parameter.dtype

    def _gathered(self, group: Sequence[Parameter], ranks: int) -> int:
        return sum(p.dtype.itemsize * ranks * _padded(p, ranks) for p in group)

    def _scattered(self, group: Sequence[Parameter], ranks: int) -> int:
        return sum(self._kept(p).itemsize * ranks * _padded(p, ranks) for p in group)

    def _peak(self, ranks: int) -> dict[str, int]:
        """Towards the end of the largest block's backward: it and the root are gathered, the block
        before it arrives, its gradients are complete, and those of the block behind it are being
        scattered. (Shards of the gradients of what backward has yet to reach are not there then.)
        """
        blocks = sorted(self._blocks, key=lambda group: self._gathered(group, ranks))
        largest, others = (blocks[-1], blocks[:-1]) if blocks else (self._root, [])
        other = others[-1] if others else []
        root = self._root if blocks else []
        return {
            "gathered": self._gathered(root, ranks) + self._gathered(largest, ranks),
            "arriving": self._gathered(other, ranks),
            "unreduced": sum(p.nbytes for p in largest),
            "scattered": self._scattered(other, ranks),
        }

    def _sent(self, ranks: int) -> dict[str, int]:
        """Blocks are gathered in forward and again in backward; the root stays in between."""
        once = passed_on(self._gathered(self._root, ranks), ranks)
        twice = sum(passed_on(self._gathered(block, ranks), ranks) for block in self._blocks)
        scattered = passed_on(self._scattered(self._parameters, ranks), ranks)
        return {"all_gather": once + 2 * twice, "reduce_scatter": scattered}


def _padded(parameter: Parameter, ranks: int) -> int:
    """Elements of each rank's chunk."""
    first, *rest = parameter.shape
    return -(-first // ranks) * math.prod(rest)


def _chunk(parameter: Parameter, ranks: int, rank: int) -> int:
    """Elements of a rank's chunk without its padding."""
    whole = _padded(parameter, ranks)
    return max(0, min(whole, parameter.numel - rank * whole))
