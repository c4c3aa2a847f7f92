"""The ways to train that are compared: each a model and its optimizer, built alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
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
FUSED = HYPERPARAMETERS | {"fused": True}

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
    wrapped = DistributedDataParallel(model, **options)
    return wrapped, AdamW(wrapped.parameters(), **adam)


def _zero(model: nn.Module, **options: Any) -> Built:
    wrapped = DistributedDataParallel(model)
    return wrapped, ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=AdamW, **options, **FUSED
    )


def _fsdp(model: GPT, **options: Any) -> Built:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model, AdamW(model.parameters(), **FUSED)


def ours(model: nn.Module, **options: Any) -> Built:
    return model, fusedshard.AdamW(model.parameters(), **HYPERPARAMETERS | options)


BUILDERS: dict[str, Build] = {
    DDP: ddp,
    DDP_VIEW: partial(ddp, gradient_as_bucket_view=True),
    ZERO: _zero,
    ZERO_VIEW: partial(_zero, parameters_as_bucket_view=True),
    FSDP: _fsdp,
    FSDP_KEEP: partial(_fsdp, reshard_after_forward=False),
    REPLICATED: partial(ours, mode="replicated", reduction="ordered"),
    SHARDED: partial(ours, mode="sharded", reduction="ordered"),
    SHARDED_IN_STEP: partial(ours, mode="sharded", reduction="ordered", grad_sync="step"),
    SHARDED_BACKEND: partial(ours, mode="sharded", reduction="backend"),
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
