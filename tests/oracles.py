"""Independent references for the update: plain torch operations, and torch.optim itself.

Run as a program (``python oracles.py IN OUT``) this gives torch's fused optimizers' answer to a
pickled list of `Problem`; `torch_fused_default` starts it, since torch chooses its instruction
set once a process.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusedshard.native import AdamState
from fusedshard.tables import GroupScalars


class Problem(NamedTuple):
    """A 1-D parameter, its hyperparameters, and one gradient a step."""

    group: GroupScalars
    param: torch.Tensor
    grads: list[torch.Tensor]


def fresh_state(param: torch.Tensor, amsgrad: bool = False) -> AdamState:
    """A copy of ``param`` with moments of zero."""
    third = torch.zeros_like(param) if amsgrad else None
    return AdamState(param.clone(), torch.zeros_like(param), torch.zeros_like(param), third)


def adam_reference_(
    state: AdamState, grad: torch.Tensor, group: GroupScalars, step: int, grad_scale: float = 1.0
) -> None:
    """One update in place, in the tensors' dtype, one rounding an operation.

    No torch operation here fuses a multiplication with an addition, so on fp32 tensors this says
    what the kernel's bits must be, and on fp64 tensors it is the reference for errors. Scalars
    are computed in double and rounded once by torch.
    """
    param, exp_avg, exp_avg_sq, max_exp_avg_sq = state[:4]
    assert isinstance(group.beta1, float) and isinstance(group.beta2, float)
    grad = grad * grad_scale
    if group.maximize:
        grad = -grad
    if group.decoupled:
        param.mul_(1 - group.lr * group.weight_decay)
    elif group.weight_decay != 0:
        grad = grad + param * group.weight_decay
    exp_avg.copy_(_interpolate(exp_avg, grad, 1 - group.beta1))
    exp_avg_sq.copy_(exp_avg_sq * group.beta2 + grad * (1 - group.beta2) * grad)
    if group.amsgrad:
        assert max_exp_avg_sq is not None
        exp_avg_sq = max_exp_avg_sq.copy_(torch.maximum(max_exp_avg_sq, exp_avg_sq))
    bias_correction1 = 1 - group.beta1**step
    bias_correction2 = 1 - group.beta2**step
    # torch's own fp32 root (MKL's) is not always the nearest number; rounded from fp64 it is.
    root = exp_avg_sq.double().sqrt().to(exp_avg_sq.dtype)
    denominator = root / math.sqrt(bias_correction2) + group.eps
    param.sub_(exp_avg * (group.lr / bias_correction1) / denominator)


def _interpolate(start: torch.Tensor, end: torch.Tensor, weight: float) -> torch.Tensor:
    """As torch.lerp without FMA: from the nearer of both ends, so that weight 1 gives `end`."""
    if weight < 0.5:
        return start + (end - start) * weight
    rest = 1 - torch.tensor(weight, dtype=start.dtype)
    return end - (end - start) * rest


def run_reference(problem: Problem, dtype: torch.dtype) -> AdamState:
    """All steps of a problem by `adam_reference_`."""
    state = fresh_state(problem.param.to(dtype), problem.group.amsgrad)
    for step, grad in enumerate(problem.grads, 1):
        adam_reference_(state, grad.to(dtype), problem.group, step)
    return state


def torch_optimizer(
    group: GroupScalars, params: Sequence[torch.nn.Parameter], **options: Any
) -> torch.optim.Optimizer:
    """torch's optimizer with these hyperparameters; options: ``fused``, ``foreach``."""
    kind = torch.optim.AdamW if group.decoupled else torch.optim.Adam
    return kind(
        params,
        lr=group.lr,
        betas=(group.beta1, group.beta2),
        eps=group.eps,
        weight_decay=group.weight_decay,
        amsgrad=group.amsgrad,
        maximize=group.maximize,
        **options,
    )


def run_torch(problem: Problem, **options: Any) -> AdamState:
    """All steps of a problem by torch.optim."""
    param = torch.nn.Parameter(problem.param.clone())
    optimizer = torch_optimizer(problem.group, [param], **options)
    for grad in problem.grads:
        param.grad = grad.clone()
        optimizer.step()
    state = optimizer.state[param]
    third = state.get("max_exp_avg_sq")
    return AdamState(param.detach(), state["exp_avg"], state["exp_avg_sq"], third)


def torch_fused_default(problems: Sequence[Problem], folder: Path) -> list[AdamState]:
    """torch's fused optimizers without vector instructions, in a process of their own."""
    given, answer = folder / "problems.pt", folder / "answers.pt"
    torch.save(list(problems), given)
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    command = [sys.executable, __file__, str(given), str(answer)]
    subprocess.run(command, env=environment, check=True, timeout=300)
    return torch.load(answer, weights_only=False)


def ordered_mean(chunks: Sequence[torch.Tensor]) -> torch.Tensor:
    """``(chunks[0] + chunks[1] + ...) / len(chunks)``, one rounding an operation."""
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    return total / torch.full_like(total, len(chunks))


EXPONENTS = tuple(f"exponents of {name}" for name in AdamState._fields[1:4])
# What to compare numbers of so many bytes as.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors of one dtype are equal byte for byte; NaN equals any NaN, since its
    payload is the processor's choice."""
    assert ours.dtype == theirs.dtype
    integers = INTEGERS[ours.itemsize]
    equal = ours.view(integers) == theirs.view(integers)
    return bool((equal | (ours.isnan() & theirs.isnan())).all())


def arrays_of(state: AdamState) -> dict[str, torch.Tensor]:
    """All arrays that a state has, by name."""
    named = [*zip(AdamState._fields[:5], state[:5], strict=True)]
    named += zip(EXPONENTS, state.exponents, strict=True)
    named.append(("checks", state.checks))
    return {name: array for name, array in named if isinstance(array, torch.Tensor)}


def with_array(state: AdamState, name: str, array: torch.Tensor) -> AdamState:
    """With another one in its place."""
    changed: Any = {name: array}
    return state._replace(**changed)


def same_state(ours: AdamState, theirs: AdamState) -> bool:
    """Whether all arrays of two states are equal byte for byte."""
    our, their = arrays_of(ours), arrays_of(theirs)
    return our.keys() == their.keys() and all(same_bits(our[name], their[name]) for name in our)


if __name__ == "__main__":
    capability = torch.backends.cpu.get_cpu_capability()
    assert capability in ("DEFAULT", "NO AVX"), capability
    loaded: list[Problem] = torch.load(sys.argv[1], weights_only=False)
    torch.save([run_torch(problem, fused=True) for problem in loaded], sys.argv[2])
