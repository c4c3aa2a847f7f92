"""Every scheduler of torch.optim.lr_scheduler on our optimizer: torch's rates and parameters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR
from training import gradient, make_params

import fusedshard

STEPS = 12
SHAPES = [(5,), (3, 4)]
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lrs.StepLR(o, step_size=3, gamma=0.5),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, milestones=[2, 5, 9], gamma=0.5),
    "ConstantLR": lambda o: lrs.ConstantLR(o, factor=0.25, total_iters=4),
    "LinearLR": lambda o: lrs.LinearLR(o, start_factor=0.25, total_iters=6),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, gamma=0.9),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, total_iters=8, power=2.0),
    "LambdaLR": lambda o: lrs.LambdaLR(o, [lambda n: 0.9**n, lambda n: 1 / (n + 1)]),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda n: 0.95),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, T_max=5, eta_min=1e-3),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, max_lr=[0.5, 1.0], total_steps=STEPS + 1),
    "OneCycleLR, betas as they are": lambda o: lrs.OneCycleLR(
        o, max_lr=0.5, total_steps=STEPS + 1, cycle_momentum=False
    ),
    "CyclicLR": lambda o: lrs.CyclicLR(o, base_lr=0.1, max_lr=0.4, step_size_up=3),
    "CyclicLR, exponential": lambda o: lrs.CyclicLR(
        o, base_lr=0.1, max_lr=0.4, step_size_up=3, mode="exp_range", gamma=0.9
    ),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=4), lrs.ExponentialLR(o, 0.9)], milestones=[4]
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, 0.1, total_iters=2), lrs.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=4),
}
each_scheduler = pytest.mark.parametrize("make", list(SCHEDULERS.values()), ids=list(SCHEDULERS))


def groups(params: list[torch.nn.Parameter], as_tensor: bool) -> list[dict[str, Any]]:
    """Each parameter alone, with a rate of its own."""
    rates = [torch.tensor(lr, dtype=torch.float64) if as_tensor else lr for lr in (0.1, 0.3)]
    return [{"params": [p], "lr": lr} for p, lr in zip(params, rates, strict=True)]


class Run:
    """Training under a scheduler, and what it did to the hyperparameters."""

    def __init__(self, optimizer: Any, make: Callable[[Any], Any]) -> None:
        self.optimizer, self.scheduler = optimizer, make(optimizer)
        self.hyper: list[list[tuple[float, ...]]] = []

    def steps(self, which: range) -> None:
        for step in which:
            for index, group in enumerate(self.optimizer.param_groups):
                (param,) = group["params"]
                param.grad = gradient(param, step, index, 0)
            self.optimizer.step()
            losses = [1.0] if isinstance(self.scheduler, lrs.ReduceLROnPlateau) else []
            self.scheduler.step(*losses)
            self.hyper.append(
                [(float(g["lr"]), *map(float, g["betas"])) for g in self.optimizer.param_groups]
            )


def params_of(run: Run) -> list[torch.Tensor]:
    return [p.detach() for group in run.optimizer.param_groups for p in group["params"]]


@each_scheduler
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_rates_betas_and_parameters_are_torchs(make: Any, as_tensor: bool, kind: str) -> None:
    """And so are the warnings: none that torch's optimizer does not get."""
    runs, messages = [], []
    for module in (fusedshard, torch.optim):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = getattr(module, kind)(groups(make_params(SHAPES), as_tensor))
            runs.append(Run(optimizer, make))
            runs[-1].steps(range(STEPS))
        messages.append([str(warning.message) for warning in caught])
    assert runs[0].hyper == runs[1].hyper
    assert len({rates[0] for rates in runs[0].hyper}) > 1
    assert messages[0] == messages[1]
    torch.testing.assert_close(params_of(runs[0]), params_of(runs[1]), rtol=0, atol=1e-6)


@each_scheduler
def test_resuming_with_a_scheduler_equals_not_stopping(make: Any) -> None:
    """Into new objects, the optimizer's state before the scheduler's or after it."""
    straight = Run(fusedshard.AdamW(groups(make_params(SHAPES), False)), make)
    straight.steps(range(5))
    saved = copy.deepcopy((params_of(straight), straight.optimizer.state_dict()))
    schedule = copy.deepcopy(straight.scheduler.state_dict())
    straight.steps(range(5, STEPS))
    for scheduler_first in (False, True):
        params = [torch.nn.Parameter(p.clone()) for p in saved[0]]
        resumed = Run(fusedshard.AdamW(groups(params, False)), make)
        if scheduler_first:
            resumed.scheduler.load_state_dict(copy.deepcopy(schedule))
        resumed.optimizer.load_state_dict(saved[1])
        if not scheduler_first:
            resumed.scheduler.load_state_dict(copy.deepcopy(schedule))
        resumed.steps(range(5, STEPS))
        assert resumed.hyper == straight.hyper[5:]
        for ours, theirs in zip(params_of(resumed), params_of(straight), strict=True):
            assert torch.equal(ours, theirs)
