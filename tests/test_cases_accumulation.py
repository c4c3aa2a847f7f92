"""Gradients that come from several backward passes, or reach a parameter more than once in one."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import Any

import pytest
import torch
from ranks import Rank, RankPool
from sides import HYPER, Side, check_against_torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
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

import fusedshard

MICRO_BATCHES = (1.0, 2.0, 4.0, 8.0)


@each_variant
@pytest.mark.parametrize("no_sync", [False, True])
def test_acc_01_every_micro_batch_counts_once(
    ranks: RankPool, variant: Variant, no_sync: bool
) -> None:
    for value in ranks.run(2, _acc_01, variant, no_sync):
        assert value == pytest.approx(-0.9574468, abs=1e-6)


@each_external_variant
@pytest.mark.parametrize("no_sync", [False, True])
def test_acc_01_of_a_wrapped_model(ranks: RankPool, variant: Variant, no_sync: bool) -> None:
    for value in ranks.run(2, _acc_01, variant, no_sync):
        assert value == pytest.approx(-0.9574468, abs=1e-6)


def _acc_01(rank: Rank, variant: Variant, no_sync: bool) -> float:
    """Sums of 15 and of 30: with eps=1 and lr=1 from 0 the step is -22.5 / 23.5."""
    model = Factor()
    forward: Any = model
    if variant.grad_sync == "external":
        forward = DistributedDataParallel(model, process_group=rank.group)
    optimizer = variant.ours(model.parameters(), rank, lr=1.0, eps=1.0, weight_decay=0.0)
    no_sync_of = forward.no_sync if variant.grad_sync == "external" else optimizer.no_sync
    for grad in MICRO_BATCHES:
        last = grad == MICRO_BATCHES[-1]
        with no_sync_of() if no_sync and not last else contextlib.nullcontext():
            forward(grad * (rank.rank + 1)).backward()
    optimizer.step()
    return model.weight.item()


@each_variant
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("between", ["nothing", "a step left out", "a step that a scaler skips"])
def test_acc_02_nothing_is_left_of_the_step_before(
    ranks: RankPool, variant: Variant, to_none: bool, between: str
) -> None:
    for exp_avg, exp_avg_sq, step in ranks.run(2, _acc_02, variant, to_none, between):
        assert exp_avg == pytest.approx(0.09, abs=1e-7)
        assert exp_avg_sq == pytest.approx(0.000999, abs=1e-9)
        assert step == 2


def _acc_02(
    rank: Rank, variant: Variant, to_none: bool, between: str
) -> tuple[float, float, float]:
    (param,) = make_params([(1,)])
    optimizer = variant.ours([param], rank, weight_decay=0.0)
    own = torch.tensor([0.5 + rank.rank])  # of mean 1
    backward([param], [own])
    optimizer.step()
    optimizer.zero_grad(set_to_none=to_none)
    if between == "a step left out":
        backward([param], [own * 7.0])
        optimizer.zero_grad(set_to_none=to_none)
    elif between == "a step that a scaler skips":
        scaler = fusedshard.GradScaler("cpu", init_scale=1024.0)
        backward([param], [own * (math.inf if rank.rank else 7.0)], scaler.scale(torch.ones(())))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=to_none)
    backward([param], [torch.zeros(1)])
    optimizer.step()
    state = optimizer.full_state_dict()["state"][0]
    return state["exp_avg"].item(), state["exp_avg_sq"].item(), state["step"].item()


def _batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(97 * step + rank)
    return torch.randn(4, 3, generator=generator).requires_grad_()


def _once(model: Any, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(_batch(step, rank)).square().mean()
    return loss


def _twice(model: Any, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(model(_batch(step, rank)).relu()).square().mean()
    return loss


def _recomputed(reentrant: bool, model: Any, step: int, rank: int) -> torch.Tensor:
    """Both uses of the model in stretches of their own, computed again in backward."""
    hidden = checkpoint(model, _batch(step, rank), use_reentrant=reentrant)
    output: torch.Tensor = checkpoint(model, hidden.relu(), use_reentrant=reentrant)
    return output.square().mean()


def _one_forward(side: Side, model: Any, step: int) -> None:
    side.descend(partial(_twice, model, step))


def _two_calls(side: Side, model: Any, step: int) -> None:
    side.descend(partial(_twice, model, step))
    side.descend(partial(_once, model, step + 50))


def _same_graph_again(side: Side, model: Any, step: int) -> None:
    loss = side.loss(partial(_twice, model, step))
    loss.backward(retain_graph=True)
    loss.backward()


def _some_inputs(side: Side, model: Any, step: int) -> None:
    """One parameter in each call; in the first step the bias gets nothing."""
    loss = side.loss(partial(_twice, model, step))
    loss.backward(inputs=[model.weight], retain_graph=True)
    if step > 0:
        loss.backward(inputs=[model.bias])


def _checkpointed(side: Side, model: Any, step: int) -> None:
    side.descend(partial(_recomputed, False, model, step))


def _reentrant(side: Side, model: Any, step: int) -> None:
    side.descend(partial(_recomputed, True, model, step))


@each_variant
@pytest.mark.parametrize(
    "way",
    [_one_forward, _two_calls, _same_graph_again, _some_inputs, _checkpointed, _reentrant],
    ids=lambda way: way.__name__,
)
def test_acc_03_a_module_that_is_used_more_than_once(
    ranks: RankPool, variant: Variant, way: Any
) -> None:
    check_against_torch(ranks, 2, variant, _acc_03, way)


def _acc_03(side: Side, way: Any) -> list[Any]:
    torch.manual_seed(0)
    model, outcomes = torch.nn.Linear(3, 3), []
    optimizer = side.build(model.parameters(), **HYPER)
    for step in range(3):
        optimizer.zero_grad()
        way(side, model, step)
        optimizer.step()
        outcomes.append(side.outcome(optimizer))
    return outcomes


@each_variant
def test_gradients_that_are_kept_after_a_step_count_again(
    ranks: RankPool, variant: Variant
) -> None:
    """Without zero_grad they add up, on every rank as in one process."""
    check_against_torch(ranks, 2, variant, _kept)


def _kept(side: Side) -> list[Any]:
    params, outcomes = side.params([(5,), (2, 3)]), []
    optimizer = side.build(params, **HYPER)
    for step in range(4):
        side.backward(params, step)
        optimizer.step()
        outcomes.append(side.outcome(optimizer))
    return outcomes


@each_variant
def test_an_error_in_backward_leaves_nothing_behind(ranks: RankPool, variant: Variant) -> None:
    check_against_torch(ranks, 2, variant, _failing_backward, [0, 1])


@each_kind_and_mode
def test_an_error_in_one_ranks_backward_leaves_nothing_behind(
    ranks: RankPool, variant: Variant
) -> None:
    check_against_torch(ranks, 2, variant, _failing_backward, [1])


def _failing_backward(side: Side, where: list[int]) -> list[Any]:
    """In the second of three: the script goes on with the next batch."""
    params, outcomes = side.params([(5,), (2, 3), (4,)]), []
    optimizer = side.build(params, **HYPER)

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("in backward")

    for step in range(3):
        optimizer.zero_grad()
        if step == 1:
            if side.number in where:
                handle = params[1].register_hook(fail)
                with pytest.raises(ArithmeticError, match="in backward"):
                    side.backward(params, step)
                handle.remove()
            continue
        side.backward(params, step)
        optimizer.step()
        outcomes.append(side.outcome(optimizer))
    return outcomes


@each_variant_on(2, 3)
def test_buckets_that_never_fill(ranks: RankPool, world_size: int, variant: Variant) -> None:
    """Each parameter is used by all ranks, by one of them, and by none, in turn; most span buckets
    or share one with others."""
    outcomes = check_against_torch(ranks, world_size, variant, _partly_used)
    before, after = outcomes[1], outcomes[2]
    assert_same_bits(before[0][0], after[0][0])  # which nobody used in the third step
    assert_same_bits(before[1]["state"][0], after[1]["state"][0])


def _partly_used(side: Side) -> list[Any]:
    params, outcomes = side.params([(200_001,), (10,), (70_003,), (200_001,), (20,)]), []
    optimizer = side.build(params, bucket_cap_mb=1e-6, **HYPER)
    if side.ours:
        assert optimizer.layout.bucket_count > 3
    for step in range(5):
        optimizer.zero_grad()
        users = [range(side.world_size), [1], []]
        grads = [
            side.partial_gradient(param, step, index, users[(step + index) % 3])
            for index, param in enumerate(params)
        ]
        backward(params, grads)
        optimizer.step()
        outcomes.append(side.outcome(optimizer))
    return outcomes
