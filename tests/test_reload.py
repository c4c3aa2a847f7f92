"""Loading a state dict, whatever the optimizer has done before: training goes on as if it had not
stopped."""

from __future__ import annotations

import copy
from typing import Any

import torch
from ranks import RankPool
from sides import HYPER, Side, check_against_torch
from training import Shapes, Variant, assert_same_bits, each_variant_on

import fusedshard

SHAPES: Shapes = [(17, 25), (5,), (), (0,)]


@each_variant_on(2, 1, 3)
def test_loads_before_and_after_steps_and_twice(
    ranks: RankPool, world_size: int, variant: Variant
) -> None:
    straight = check_against_torch(ranks, world_size, variant, _train, "straight")
    for when in ("before steps", "after steps", "twice", "its own"):
        again = check_against_torch(ranks, world_size, variant, _train, when)
        assert_same_bits(again, straight, when)


def _steps(side: Side, optimizer: Any, params: Any, numbers: range) -> None:
    for step in numbers:
        optimizer.zero_grad()
        side.backward(params, step)
        optimizer.step()


def _train(side: Side, when: str) -> list[Any]:
    params = side.params(SHAPES)
    optimizer = side.build(params, amsgrad=True, **HYPER)
    _steps(side, optimizer, params, range(1))
    early = side.full_state(optimizer)
    _steps(side, optimizer, params, range(1, 3))
    state = side.full_state(optimizer)
    kept = copy.deepcopy(state)
    if when not in ("straight", "its own"):
        copies = [torch.nn.Parameter(torch.ones_like(param)) for param in params]
        optimizer = side.build(copies, amsgrad=True, lr=7.0)
        if when == "after steps":
            _steps(side, optimizer, copies, range(10, 15))
        if when == "twice":
            optimizer.load_state_dict(early)
        for param, value in zip(copies, params, strict=True):
            param.data.copy_(value.detach())
        params = copies
    if when != "straight":
        optimizer.load_state_dict(state)
    _steps(side, optimizer, params, range(3, 5))
    if side.ours:  # torch's keeps the tensors of the dict, and changes them
        assert_same_bits(state, kept)
    return [side.outcome(optimizer)]


def test_a_third_moment_stays_when_amsgrad_is_switched_off() -> None:
    """As torch keeps what a state dict has, whatever the groups say."""
    param, twin = (torch.nn.Parameter(torch.arange(5.0)) for _ in range(2))
    optimizer, other = (fusedshard.Adam([p], amsgrad=True) for p in (param, twin))
    param.grad = torch.linspace(1, 2, 5)
    optimizer.step()
    third = optimizer.state[param]["max_exp_avg_sq"].clone()
    optimizer.param_groups[0]["amsgrad"] = False
    other.load_state_dict(optimizer.state_dict())
    for loaded in (other.state_dict(), other.full_state_dict()):
        assert_same_bits(loaded["state"][0]["max_exp_avg_sq"], third)
    assert (third > 0).all()
