"""The jobs of consistency.py: ways to train one model on several ranks, right and wrong."""

# No `from __future__ import annotations`: DDP reads the annotations of a communication hook.

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from step_variants import FUSED, Build, Built, ddp, ours
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from fusedshard.demo.verdicts import MOMENTS

DDP = "DDP + torch AdamW"
REPLICATED = "fusedshard replicated"
SHARDED = "fusedshard sharded"
NEVER = "averaging forgotten"
STEP_FIRST = "step before averaging"
LOST = "one rank's moments lost"
NEVER_SHARDED = "averaging forgotten, sharded"

ORDERED = "fp32, rank order"
AGAIN = "fp32, rank order, again"
BACKEND = "fp32, the backend's order"
OTHER_BATCHES = "fp32, rank order, other batches"
WIRE_FP32 = "DDP, fp32 on the wire"
WIRE_BF16 = "DDP, bf16 on the wire, the backend's order"
WIRE_BF16_ORDERED = "DDP, bf16 on the wire, rank order"

AUDIT_EVERY = 10


def nothing(optimizer: Optimizer, step: int, args: argparse.Namespace) -> None:
    """What is done before most steps."""


def step_alone(model: nn.Module, optimizer: Optimizer) -> None:
    """The update, where gradients are averaged by then, or by the optimizer itself."""
    optimizer.step()


@dataclass(frozen=True)
class Job:
    """A way to train.

    Attributes:
        build: makes a model and its optimizer of a model.
        reference: the job, an earlier one, that its parameters and moments are compared with.
        begin: called before each step.
        update: called after each backward.
        sharded: whether each rank holds moments of its own.
        other_batches: whether it sees other batches than the rest.
        brief: whether a part of the steps tells: runs whose bits are the same stay so.
    """

    build: Build
    reference: str | None = None
    begin: Callable[[Optimizer, int, argparse.Namespace], None] = nothing
    update: Callable[[nn.Module, Optimizer], None] = step_alone
    sharded: bool = False
    other_batches: bool = False
    brief: bool = False


def without_ddp(model: nn.Module) -> Built:
    return model, AdamW(model.parameters(), **FUSED)


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def step_before_averaging(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.step()
    average_gradients(model)


def lose_state(optimizer: Optimizer, step: int, args: argparse.Namespace) -> None:
    """As rank 1 is after a resume for which only rank 0 has loaded the optimizer's state."""
    if step == args.lost_after + 1 and dist.get_rank() == 1:
        optimizer.state.clear()


def lose_moments(optimizer: Optimizer, step: int, args: argparse.Namespace) -> None:
    """The same of an optimizer of ours, whose state stays where it is."""
    if step == args.lost_after + 1 and dist.get_rank() == 1:
        for state in optimizer.state.values():
            for name in MOMENTS:
                state[name].zero_()


class Bf16Wire:
    """A hook of DDP that does what torch's bf16_compress_hook does, which refuses gloo: gradients
    are divided, sent and added in bf16.

    Args:
        add: adds the tensors of all ranks, in place. Collective.
    """

    def __init__(self, add: Callable[[Tensor], object]) -> None:
        self._add = add

    def hook(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        sum_of_ranks = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
        self._add(sum_of_ranks)
        averaged: torch.futures.Future[Tensor] = torch.futures.Future()
        averaged.set_result(bucket.buffer().copy_(sum_of_ranks))
        return averaged


def add_in_rank_order(tensor: Tensor) -> None:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    tensor.copy_(parts[0])
    for part in parts[1:]:
        tensor += part


def ddp_in_bf16(add: Callable[[Tensor], object], model: nn.Module) -> Built:
    wrapped, optimizer = ddp(model)
    assert isinstance(wrapped, DistributedDataParallel)
    wrapped.register_comm_hook(Bf16Wire(add), Bf16Wire.hook)
    return wrapped, optimizer


replicated = partial(ours, mode="replicated", reduction="ordered")
replicated_by_backend = partial(ours, mode="replicated", reduction="backend")

audited = partial(ours, grad_sync="external", audit_every=AUDIT_EVERY)


def audited_ddp(model: nn.Module) -> Built:
    """fusedshard's update of gradients that DDP averages."""
    wrapped = DistributedDataParallel(model)
    return wrapped, audited(model, mode="replicated")[1]


# Of all ranks alike: are they the same, and what if not?
RANK_JOBS = {
    REPLICATED: Job(replicated),
    DDP: Job(ddp, REPLICATED),
    SHARDED: Job(partial(ours, mode="sharded", reduction="ordered"), REPLICATED, sharded=True),
    NEVER: Job(without_ddp),
    STEP_FIRST: Job(without_ddp, NEVER, update=step_before_averaging, brief=True),
    LOST: Job(ddp, begin=lose_state),
}

# All right, and different in the order in which gradients are added, or their format on the wire.
ORDER_JOBS = {
    ORDERED: Job(replicated),
    AGAIN: Job(replicated, ORDERED, brief=True),
    BACKEND: Job(replicated_by_backend, ORDERED),
    OTHER_BATCHES: Job(replicated, ORDERED, other_batches=True),
    WIRE_FP32: Job(ddp),
    WIRE_BF16: Job(partial(ddp_in_bf16, dist.all_reduce), WIRE_FP32),
    WIRE_BF16_ORDERED: Job(partial(ddp_in_bf16, add_in_rank_order), WIRE_BF16),
}

# With two ranks there is but one order, as a + b = b + a.
TWO_RANK_JOBS = {
    BACKEND: Job(replicated_by_backend, REPLICATED, brief=True),
    WIRE_BF16: Job(partial(ddp_in_bf16, dist.all_reduce), brief=True),
    WIRE_BF16_ORDERED: Job(partial(ddp_in_bf16, add_in_rank_order), WIRE_BF16, brief=True),
}

# The mistakes under fusedshard, told that gradients are averaged already, and asked to audit.
AUDITED_JOBS = {
    NEVER: Job(partial(audited, mode="replicated")),
    STEP_FIRST: Job(partial(audited, mode="replicated"), update=step_before_averaging),
    LOST: Job(audited_ddp, begin=lose_moments),
    # Parameters are gathered, and the same, from updates that each rank made of its own gradients.
    NEVER_SHARDED: Job(partial(audited, mode="sharded")),
}
