"""Checked arguments of the optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fusedshard.kernels import MASTER_DTYPES
from fusedshard.params import Labelled, check_params
from fusedshard.precision import Precision

MODES = ("sharded", "replicated")
REDUCTIONS = ("auto", "ordered", "backend")
GRAD_SYNCS = ("backward", "step", "external")


@dataclass(frozen=True)
class ParallelOptions:
    """How the work is shared between ranks; the arguments that torch's optimizers lack."""

    mode: str
    process_group: dist.ProcessGroup | None
    reduction: str
    grad_sync: str
    bucket_cap_mb: float
    precision: Precision
    audit_every: int

    def check(self) -> None:
        """Raise ValueError for a value that is not among the allowed ones."""
        _check_choice("mode", self.mode, MODES)
        _check_choice("reduction", self.reduction, REDUCTIONS)
        _check_choice("grad_sync", self.grad_sync, GRAD_SYNCS)
        cap = self.bucket_cap_mb
        if not isinstance(cap, (int, float)) or not 0 < cap < float("inf"):
            raise ValueError(f"bucket_cap_mb: got {cap!r}, wanted a finite number above 0")
        self.precision.check()
        every = self.audit_every
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ValueError(f"audit_every: got {every!r}, wanted an integer, at least 0")

    def ordered(self, dtypes: Iterable[torch.dtype], *, preferred: bool) -> bool:
        """Whether our kernel adds the ranks' gradients of parameters of these ``dtypes``; "auto"
        leaves it to what is ``preferred``, unless a backend's sum would take twice the volume."""
        narrow = any(dtype in MASTER_DTYPES for dtype in dtypes)
        return narrow or preferred if self.reduction == "auto" else self.reduction == "ordered"

    @property
    def bucket_cap_bytes(self) -> int:
        return max(1, int(self.bucket_cap_mb * 1024 * 1024))

    @property
    def has_averages_after_backward(self) -> bool:
        """Whether ``p.grad`` is the average over the ranks when backward returns."""
        return self.grad_sync == "external" or (
            self.grad_sync == "backward" and self.mode == "replicated"
        )

    def described(self) -> dict[str, Any]:
        """What must be the same on every rank."""
        return {
            "mode": self.mode,
            "reduction": self.reduction,
            "grad_sync": self.grad_sync,
            "bucket_cap_mb": self.bucket_cap_mb,
            **self.precision.described(),
            "audit_every": self.audit_every,
        }


def check_hyperparameters(group: Mapping[str, Any]) -> None:
    """Raise ValueError for values that torch.optim.Adam refuses, in its words, and TypeError for
    what is no number."""
    lr, betas = group["lr"], group["betas"]
    for name in ("lr", "eps", "weight_decay"):
        _check_number(name, group[name])
    if isinstance(betas, str) or not isinstance(betas, Sequence):
        raise TypeError(f"betas: got {betas!r}, wanted two numbers")
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"lr: got a tensor of shape {tuple(lr.shape)}, wanted one element")
    if not lr >= 0.0:  # also refuses NaN
        raise ValueError(f"Invalid learning rate: {lr}")
    if not group["eps"] >= 0.0:
        raise ValueError(f"Invalid epsilon value: {group['eps']}")
    if len(betas) != 2:
        raise ValueError(f"betas: got {betas!r}, wanted two numbers")
    for index, beta in enumerate(betas):
        _check_number(f"betas[{index}]", beta)
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    if not group["weight_decay"] >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {group['weight_decay']}")
    if group["differentiable"]:
        raise ValueError("differentiable: got True, wanted False: the fused update has no gradient")


def check_groups(
    groups: Sequence[Mapping[str, Any]],
    first: int = 0,
    device: torch.device | None = None,
    known: Sequence[Labelled] = (),
) -> None:
    """Raise for param groups that cannot be taken: their parameters are numbered from ``first``
    in messages, and those that train must lie on ``device``, or on one, and apart from ``known``
    ones."""
    for group in groups:
        check_hyperparameters(group)
    check_params(groups, first, device, known)


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        return
    try:
        if isinstance(value, str):
            raise TypeError
        float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: got {value!r}, wanted a number") from None


def _check_choice(name: str, got: str, allowed: tuple[str, ...]) -> None:
    if got not in allowed:
        raise ValueError(f"{name}: got {got!r}, wanted one of {', '.join(map(repr, allowed))}")
