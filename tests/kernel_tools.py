"""What the kernel tests share: hyperparameters, problems, and runs of the kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from emulated_backend import is_emulated
from oracles import Problem, fresh_state

from fusedshard import _C
from fusedshard.kernels import adam_
from fusedshard.layout import Segment
from fusedshard.native import AdamState
from fusedshard.tables import GroupScalars, StepTables, integers

FLOATS = [torch.float32, torch.float64]
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=["fp32", "fp64"])

ADAM = GroupScalars(1e-2, 0.9, 0.999, 1e-8, 0.0, decoupled=False, amsgrad=False, maximize=False)
ADAMW = ADAM._replace(weight_decay=0.1, decoupled=True)
# Decay: none, Adam's and AdamW's; with every switch.
KINDS = [
    group._replace(amsgrad=amsgrad, maximize=maximize)
    for group in (ADAM, ADAM._replace(weight_decay=0.1), ADAMW)
    for amsgrad, maximize in itertools.product((False, True), repeat=2)
]
# From beta1 = 0.5 down torch.lerp starts at the gradient.
BETAS = [(0.99, 0.9), (0.5, 0.999), (0.3, 0.99999), (0.0, 0.9)]
# With beta2 below about 0.9 the one rounding that FMA saves torch in v counts.
SMALL_BETA2 = [(0.9, 0.0), (0.5, 0.5), (0.0, 0.0)]


def describe(group: GroupScalars) -> str:
    """A test id."""
    kind = "adamw" if group.decoupled else "adam"
    switches = [name for name in ("amsgrad", "maximize") if getattr(group, name)]
    names = ("lr", "beta1", "beta2", "eps", "weight_decay")
    changed = [n for n in names if getattr(group, n) != getattr(ADAM, n)]
    return "-".join([kind, *switches, *(f"{n}={getattr(group, n):g}" for n in changed)])


COMMON_GROUPS = [
    *KINDS,
    *(ADAMW._replace(beta1=beta1, beta2=beta2) for beta1, beta2 in BETAS),
    *(ADAM._replace(eps=eps, weight_decay=0.1) for eps in (0.0, 1.0)),
    ADAMW._replace(lr=0.0),
]
GROUPS = [*COMMON_GROUPS, *(ADAMW._replace(beta1=b1, beta2=b2) for b1, b2 in SMALL_BETA2)]
each_kind = pytest.mark.parametrize("group", KINDS, ids=describe)
each_common_group = pytest.mark.parametrize("group", COMMON_GROUPS, ids=describe)
each_group = pytest.mark.parametrize("group", GROUPS, ids=describe)


def make_problem(
    group: GroupScalars, scale: float = 1.0, numel: int = 1003, steps: int = 30
) -> Problem:
    """Random values; gradients of all magnitudes within two decades around ``scale``."""
    generator = torch.Generator().manual_seed(numel + steps)
    param = torch.randn(numel, generator=generator)
    grads = []
    for _ in range(steps):
        spread = 10 ** (2 * torch.rand(numel, generator=generator) - 1)
        grads.append(scale * spread * torch.randn(numel, generator=generator))
    return Problem(group, param, grads)


def tables_of(
    segments: Sequence[Segment],
    itemsize: int,
    groups: Sequence[GroupScalars] = (ADAM,),
    group_of: torch.Tensor | None = None,
    device: str = "cpu",
) -> StepTables:
    """Of one shard, with every parameter in use; gradients are still to be pointed at."""
    params = max((s.param for s in segments), default=-1) + 1
    group_of = integers([0] * params) if group_of is None else group_of
    tables = StepTables([(segments, itemsize)], group_of, len(groups), torch.device(device))
    tables.set_used(torch.ones_like(group_of))
    tables.set_groups(groups)
    return tables


def update(
    state: AdamState,
    grad: torch.Tensor,
    group: GroupScalars,
    step: int,
    grad_scale: float | torch.Tensor = 1.0,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Update number ``step`` (from 1) of a whole shard that holds one parameter."""
    segments = [Segment(0, 0, 0, grad.numel())]
    tables = tables_of(segments, grad.element_size(), [group], device=grad.device.type)
    tables.point_at_shards([grad])
    tables.upload()
    steps = torch.tensor([step - 1], device=grad.device)
    adam_(state, tables.tables[0], steps, grad_scale, found_inf)


def run_kernel(problem: Problem, dtype: torch.dtype) -> AdamState:
    """All steps of a problem."""
    state = fresh_state(problem.param.to(dtype), problem.group.amsgrad)
    for step, grad in enumerate(problem.grads, 1):
        update(state, grad.to(dtype), problem.group, step)
    return state


@contextmanager
def running_on(variant: str, threads: int) -> Iterator[None]:
    """The kernels in one compiled variant and with a number of threads, for a while."""
    before = _C.cpu_variant(), torch.get_num_threads()
    _C.set_cpu_variant(variant)
    torch.set_num_threads(threads)
    try:
        assert _C.cpu_variant() == variant
        yield
    finally:
        _C.set_cpu_variant(before[0])
        torch.set_num_threads(before[1])


def ways_to_run(threads: Sequence[int] = (1, 2, 3)) -> list[tuple[str, int]]:
    """Every variant that this processor runs, with each number of threads; for emulated devices
    all of them are one."""
    if is_emulated():
        return [(_C.cpu_variant(), 1)]
    return list(itertools.product(_C.cpu_variants(), threads))


def chunks_of_all_scales(count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Random tensors of six decades, parts of one buffer."""
    generator = torch.Generator().manual_seed(count)
    spread = torch.logspace(-3, 3, max(numel, 1), dtype=dtype)[:numel]
    return list(spread * torch.randn(count, numel, generator=generator, dtype=dtype))
