"""The ways to train that bench_step.py compares: each a model and its optimizer, built alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import fusedshard
from fusedshard.demo.model import GPT

HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}

DDP = "DDP + AdamW fused"
DDP_VIEW = "DDP, gradient_as_bucket_view + AdamW fused"
ZERO = "DDP + ZeroRedundancyOptimizer fused"
ZERO_VIEW = "DDP + ZeroRedundancyOptimizer fused, parameters_as_bucket_view"
FSDP = "FSDP2 + AdamW fused"
FSDP_KEEP = "FSDP2, parameters kept after forward + AdamW fused"
REPLICATED = "fusedshard replicated, ordered"
SHARDED = "fusedshard sharded, ordered"
SHARDED_BACKEND = "fusedshard sharded, backend"

Built = tuple[nn.Module, Optimizer]


def _ddp(model: GPT, **options: Any) -> Built:
    wrapped = DistributedDataParallel(model, **options)
    return wrapped, AdamW(wrapped.parameters(), **HYPERPARAMETERS, fused=True)


def _zero(model: GPT, **options: Any) -> Built:
    wrapped = DistributedDataParallel(model)
    return wrapped, ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=AdamW, **options, **HYPERPARAMETERS, fused=True
    )


def _fsdp(model: GPT, **options: Any) -> Built:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model, AdamW(model.parameters(), **HYPERPARAMETERS, fused=True)


def _ours(model: GPT, **options: Any) -> Built:
    return model, fusedshard.AdamW(model.parameters(), **HYPERPARAMETERS, **options)


BUILDERS: dict[str, Callable[[GPT], Built]] = {
    DDP: _ddp,
    DDP_VIEW: lambda model: _ddp(model, gradient_as_bucket_view=True),
    ZERO: _zero,
    ZERO_VIEW: lambda model: _zero(model, parameters_as_bucket_view=True),
    FSDP: _fsdp,
    FSDP_KEEP: lambda model: _fsdp(model, reshard_after_forward=False),
    REPLICATED: lambda model: _ours(
        model, mode="replicated", reduction="ordered", grad_sync="step"
    ),
    SHARDED: lambda model: _ours(model, mode="sharded", reduction="ordered", grad_sync="step"),
    SHARDED_BACKEND: lambda model: _ours(
        model, mode="sharded", reduction="backend", grad_sync="step"
    ),
}


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
