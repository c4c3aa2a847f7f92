"""Who updates arrays by AdamW in bench_kernel.py and the GPU's stages: fusedshard's kernel, what
torch's three implementations call once their step has gathered its lists, and what DeepSpeed's
step calls. rich need not be installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from cold_copies import Arrays
from torch.nn import Parameter
from torch.optim.adamw import adamw

from fusedshard.kernels import adam_
from fusedshard.layout import Segment
from fusedshard.native import AdamState
from fusedshard.tables import GroupScalars, SegmentTable, StepTables, integers

Update = Callable[[], object]

LR, EPS, DECAY = 1e-3, 1e-8, 0.01
BETA1, BETA2 = 0.9, 0.999
HYPERPARAMETERS: dict[str, Any] = {"lr": LR, "weight_decay": DECAY}
SCALARS: dict[str, Any] = {
    "lr": LR,
    "beta1": BETA1,
    "beta2": BETA2,
    "weight_decay": DECAY,
    "eps": EPS,
    "amsgrad": False,
    "maximize": False,
}
TORCH, FOREACH, FOR_LOOP = (f"torch AdamW {kind}" for kind in ("fused", "foreach", "for-loop"))
TORCH_ON_FLAT = f"{TORCH}, our memory"
DEEPSPEED, TORCHAO = "DeepSpeedCPUAdam", "torchao AdamW8bit"
SMALL_TENSORS, LARGEST_SMALL = 1000, 10_000


@dataclass(frozen=True)
class Contender:
    """One implementation.

    Attributes:
        build: makes the update of some arrays.
        flat: it works on the flat memory, which all such contenders share; else on torch's.
        isa: the compiled variant that must be chosen before, if it matters.
    """

    name: str
    build: Callable[[Arrays], Update]
    flat: bool = False
    isa: str | None = None


def contenders(isas: Sequence[str | None], device: str = "cpu") -> list[Contender]:
    """``isas``: of fusedshard; none on a GPU, which has one kind of memory and no
    DeepSpeedCPUAdam."""
    on_cpu = device == "cpu"
    found = [Contender(our_name(isa), fusedshard_update, flat=True, isa=isa) for isa in isas]
    found.append(Contender(TORCH, torch_fused))
    if on_cpu:  # what is left to the kernel once the memory is equal
        found.append(Contender(TORCH_ON_FLAT, torch_fused, flat=True))
    found += [
        Contender(FOREACH, partial(torch_unfused, foreach=True)),
        Contender(FOR_LOOP, partial(torch_unfused, foreach=False)),
    ]
    if on_cpu and is_installed("deepspeed"):
        found.append(Contender(DEEPSPEED, deepspeed_update))
    return found


def our_name(isa: str | None) -> str:
    return "fusedshard" if isa is None else f"fusedshard {isa}"


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def whole_table(grad: torch.Tensor, itemsize: int) -> SegmentTable:
    """Of one parameter that is the shard, with so many bytes an element, ready to run."""
    segment = Segment(0, 0, 0, grad.numel())
    tables = StepTables([([segment], itemsize)], integers([0]), 1, grad.device)
    tables.set_groups([GroupScalars(**SCALARS, decoupled=True)])
    tables.set_used(integers([1]))
    tables.point_at_shards([grad])
    tables.upload()
    return tables.tables[0]


def shard_update(state: AdamState, grad: torch.Tensor) -> Update:
    """fusedshard's update of a shard that holds one parameter."""
    table, steps = whole_table(grad, state.param.itemsize), integers([0]).to(grad.device)

    def update() -> torch.Tensor:
        adam_(state, table, steps)
        steps.add_(1)
        return grad  # which the table only points at

    return update


def fusedshard_update(arrays: Arrays) -> Update:
    return shard_update(
        AdamState(arrays.param, arrays.exp_avg, arrays.exp_avg_sq, None), arrays.grad
    )


def torch_fused(arrays: Arrays) -> Update:
    """The kernel itself: what torch's functional form adds would weigh on small arrays."""
    steps = [torch.zeros((), device=arrays.param.device)]
    param, grad, exp_avg, exp_avg_sq = ([array] for array in arrays)

    def update() -> None:
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(param, grad, exp_avg, exp_avg_sq, [], steps, **SCALARS)

    return update


def torch_unfused(arrays: Arrays, *, foreach: bool) -> Update:
    lists, steps = [[array] for array in arrays], [torch.zeros(())]
    chosen = {"foreach": foreach, "fused": False}
    return lambda: adamw(*lists, [], steps, **chosen, **SCALARS)  # type: ignore[arg-type, misc]


def torch_step(implementation: str, params: Sequence[Parameter]) -> Update:
    """Of an optimizer. ``implementation``: torch's name of the option, or for-loop."""
    chosen = {"foreach": False} if implementation == "for-loop" else {implementation: True}
    return torch.optim.AdamW(params, **HYPERPARAMETERS | chosen).step


def deepspeed_optimizer(params: Sequence[Parameter]) -> Any:
    adam = importlib.import_module("deepspeed.ops.adam")  # an extra, which may not be there
    return adam.DeepSpeedCPUAdam(params, **HYPERPARAMETERS, adamw_mode=True)


@functools.cache
def _deepspeed() -> Any:
    """One optimizer for all arrays, which its native function gets with each call."""
    return deepspeed_optimizer([Parameter(torch.zeros(1))])


def deepspeed_update(arrays: Arrays) -> Update:
    optimizer, step = _deepspeed(), 0
    native, number = optimizer.ds_opt_adam.adam_update, optimizer.opt_id

    def update() -> None:
        nonlocal step
        step += 1
        native(number, step, LR, BETA1, BETA2, EPS, DECAY, True, *arrays)

    return update


def torchao_update(param: torch.Tensor, grad: torch.Tensor) -> Update:
    """Of 8-bit moments, which it keeps itself."""
    optim = importlib.import_module("torchao.optim")  # an extra, which may not be there
    parameter = Parameter(param)
    parameter.grad = grad
    step: Update = optim.AdamW8bit([parameter], **HYPERPARAMETERS).step
    return step


def small_parameters(device: str, tensors: int = SMALL_TENSORS) -> list[Parameter]:
    """The same random ones each time, with gradients."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, LARGEST_SMALL + 1, (tensors,), generator=generator).tolist()
    params = [Parameter(torch.randn(n, generator=generator).to(device)) for n in sizes]
    for param in params:
        param.grad = param.detach() * 0.1
    return params


def distance_from_fp64(
    update: Update, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], steps: int = 3
) -> float:
    """The largest difference of ``params`` from those of torch's for-loop AdamW in fp64, after so
    many first updates with the same gradients."""
    exact = [Parameter(param.detach().double()) for param in params]
    for reference, grad in zip(exact, grads, strict=True):
        reference.grad = grad.double()
    exact_step = torch_step("for-loop", exact)
    for _ in range(steps):
        update()
        exact_step()
    pairs = zip(params, exact, strict=True)
    return max((param.double() - reference).abs().max().item() for param, reference in pairs)
