"""What happens to an optimizer, its model and its gradients between construction and the end."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from ranks import Rank, RankPool
from sides import EXTERNAL, HYPER, Side, check_against_torch
from torch.nn.parallel import DistributedDataParallel
from training import (
    Variant,
    assert_same_bits,
    backward,
    each_external_variant,
    each_kind_and_mode,
    each_variant,
    each_variant_on,
    gradient,
    make_params,
)


@each_variant_on(2, 3)
def test_lif_05_groups_added_after_steps(
    ranks: RankPool, world_size: int, variant: Variant
) -> None:
    check_against_torch(ranks, world_size, variant, _lif_05)


def _lif_05(side: Side) -> list[Any]:
    params, outcomes = side.params([(5, 7), (11,), (3,), (2, 2)]), []
    late: dict[str, Any] = {"lr": 0.01, "betas": (0.5, 0.6), "weight_decay": 0.5}
    optimizer = side.build(params[:2], **HYPER)
    for step in range(8):
        if step == 3:
            before = side.outcome(optimizer)
            optimizer.add_param_group({"params": params[2:], **late})
            after = side.outcome(optimizer)
            assert_same_bits(before[0], after[0][:2])
            assert_same_bits(before[1]["state"], after[1]["state"])
        if step == 6:
            state = side.full_state(optimizer)
            params = [torch.nn.Parameter(p.detach().clone()) for p in params]
            optimizer = side.build([{"params": params[:2]}, {"params": params[2:]}])
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        side.backward(params if step >= 3 else params[:2], step)
        optimizer.step()
        outcomes.append(side.outcome(optimizer))
    for repeated in (params[0], params[0] if side.number == 0 else make_params([(5, 7)])[0]):
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": [repeated]})
        assert len(optimizer.param_groups) == 2
    return outcomes


def wrapped(side: Side, model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """In DDP where gradients are averaged outside of the optimizer."""
    if not side.ours or side.variant.grad_sync != EXTERNAL:
        return model
    assert side.rank is not None
    return DistributedDataParallel(model, process_group=side.rank.group, **options)


def squares(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    """A loss on other data for each step and rank."""
    generator = torch.Generator().manual_seed(97 * step + rank)
    loss: torch.Tensor = model(torch.randn(4, 3, generator=generator)).square().mean()
    return loss


def small_model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


@each_variant
def test_lif_06_both_kinds_of_zero_grad(ranks: RankPool, variant: Variant) -> None:
    check_against_torch(ranks, 2, variant, _lif_06)


@each_external_variant
def test_lif_06_gradients_that_are_views_of_ddps_buckets(ranks: RankPool, variant: Variant) -> None:
    check_against_torch(ranks, 2, variant, _lif_06)


def _lif_06(side: Side) -> list[Any]:
    """The fifth step has the zeros that zero_grad left, which count as gradients."""
    model, outcomes = small_model(), []
    forward = wrapped(side, model, gradient_as_bucket_view=True)
    optimizer = side.build(model.parameters(), **HYPER)
    ways = [
        (optimizer.zero_grad, True),
        (partial(optimizer.zero_grad, set_to_none=False), False),
        (model.zero_grad, True),
        (partial(optimizer.zero_grad, set_to_none=True), True),
        (partial(optimizer.zero_grad, set_to_none=False), False),
        (partial(model.zero_grad, set_to_none=False), False),
    ]
    for step, (zero_grad, to_none) in enumerate([*ways, *ways]):
        zero_grad()
        for param in model.parameters():
            assert (param.grad is None) == (to_none or step == 0)
            assert param.grad is None or not param.grad.any()
        if step % len(ways) != 4:
            side.descend(partial(squares, forward, step))
        optimizer.step()
        outcomes.append(side.outcome(optimizer))
    return outcomes


@each_kind_and_mode
def test_lif_06_gradients_that_are_views(ranks: RankPool, variant: Variant) -> None:
    check_against_torch(ranks, 2, variant, _lif_06_views)


def _lif_06_views(side: Side) -> list[Any]:
    params, outcomes = side.params([(5,), (2, 3)]), []
    optimizer = side.build(params, **HYPER)
    for step in range(4):
        for index, param in enumerate(params):
            big = torch.full((3, param.numel()), torch.nan)
            big[1] = side.gradient(param, step, index).flatten()
            param.grad = big[1:2].reshape(param.shape)
        optimizer.step()
        outcomes.append(side.outcome(optimizer))
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return outcomes


@each_variant
def test_lif_09_closure_runs_once_with_gradients_enabled(ranks: RankPool, variant: Variant) -> None:
    check_against_torch(ranks, 2, variant, _lif_09)


def _lif_09(side: Side) -> list[Any]:
    model = small_model()
    optimizer = side.build(model.parameters(), **HYPER)
    losses: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        losses.append(side.descend(partial(squares, model, len(losses))))
        return losses[-1]

    for step in range(3):
        with torch.set_grad_enabled(step == 1):
            loss = optimizer.step(closure)
        assert len(losses) == step + 1 and loss is losses[-1]
    return [side.outcome(optimizer)]


@each_variant
@pytest.mark.parametrize("how", ["double", "clone"])
def test_lif_10_a_model_that_moved_raises_everywhere(
    ranks: RankPool, variant: Variant, how: str
) -> None:
    for text, unchanged in ranks.run(2, _moved, variant, how, [0, 1]):
        assert "parameter " in text and "model.to" in text and unchanged


@each_variant_on(2, 3)
@pytest.mark.parametrize("how", ["double", "clone", "resize"])
def test_lif_10_and_dst_07_a_parameter_that_moved_on_one_rank(
    ranks: RankPool, world_size: int, variant: Variant, how: str
) -> None:
    for rank, (text, unchanged) in enumerate(ranks.run(world_size, _moved, variant, how, [1])):
        assert "parameter " in text and "model.to" in text and unchanged
        assert ("on rank 1: " in text) == (rank != 1)


def _moved(rank: Rank, variant: Variant, how: str, where: list[int]) -> tuple[str, bool]:
    model = small_model()
    optimizer = variant.ours(model.parameters(), rank)
    if rank.rank in where and how == "double":
        model.double()
    elif rank.rank in where:
        model.bias.data = torch.zeros(6) if how == "resize" else model.bias.data.clone()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError) as caught:
        (model.weight.square().sum() + model.bias.square().sum()).backward()
        optimizer.step()
    same = all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    return str(caught.value), same and not optimizer.state


@each_variant
@pytest.mark.parametrize("steps_before", [0, 2])
def test_lif_11_weights_that_are_loaded_later(
    ranks: RankPool, variant: Variant, steps_before: int
) -> None:
    ((params, _),) = check_against_torch(ranks, 2, variant, _lif_11, steps_before)
    assert params[0].item() == pytest.approx(4.9, abs=1e-6)


def _lif_11(side: Side, steps_before: int) -> list[Any]:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = side.build(model.parameters(), lr=0.1, weight_decay=0.0)
    for step in range(steps_before + 1):
        if step == steps_before:
            model.load_state_dict({"weight": torch.tensor([[5.0]])})
        optimizer.zero_grad()
        (model.weight * side.own([0.25, 0.75])).sum().backward()
        optimizer.step()
    return [side.outcome(optimizer)]


@each_kind_and_mode
def test_lif_12_gradients_that_are_edited_before_the_step(
    ranks: RankPool, variant: Variant
) -> None:
    check_against_torch(ranks, 2, variant, _lif_12)


def _lif_12(side: Side) -> list[Any]:
    params, outcomes = side.params([(3,), (4, 5), (6,), (7,)]), []
    optimizer = side.build(params, **HYPER)
    for step in range(2):
        optimizer.zero_grad()
        side.backward(params, step)
        for index, param in enumerate(params):
            assert_same_bits(param.grad, side.gradient(param, step, index))
        halved, with_row, _, _ = (p.grad for p in params)
        assert halved is not None and with_row is not None
        halved.mul_(0.5)
        with_row[2] = 0.0
        params[2].grad = None
        params[3].grad = torch.full((7,), side.own([1.0, 3.0]))
        optimizer.step()
        outcomes.append(side.outcome(optimizer))
    assert outcomes[-1][1]["state"].keys() == {0, 1, 3}
    return outcomes


@each_variant
@pytest.mark.parametrize("kind", ["tensor", "accumulation"])
def test_hooks_of_the_users_count(ranks: RankPool, variant: Variant, kind: str) -> None:
    """On gradients, and on parameters whose gradient is there; set before the optimizer."""
    check_against_torch(ranks, 2, variant, _user_hooks, kind)


def _user_hooks(side: Side, kind: str) -> list[Any]:
    params = side.params([(3,), (4, 5)])

    def halve(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    if kind == "tensor":
        params[0].register_hook(lambda grad: grad * 3.0)
    else:
        params[0].register_post_accumulate_grad_hook(halve)
    optimizer = side.build(params, **HYPER)
    for step in range(2):
        optimizer.zero_grad()
        side.backward(params, step)
        optimizer.step()
    return [side.outcome(optimizer)]


def resident_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))


@each_variant_on(2, 1)
def test_lif_13_nothing_keeps_the_model_alive(
    ranks: RankPool, world_size: int, variant: Variant
) -> None:
    if world_size == 1:
        results = [_lif_13(None, variant)]
    else:
        results = ranks.run(world_size, _lif_13, variant)
    for alive, resident in results:
        assert alive == 0
        assert resident[19] < 1.05 * resident[4]


def _lif_13(rank: Rank | None, variant: Variant) -> tuple[int, list[int]]:
    """Of 4 MB of parameters, built 20 times: how many live on; resident bytes after each."""
    references, resident = [], []
    gc.freeze()  # all that torch's modules hold need not be looked through 20 times
    for _ in range(20):
        model = torch.nn.Linear(1000, 1000)
        optimizer = variant.ours(model.parameters(), rank)
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
        references.append(weakref.ref(next(model.parameters())))
        del model, optimizer
        gc.collect()
        resident.append(resident_bytes())
    gc.unfreeze()
    return sum(reference() is not None for reference in references), resident


@each_variant
def test_hyperparameters_that_are_edited_act_at_the_next_step(
    ranks: RankPool, variant: Variant
) -> None:
    check_against_torch(ranks, 2, variant, _edited)


def _edited(side: Side) -> list[Any]:
    params, outcomes = side.params([(5,), (7,)]), []
    optimizer = side.build([{"params": [p]} for p in params], **HYPER)
    edits: list[dict[str, Any]] = [
        {},
        {"lr": 0.5},
        {"betas": (0.5, 0.6)},
        {"eps": 0.1},
        {"weight_decay": 0.5},
        {"maximize": True},
    ]
    for step, edit in enumerate(edits):
        optimizer.param_groups[step % 2].update(edit)
        optimizer.zero_grad()
        side.backward(params, step)
        optimizer.step()
        outcomes.append(side.outcome(optimizer))
    return outcomes


@each_variant
def test_what_is_not_the_optimizers_stays_the_ranks_own(ranks: RankPool, variant: Variant) -> None:
    """A parameter of another optimizer, with its gradient, and the statistics of a BatchNorm."""
    results = ranks.run(2, _others, variant)
    for grad, expected, mean, expected_mean in results:
        assert_same_bits(grad, expected)
        assert_same_bits(mean, expected_mean)
    assert not torch.equal(results[0][0], results[1][0])
    assert not torch.equal(results[0][2], results[1][2])


def _others(rank: Rank, variant: Variant) -> list[torch.Tensor]:
    ours, others = make_params([(5,)]), make_params([(4,)])
    norm, twin = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    optimizer = variant.ours([*ours, *norm.parameters()], rank)
    x = gradient(torch.empty(8, 3), 0, 0, rank.rank)
    grads = [gradient(p, 0, 1, rank.rank) for p in (*ours, *others)]
    twin(x)
    norm(x).square().mean().backward()
    backward([*ours, *others], grads)
    optimizer.step()
    assert others[0].grad is not None
    assert norm.running_mean is not None and twin.running_mean is not None
    return [others[0].grad, grads[1], norm.running_mean, twin.running_mean]
