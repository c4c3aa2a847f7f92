"""Jobs of every kind of optimizer, for the audit's tests: trained a little, on each rank's own
gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank
from torch.nn.parallel import DistributedDataParallel

import fusedshard

FSDP_ON_CPUS = not torch.__version__.startswith("2.6.")
needs_fsdp_on_cpus = pytest.mark.skipif(
    not FSDP_ON_CPUS, reason="FSDP2 of torch 2.6 does not run on CPUs"
)

# Sizes that no number of ranks divides, one that no two ranks share, and a channels_last weight.
WIDTH = 17


def small_model() -> torch.nn.Module:
    """The same on every rank."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, WIDTH), torch.nn.GELU()
    )
    model.append(torch.nn.Linear(WIDTH, 1))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def train(rank: Rank, model: torch.nn.Module, optimizer: Any, steps: int = 3) -> None:
    """Each rank has data of its own."""
    data = torch.Generator().manual_seed(100 + rank.rank)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        x = torch.randn(5, 3, 4, 4, generator=data).to(dtype)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


Job = tuple[torch.nn.Module, Any]


def ddp(rank: Rank) -> Job:
    model = DistributedDataParallel(small_model(), process_group=rank.group)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def zero(rank: Rank) -> Job:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(small_model(), process_group=rank.group)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, process_group=rank.group, lr=1e-2
    )
    return model, optimizer


def fsdp2(rank: Rank) -> Job:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = small_model()
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    fully_shard(model, mesh=DeviceMesh.from_group(rank.group, "cpu"))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def ours(rank: Rank, dtype: torch.dtype = torch.float32, **options: Any) -> Job:
    model = small_model().to(dtype)
    named = model.named_parameters()
    return model, fusedshard.Adam(named, lr=1e-2, process_group=rank.group, **options)


def trained(rank: Rank, job: Callable[..., Job], **options: Any) -> Job:
    model, optimizer = job(rank, **options)
    train(rank, model, optimizer)
    return model, optimizer


def audited(
    rank: Rank, job: Callable[..., Job], spoil: Callable[..., None] | None = None, **options: Any
) -> fusedshard.AuditReport:
    """Train, let ``spoil(rank, model, optimizer)`` break something, and audit."""
    model, optimizer = trained(rank, job, **options)
    if spoil is not None:
        spoil(rank, model, optimizer)
    dist.barrier(rank.group)
    return fusedshard.audit(optimizer, model, process_group=rank.group)


def param_of(model: torch.nn.Module, name: str) -> torch.nn.Parameter:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return inner.get_parameter(name)
