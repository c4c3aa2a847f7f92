"""Training scripts as data: options, gradients and what else users do between steps.

`play` runs one with our optimizer, on one rank of several; `play_torch` with torch's, in one
process that keeps every rank's gradients and feeds their mean.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ranks import Rank
from torch.optim.lr_scheduler import StepLR

import fusedshard

MAX_PARAMS = 9


@dataclass(frozen=True)
class Param:
    """``order``: the dimensions from the outermost in memory to the innermost."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    trains: bool


@dataclass(frozen=True)
class Group:
    """``tensors``: which of lr and betas are given as tensors."""

    params: tuple[Param, ...]
    options: dict[str, Any]
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Clip:
    """``chosen``: of each parameter whether it is clipped; empty: all, without naming them."""

    max_norm: float
    norm_type: float
    chosen: tuple[bool, ...]


@dataclass(frozen=True)
class Edit:
    group: int
    key: str
    value: Any
    as_tensor: bool


@dataclass(frozen=True)
class Step:
    """What a user does up to one step and with it.

    Attributes:
        grads: for each rank and parameter how it comes to its gradient: "none", "keep" (what is
            there), "zeros", "new" (assigned), "strided" (assigned, in an order of its own),
            "backward" (accumulated by autograd).
        zero_grad: before that: None, or ``set_to_none``.
        edits: hyperparameters that change before the step.
        toggled: parameters whose ``requires_grad`` does.
        added: a group that comes before the step.
        reload: "ours" or "torch": before the step the state goes into a new optimizer of ours,
            by way of torch's.
    """

    grads: tuple[tuple[str, ...], ...]
    zero_grad: bool | None = None
    edits: tuple[Edit, ...] = ()
    toggled: tuple[int, ...] = ()
    added: Group | None = None
    reload: str = ""
    clip: Clip | None = None
    in_closure: bool = False
    synchronize: bool = False


@dataclass(frozen=True)
class Script:
    kind: str
    groups: tuple[Group, ...]
    steps: tuple[Step, ...]
    gamma: float | None = None  # of a StepLR


@dataclass
class Trace:
    """What came of it: parameters, norms and learning rates by step, and the state at the end."""

    params: list[list[torch.Tensor]]
    norms: list[torch.Tensor]
    lrs: list[list[float]]
    state: dict[int, dict[str, torch.Tensor]]


