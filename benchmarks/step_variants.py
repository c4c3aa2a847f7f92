"""The ways to train that are compared: each a model and its optimizer, built alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import fusedshard

HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
FUSED = HYPERPARAMETERS | {"fused": True}

DDP_LOOP = "DDP + AdamW for-loop"
DDP_FOREACH = "DDP + AdamW foreach"
DDP = "DDP + AdamW fused"
DDP_VIEW = "DDP, gradient_as_bucket_view + AdamW fused"
ZERO = "DDP + ZeroRedundancyOptimizer fused"
ZERO_VIEW = "DDP + ZeroRedundancyOptimizer fused, parameters_as_bucket_view"
FSDP = "FSDP2 + AdamW fused"
FSDP_KEEP = "FSDP2, parameters kept after forward + AdamW fused"
REPLICATED = "fusedshard replicated, ordered"
SHARDED = "fusedshard sharded, ordered"
SHARDED_IN_STEP = "fusedshard sharded, ordered, exchanged in step"
SHARDED_BACKEND = "fusedshard sharded, backend"

Built = tuple[nn.Module, Optimizer]
Build = Callable[[Any], Built]  # of a model


def ddp(model: nn.Module, *, adam: Mapping[str, Any] = FUSED, **options: Any) -> Built:
    """With torch's AdamW, and what that is given."""
    wrapped = _wrapped(model, **options)
    return wrapped, AdamW(wrapped.parameters(), **adam)


def _wrapped(model: nn.Module, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        # torch 2.13 would have it replaced by an option that older ones lack.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
        # Nothing else here sends buffers.
        return DistributedDataParallel(model, broadcast_buffers=False, **options)


def _zero(model: nn.Module, *, adam: Mapping[str, Any], **options: Any) -> Built:
    wrapped = _wrapped(model)
    return wrapped, ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=AdamW, **options, **adam
    )


def _fsdp(model: Any, *, adam: Mapping[str, Any], **options: Any) -> Built:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model, AdamW(model.parameters(), **adam)


def ours(model: nn.Module, **options: Any) -> Built:
    return model, fusedshard.AdamW(model.parameters(), **HYPERPARAMETERS | options)


def builders(learning_rate: float) -> dict[str, Build]:
    """All ways to train a model that has `blocks`."""
    adam = HYPERPARAMETERS | {"lr": learning_rate}
    fused = adam | {"fused": True}
    ordered = partial(ours, lr=learning_rate, reduction="ordered")
    return {
        DDP_LOOP: partial(ddp, adam=adam | {"foreach": False}),
        DDP_FOREACH: partial(ddp, adam=adam | {"foreach": True}),
        DDP: partial(ddp, adam=fused),
        DDP_VIEW: partial(ddp, adam=fused, gradient_as_bucket_view=True),
        ZERO: partial(_zero, adam=fused),
        ZERO_VIEW: partial(_zero, adam=fused, parameters_as_bucket_view=True),
        FSDP: partial(_fsdp, adam=fused),
        FSDP_KEEP: partial(_fsdp, adam=fused, reshard_after_forward=False),
        REPLICATED: partial(ordered, mode="replicated"),
        SHARDED: partial(ordered, mode="sharded"),
        SHARDED_IN_STEP: partial(ordered, mode="sharded", grad_sync="step"),
        SHARDED_BACKEND: partial(ours, lr=learning_rate, mode="sharded", reduction="backend"),
    }


def runnable(names: Sequence[str], device: str) -> list[str]:
    """Those that this torch can run there: FSDP2 of torch 2.6 cannot on CPUs."""
    lacking = device == "cpu" and torch.__version__.startswith("2.6.")
    return [name for name in names if not (lacking and name in (FSDP, FSDP_KEEP))]


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of exp_avg and exp_avg_sq that this rank holds, padding included."""
    if isinstance(optimizer, fusedshard.AdamW):
        return optimizer.memory()["moments"]
    local = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    return sum(
        _local(moments[name]).nbytes
        for moments in local.state.values()
        for name in ("exp_avg", "exp_avg_sq")
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)  # FSDP2's state is made of DTensors
    return tensor if to_local is None else to_local()
