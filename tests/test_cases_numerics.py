"""Arithmetic of whole steps beside torch's, without torch.distributed and on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Rank, RankPool
from sides import Side, check_against_torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from training import (
    Factor,
    Variant,
    assert_same_bits,
    backward,
    each_external_variant,
    each_kind_and_mode,
    each_variant,
    each_variant_on,
    make_params,
)


def parameter(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values))


@each_variant_on(2, 1)
def test_num_05_building_is_no_step_and_one_step_is_one(
    ranks: RankPool, world_size: int, variant: Variant
) -> None:
    check_against_torch(ranks, world_size, variant, _num_05)


def _num_05(side: Side) -> list[Any]:
    params = make_params([(5,), (17, 257), (1,)])
    before = [p.detach().clone() for p in params]
    optimizer = side.build(params, weight_decay=0.1)
    assert_same_bits([p.detach() for p in params], before)
    assert not optimizer.state
    for step in range(2):
        optimizer.zero_grad()
        side.backward(params, step)
        optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [2.0, 2.0, 2.0]
    return [side.outcome(optimizer)]


@each_variant_on(2, 1)
def test_num_06_a_late_parameter_counts_its_own_steps(
    ranks: RankPool, world_size: int, variant: Variant
) -> None:
    (params, state), *_ = check_against_torch(ranks, world_size, variant, _num_06)
    assert params[1].item() == pytest.approx(0.9, abs=1e-6)
    assert (state["state"][0]["step"], state["state"][1]["step"]) == (5, 1)


def _num_06(side: Side) -> list[Any]:
    a, b = parameter(1.0), parameter(1.0)
    optimizer = side.build([a, b], lr=0.1, eps=1e-8, weight_decay=0.0)
    grad = torch.tensor([side.own([0.25, 0.75] if side.world_size == 2 else [0.5])])
    for step in range(5):
        optimizer.zero_grad()
        backward([a, b], [grad, grad if step == 4 else None])
        optimizer.step()
        assert (b in optimizer.state) == (step == 4)
    return [side.outcome(optimizer)]


@each_variant_on(2, 1)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_num_07_lr_as_a_tensor(
    ranks: RankPool, world_size: int, variant: Variant, shape: tuple[int, ...]
) -> None:
    """Changed in place, and replaced by a float; torch has floats."""
    check_against_torch(ranks, world_size, variant, _num_07_tensor, shape)


def _num_07_tensor(side: Side, shape: tuple[int, ...]) -> list[Any]:
    params, outcomes = side.params([(5, 3), (7,)]), []
    optimizer = side.build(params, lr=torch.full(shape, 0.25) if side.ours else 0.25)
    for step in range(5):
        if step == 3 and side.ours:
            optimizer.param_groups[0]["lr"].fill_(0.5)
        elif step == 3:
            optimizer.param_groups[0]["lr"] = 0.5
        if step == 4:
            optimizer.param_groups[0]["lr"] = 0.125
        optimizer.zero_grad()
        side.backward(params, step)
        optimizer.step()
        outcomes.append(side.outcome(optimizer))
    return outcomes


@each_kind_and_mode
def test_num_07_and_08_invalid_values_raise_everywhere(ranks: RankPool, variant: Variant) -> None:
    messages = (
        "lr: got a tensor of shape (2,), wanted one element",
        "Invalid learning rate: -1",
        "Invalid beta parameter at index 0: 1.0",
        "Invalid epsilon value: -1",
        "Invalid weight_decay value: -1",
    )
    for texts in ranks.run(2, _invalid, variant):
        for text, message in zip(texts, messages, strict=True):
            assert message in text


def _invalid(rank: Rank, variant: Variant) -> list[str]:
    texts = []
    for wrong in (
        {"lr": torch.ones(2)},
        {"lr": -1},
        {"betas": (1.0, 0.9)},
        {"eps": -1},
        {"weight_decay": -1},
    ):
        with pytest.raises(ValueError) as error:
            variant.ours([parameter(1.0)], rank, **wrong)
        texts.append(str(error.value))
    return texts


@each_variant_on(2, 1)
def test_num_07_scheduler_of_a_tensor_lr(
    ranks: RankPool, world_size: int, variant: Variant
) -> None:
    check_against_torch(ranks, world_size, variant, _num_07_lambda)


def _num_07_lambda(side: Side) -> list[Any]:
    (p,) = side.params([(4,)])
    optimizer = side.build([p], lr=torch.tensor(1.0) if side.ours else 1.0, eps=1.0)
    scheduler = LambdaLR(optimizer, lambda _: 0.5)
    read = []
    for step in range(4):
        optimizer.zero_grad()
        side.backward([p], step)
        optimizer.step()
        scheduler.step()
        read.append(float(optimizer.param_groups[0]["lr"]))
    assert read == [0.5, 0.5, 0.5, 0.5]
    return [side.outcome(optimizer)]


@each_variant_on(2, 1)
@pytest.mark.parametrize("name", ["StepLR", "ReduceLROnPlateau"])
def test_num_07_schedulers_act_at_the_next_step_on_each_group(
    ranks: RankPool, world_size: int, variant: Variant, name: str
) -> None:
    check_against_torch(ranks, world_size, variant, _num_07_schedulers, name)


def _num_07_schedulers(side: Side, name: str) -> list[Any]:
    params, outcomes = side.params([(5,), (7,)]), []
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.3}]
    optimizer = side.build(groups, lr=0.1, eps=1.0)
    step_lr = StepLR(optimizer, step_size=1, gamma=0.5)
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for step in range(4):
        optimizer.zero_grad()
        side.backward(params, step)
        optimizer.step()
        if name == "StepLR":
            step_lr.step()
        else:
            plateau.step(1.0)
        outcomes.append(side.outcome(optimizer))
    assert optimizer.param_groups[1]["lr"] < 0.1
    return outcomes


@each_variant_on(2, 1)
@pytest.mark.parametrize("betas", [(0.0, 0.9), (0.9, 0.0)])
def test_num_08_betas_of_zero(
    ranks: RankPool, world_size: int, variant: Variant, betas: tuple[float, float]
) -> None:
    ((params, _),) = check_against_torch(
        ranks, world_size, variant, _num_08, [1.0], [0.5], {"lr": 0.1, "betas": betas}
    )
    assert params[0].item() == pytest.approx(0.9, abs=1e-6)


@each_variant_on(2, 1)
def test_num_08_eps_of_zero(ranks: RankPool, world_size: int, variant: Variant) -> None:
    ((params, _),) = check_against_torch(ranks, world_size, variant, _num_08_eps)
    assert params[0].item() == pytest.approx(1.9, abs=1e-6)


def _num_08(side: Side, start: list[float], grad: list[float], hyper: dict[str, Any]) -> list[Any]:
    """One step by a gradient whose mean is given."""
    p = parameter(*start)
    optimizer = side.build([p], weight_decay=0.0, **hyper)
    factor = side.own([0.5, 1.5] if side.world_size == 2 else [1.0])
    backward([p], [torch.tensor(grad) * factor])
    optimizer.step()
    return [side.outcome(optimizer)]


def _num_08_eps(side: Side) -> list[Any]:
    """The second element; the first, whose gradient is 0, is NaN."""
    ((params, state),) = _num_08(side, [2.0, 2.0], [0.0, 1.0], {"lr": 0.1, "eps": 0.0})
    assert params[0][0].isnan() and params[0][1].isfinite()
    return [([params[0][1]], state)]


@each_variant_on(2, 1)
def test_num_08_lr_of_zero_moves_the_moments_alone(
    ranks: RankPool, world_size: int, variant: Variant
) -> None:
    ((params, state),) = check_against_torch(ranks, world_size, variant, _num_08_lr)
    assert_same_bits(params, [p.detach() for p in make_params([(17, 257)])])
    assert state["state"][0]["exp_avg"].all() and state["state"][0]["step"] == 3


def _num_08_lr(side: Side) -> list[Any]:
    params = side.params([(17, 257)])
    optimizer = side.build(params, lr=0.0, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        side.backward(params, step)
        optimizer.step()
    return [side.outcome(optimizer)]


@each_variant
def test_num_10_mean_is_taken_once(ranks: RankPool, variant: Variant) -> None:
    ((params, state),) = check_against_torch(ranks, 3, variant, _num_10)
    assert params[0].item() == pytest.approx(-0.75, abs=1e-6)
    assert state["state"][0]["exp_avg"].item() == pytest.approx(0.3, abs=1e-6)


@each_external_variant
def test_num_10_external_gradients_are_not_averaged_again(
    ranks: RankPool, variant: Variant
) -> None:
    ((params, state),) = check_against_torch(ranks, 3, variant, _num_10)
    assert params[0].item() == pytest.approx(-0.75, abs=1e-6)
    assert state["state"][0]["exp_avg"].item() == pytest.approx(0.3, abs=1e-6)


def _num_10(side: Side) -> list[Any]:
    model = Factor()
    forward: Any = model
    if side.ours and side.variant.grad_sync == "external":
        assert side.rank is not None
        forward = DistributedDataParallel(model, process_group=side.rank.group)
    optimizer = side.build(model.parameters(), lr=1.0, eps=1.0, weight_decay=0.0)
    side.descend(lambda rank: forward(torch.tensor([[1.0], [2.0], [6.0]][rank])))
    optimizer.step()
    return [side.outcome(optimizer)]