def randn(spec: Param, *seed: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Numbers that depend on ``seed`` alone, in the memory order of ``spec`` or in ``order``."""
    order = tuple(spec.order if order is None else order)
    number = sum(s * 1009**place for place, s in enumerate(seed))
    values = torch.randn(spec.shape, generator=torch.Generator().manual_seed(number))
    inverse = [order.index(dim) for dim in range(len(order))]
    return values.to(spec.dtype).permute(order).contiguous().permute(inverse)


def new_gradient(kind: str, spec: Param, step: int, index: int, rank: int) -> torch.Tensor:
    if kind == "zeros":
        return torch.zeros_like(randn(spec))
    order = spec.order[::-1] if kind == "strided" else None
    return randn(spec, step + 1, index, rank, order=order)


class Play:
    """A script under way: the parameters, their groups and the optimizer."""

    def __init__(
        self, script: Script, make: Callable[..., torch.optim.Optimizer], seed: int, *, ours: bool
    ) -> None:
        self.script, self.ours, self._make, self._seed = script, ours, make, seed
        self.specs: list[Param] = []
        self.params: list[torch.nn.Parameter] = []
        groups = [self._admit(group) for group in script.groups]
        self.optimizer: Any = make(groups)
        self.schedule = self._new_schedule()
        self.trace = Trace([], [], [], {})

    def _admit(self, group: Group) -> dict[str, Any]:
        """As a param group, with the parameters made."""
        made = []
        for index, spec in enumerate(group.params, len(self.specs)):
            # Ranks begin apart where the first one's values are to win.
            values = randn(spec, 0, index, self._seed if spec.trains else 0)
            made.append(torch.nn.Parameter(self.cast(values), requires_grad=spec.trains))
        self.specs += group.params
        self.params += made
        options = {
            key: self._given(value, as_tensor=key in group.tensors)
            for key, value in group.options.items()
        }
        return {"params": made, **options}

    def cast(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def _given(self, value: Any, *, as_tensor: bool) -> Any:
        if not (as_tensor and self.ours):
            return value
        if isinstance(value, tuple):
            return tuple(torch.tensor(v, dtype=torch.float64) for v in value)
        return torch.tensor(value, dtype=torch.float64)

    def _new_schedule(self) -> StepLR | None:
        gamma = self.script.gamma
        return None if gamma is None else StepLR(self.optimizer, step_size=2, gamma=gamma)

    def prepare(self, step: Step) -> None:
        """All that comes before the gradients."""
        if step.added is not None:
            self.optimizer.add_param_group(self._admit(step.added))
        if step.reload and self.ours:
            self._reload(step.reload)
        for edit in step.edits:
            group = self.optimizer.param_groups[edit.group % len(self.optimizer.param_groups)]
            group[edit.key] = self._given(edit.value, as_tensor=edit.as_tensor)
        for group in self.optimizer.param_groups if not self.ours else ():
            if group["amsgrad"]:
                self._begin_amsgrad(group["params"])
        for index in step.toggled if self.params else ():
            param = self.params[index % len(self.params)]
            param.requires_grad_(not param.requires_grad)

    def _begin_amsgrad(self, params: Sequence[torch.Tensor]) -> None:
        """torch cannot begin it later by itself."""
        for param in params:
            state = self.optimizer.state.get(param)
            if state:
                state.setdefault("max_exp_avg_sq", torch.zeros_like(param))

    def _reload(self, way: str) -> None:
        """A new optimizer on copies of the parameters, as after a restart."""
        saved = copy.deepcopy(self.optimizer.full_state_dict())
        shares = [len(group["params"]) for group in self.optimizer.param_groups]
        if way == "torch":
            other = getattr(torch.optim, self.script.kind)(self._copies(shares))
            other.load_state_dict(saved)
            saved = copy.deepcopy(other.state_dict())
        groups = self._copies(shares)
        self.params = [param for group in groups for param in group["params"]]
        self.optimizer = self._make(groups)
        schedule, self.schedule = self.schedule, self._new_schedule()
        self.optimizer.load_state_dict(saved)
        if schedule is not None and self.schedule is not None:
            self.schedule.load_state_dict(schedule.state_dict())

    def _copies(self, shares: Sequence[int]) -> list[dict[str, Any]]:
        copies = []
        for param in self.params:
            copies.append(torch.nn.Parameter(param.detach().clone(), param.requires_grad))
            copies[-1].grad = None if param.grad is None else param.grad.clone()
        iterator = iter(copies)
        return [{"params": [next(iterator) for _ in range(share)]} for share in shares]

    def finish(self, step: Step) -> None:
        """All that comes after the step."""
        if self.schedule is not None:
            self.schedule.step()
        # Where gradients are scaled differs: at once, or by way of the update.
        if step.clip is not None:
            self.optimizer.zero_grad()
        self.trace.params.append([param.detach().clone() for param in self.params])
        self.trace.lrs.append([float(g["lr"]) for g in self.optimizer.param_groups])

    def chosen(self, clip: Clip) -> list[torch.nn.Parameter]:
        if not clip.chosen:
            return self.params
        chosen = (clip.chosen * len(self.params))[: len(self.params)]
        return [p for p, wanted in zip(self.params, chosen, strict=True) if wanted]


def play(rank: Rank | None, script: Script, grads_of_first: bool, options: dict[str, Any]) -> Trace:
    """On this rank (None: without torch.distributed), each with gradients of its own, unless all
    have those of the first."""
    number = 0 if rank is None or grads_of_first else rank.rank
    group = rank.group if rank else None

    def make(groups: Any) -> torch.optim.Optimizer:
        kind = getattr(fusedshard, script.kind)
        optimizer: torch.optim.Optimizer = kind(groups, process_group=group, **options)
        return optimizer

    run = Play(script, make, rank.rank if rank else 0, ours=True)
    for number_of_step, step in enumerate(script.steps):
        run.prepare(step)
        if step.zero_grad is not None:
            run.optimizer.zero_grad(set_to_none=step.zero_grad)

        def backward(run: Play = run, step: Step = step, t: int = number_of_step) -> None:
            make_gradients(run.params, run.specs, step.grads[number], t, number)

        if not step.in_closure:
            backward()
        if step.synchronize and not step.in_closure:
            run.optimizer.synchronize()
        if step.clip is not None:
            chosen = run.chosen(step.clip) if step.clip.chosen else None
            norm = run.optimizer.clip_grad_norm_(
                step.clip.max_norm, step.clip.norm_type, parameters=chosen
            )
            run.trace.norms.append(norm)
        run.optimizer.step(backward if step.in_closure else None)
        run.finish(step)
    run.trace.state = run.optimizer.full_state_dict()["state"]
    return run.trace


def make_gradients(
    params: Sequence[torch.nn.Parameter],
    specs: Sequence[Param],
    kinds: Sequence[str],
    step: int,
    rank: int,
) -> None:
    """As one rank comes to them."""
    loss: Any = 0
    for index, (param, spec) in enumerate(zip(params, specs, strict=True)):
        kind = kinds[index]
        if kind == "none":
            param.grad = None
        elif kind == "backward":
            if param.requires_grad:
                loss = loss + (param * new_gradient(kind, spec, step, index, rank)).sum().double()
        elif kind != "keep":
            param.grad = new_gradient(kind, spec, step, index, rank)
    if isinstance(loss, torch.Tensor):
        loss.backward()


class PlayTorch(Play):
    """Parameters may be wider than the script has them."""

    def __init__(self, script: Script, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        super().__init__(script, getattr(torch.optim, script.kind), 0, ours=False)

    def cast(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._dtype or values.dtype)


def play_torch(
    script: Script, world_size: int, *, leaves_means: bool, dtype: torch.dtype | None = None
) -> Trace:
    """The same with torch.optim in one process.

    Args:
        script: what to run.
        world_size: ranks whose gradients there are.
        leaves_means: whether after a step the gradient on each rank is the mean.
        dtype: of all parameters, instead of their own. Gradients and means always are of the
            script's.
    """
    run = PlayTorch(script, dtype)
    # For each rank a copy of each parameter, of which only the gradient is used.
    copies: list[list[torch.nn.Parameter]] = [[] for _ in range(world_size)]
    for number, step in enumerate(script.steps):
        run.prepare(step)
        for rank, owned in enumerate(copies):
            new = run.specs[len(owned) :]
            owned += [torch.nn.Parameter(torch.zeros_like(randn(spec))) for spec in new]
            for param, own in zip(run.params, owned, strict=True):
                own.requires_grad_(param.requires_grad)
                if step.zero_grad is not None and own.grad is not None:
                    own.grad = None if step.zero_grad else torch.zeros_like(own)
            make_gradients(owned, run.specs, step.grads[rank], number, rank)
        for param, *theirs in zip(run.params, *copies, strict=True):
            mean = mean_of([own.grad for own in theirs])
            param.grad = None if mean is None else mean.to(param.dtype)
            for own in theirs if leaves_means else ():
                own.grad = None if mean is None else mean.clone()
        if step.clip is not None:
            # torch has no infinity norm of an empty tensor.
            some = [p for p in run.chosen(step.clip) if p.numel()]
            norm = torch.nn.utils.clip_grad_norm_(some, step.clip.max_norm, step.clip.norm_type)
            run.trace.norms.append(norm)
            for own in itertools.chain(*copies):
                own.grad = None
        run.optimizer.step()
        run.finish(step)
    run.trace.state = run.optimizer.state_dict()["state"]
    return run.trace


def mean_of(grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Over all ranks, of whom some have none; added in rank order."""
    present = [grad for grad in grads if grad is not None]
    return sum(present[1:], present[0]) / len(grads) if present else None
