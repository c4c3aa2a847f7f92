"""Gradients that are missing, late, sparse or of odd memory; parameters that are frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Rank, RankPool
from sides import Side, check_against_torch
from training import (
    MODES,
    Variant,
    assert_same_bits,
    backward,
    each_variant,
    each_variant_on,
    gradient,
    make_params,
)

import fusedshard


def snapshot(optimizer: fusedshard.Adam, params: list[torch.nn.Parameter]) -> Any:
    return [p.detach().clone() for p in params], optimizer.full_state_dict()["state"]


@each_variant
@pytest.mark.parametrize("user", [0, 1])
def test_lif_01_a_gradient_on_one_rank_counts_as_half(
    ranks: RankPool, variant: Variant, user: int
) -> None:
    for a, b, grad in ranks.run(2, _lif_01, variant, user):
        assert b == pytest.approx(-0.33333, abs=1e-5)  # the mean is 0.5
        assert a == pytest.approx(-0.5, abs=1e-6)  # both ranks have 1
        assert grad == (0.5 if variant.mode == "replicated" else None)


def _lif_01(rank: Rank, variant: Variant, user: int) -> tuple[float, float, float | None]:
    a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = variant.ours([a, b], rank, lr=1.0, eps=1.0, weight_decay=0.0)
    backward([a, b], [torch.ones(1), torch.ones(1) if rank.rank == user else None])
    optimizer.step()
    other = b.grad if rank.rank != user or variant.mode == "replicated" else None
    return a.item(), b.item(), None if other is None else other.item()


@each_variant
def test_lif_02_no_gradient_anywhere_leaves_all_bits(ranks: RankPool, variant: Variant) -> None:
    before, after, moved = check_against_torch(ranks, 2, variant, _lif_02)
    assert_same_bits(before[0][1], after[0][1])
    assert_same_bits(before[1]["state"][1], after[1]["state"][1])
    assert after[1]["state"][1]["step"] == 3 and after[1]["state"][0]["step"] == 6
    assert not torch.equal(before[0][0], after[0][0])
    # A zero gradient, in contrast, moves the weight and counts.
    assert not torch.equal(moved[0][1], after[0][1]) and moved[1]["state"][1]["step"] == 4


def _lif_02(side: Side) -> list[Any]:
    params, outcomes = side.params([(9,), (5, 3)]), []
    optimizer = side.build(params, lr=0.1, eps=1.0, weight_decay=0.1)
    for step in range(6):
        if step == 3:
            outcomes.append(side.outcome(optimizer))
        optimizer.zero_grad()
        side.backward(params, step, absent=[1] if step >= 3 else [])
        optimizer.step()
    outcomes.append(side.outcome(optimizer))
    optimizer.zero_grad()
    backward(params[1:], [torch.zeros(5, 3)])
    optimizer.step()
    return [*outcomes, side.outcome(optimizer)]


@each_variant
def test_lif_03_frozen_parameters_are_left_alone(ranks: RankPool, variant: Variant) -> None:
    ((params, state),) = check_against_torch(ranks, 2, variant, _lif_03)
    assert state["state"].keys() == {1}
    frozen = make_params([(100, 7), (300,), (10, 10)])
    assert torch.equal(params[0], frozen[0]) and torch.equal(params[2], frozen[2])


def _lif_03(side: Side) -> list[Any]:
    """As adapters are trained: most is frozen, and listed all the same."""

    def build(params: list[torch.nn.Parameter]) -> Any:
        for index in (0, 2):
            params[index].requires_grad_(False)
        return side.build(params, lr=0.1, eps=1.0, weight_decay=0.1)

    params = make_params([(100, 7), (300,), (10, 10)])
    optimizer = build(params)
    for step in range(7):
        if step == 5:
            state = side.full_state(optimizer)
            params = [torch.nn.Parameter(p.detach().clone()) for p in params]
            optimizer = build(params)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        side.backward(params, step, absent=[0, 2])
        optimizer.step()
    if side.ours:  # no memory for the frozen ones: 300 elements, 8 bytes each, and padding
        moments = 8 * 320 if side.variant.mode == "replicated" else 4 * 320
        assert (optimizer.layout.padded_numel, optimizer.memory()["moments"]) == (320, moments)
    return [side.outcome(optimizer)]


@each_variant_on(2, 3)
@pytest.mark.parametrize("everywhere", [True, False])
def test_lif_04_unfrozen_later_and_frozen_again(
    ranks: RankPool, world_size: int, variant: Variant, everywhere: bool
) -> None:
    """The second parameter is used by all ranks, or by rank 1 alone."""
    steps = check_against_torch(ranks, world_size, variant, _lif_04, everywhere)
    counts = [int(state["state"].get(1, {"step": 0})["step"]) for _, state in steps]
    assert counts == [0, 0, 0, 1, 2, 3, 3, 3]


def _lif_04(side: Side, everywhere: bool) -> list[Any]:
    params, outcomes = make_params([(5, 3), (7,)]), []
    params[1].requires_grad_(False)
    optimizer = side.build(params, lr=0.1, eps=1.0, weight_decay=0.1)
    for step in range(8):
        params[1].requires_grad_(3 <= step < 6)
        optimizer.zero_grad()
        grads: list[torch.Tensor | None] = [side.gradient(params[0], step, 0), None]
        if params[1].requires_grad:
            users = range(side.world_size) if everywhere else [1]
            grads[1] = side.partial_gradient(params[1], step, 1, users)
        backward(params, grads)
        optimizer.step()
        outcomes.append(side.outcome(optimizer))
    return outcomes


@each_variant
def test_a_step_without_any_gradient_is_a_no_op(ranks: RankPool, variant: Variant) -> None:
    """Also between others, and the ranks stay in step."""
    check_against_torch(ranks, 2, variant, _no_gradient)


def _no_gradient(side: Side) -> list[Any]:
    params, outcomes = side.params([(5, 3), (7,)]), []
    optimizer = side.build(params, lr=0.1, eps=1.0, weight_decay=0.1)
    for step in range(5):
        optimizer.zero_grad()
        side.backward(params, step, absent=() if step in (2, 4) else (0, 1))
        optimizer.step()
        outcomes.append(side.outcome(optimizer))
    assert_same_bits(outcomes[0][0], outcomes[1][0])
    assert_same_bits(outcomes[2], outcomes[3])
    assert not outcomes[1][1]["state"]
    return outcomes


@each_variant
@pytest.mark.parametrize("everywhere", [True, False])
def test_shp_09_sparse_gradients_raise_everywhere(
    ranks: RankPool, variant: Variant, everywhere: bool
) -> None:
    for text, unchanged in ranks.run(2, _shp_09, variant, everywhere):
        assert "parameter 0 ('embedding')" in text and "sparse" in text
        assert unchanged


def _shp_09(rank: Rank, variant: Variant, everywhere: bool) -> tuple[str, bool]:
    embedding = torch.nn.Embedding(5, 3, sparse=everywhere or rank.rank == 1)
    linear = torch.nn.Linear(3, 2)
    named = [("embedding", embedding.weight), ("weight", linear.weight)]
    optimizer = variant.ours(named, rank)
    before = [p.detach().clone() for _, p in named]
    linear(embedding(torch.tensor([rank.rank + 1, 2]))).sum().backward()
    assert linear.weight.grad is not None
    grad = linear.weight.grad.clone()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    same = all(torch.equal(p, b) for (_, p), b in zip(named, before, strict=True))
    same = same and torch.equal(grad, linear.weight.grad)
    return str(caught.value), same and not optimizer.state


@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_are_views_of_other_memory(ranks: RankPool, mode: str) -> None:
    """Expanded (elements share memory) and lazily negated ones count by their values."""
    for params, grads in ranks.run(2, _views, mode):
        assert params[0].tolist() == pytest.approx([-1.5 / 2.5] * 4, abs=1e-6)
        assert params[1].tolist() == pytest.approx([1.5 / 2.5] * 4, abs=1e-6)
        if mode == "replicated":
            assert [g.tolist() for g in grads] == [[1.5] * 4, [-1.5] * 4]


def _views(rank: Rank, mode: str) -> Any:
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    options: dict[str, Any] = {"lr": 1.0, "eps": 1.0, "mode": mode, "process_group": rank.group}
    optimizer = fusedshard.Adam(params, **options)
    value = torch.tensor(rank.rank + 1.0)
    params[0].grad = value.expand(4)
    params[1].grad = torch._neg_view(value.repeat(4))
    optimizer.step()
    grads = [p.grad.clone().resolve_neg() for p in params if p.grad is not None]
    return [p.detach().clone() for p in params], grads


@pytest.mark.parametrize("mode", MODES)
def test_hyperparameters_that_differ_between_ranks_raise_everywhere(
    ranks: RankPool, mode: str
) -> None:
    """As when each rank's scheduler sees its own loss."""
    for text, before, after in ranks.run(3, _unlike_lr, mode):
        assert text.startswith("param_groups[1]: lr is 0.002 on rank 2 and 0.001 on rank 0")
        assert_same_bits(before, after)


def _unlike_lr(rank: Rank, mode: str) -> Any:
    params = make_params([(5, 3), (7,)])
    groups = [{"params": [p]} for p in params]
    optimizer = fusedshard.AdamW(groups, mode=mode, process_group=rank.group)
    before = snapshot(optimizer, params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.param_groups[1]["lr"] = 2e-3 if rank.rank == 2 else 1e-3
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value), before, snapshot(optimizer, params)


def test_amsgrad_of_one_group_costs_the_others_nothing() -> None:
    params = make_params([(1 << 19,), (8, 8)])
    groups: list[dict[str, Any]] = [{"params": [p]} for p in params]
    optimizer = fusedshard.AdamW(groups, lr=0.1, eps=1.0, bucket_cap_mb=1)
    plain = optimizer.memory()["moments"]
    optimizer.param_groups[1]["amsgrad"] = True  # also after construction
    reference = torch.optim.AdamW([torch.nn.Parameter(params[1].detach().clone())], lr=0.1, eps=1.0)
    reference.param_groups[0]["amsgrad"] = True
    for step in range(3):
        for index, param in enumerate(params):
            param.grad = gradient(param, step, index, 0) * (3 - step)
        reference.param_groups[0]["params"][0].grad = params[1].grad
        reference.step()
        optimizer.step()
    assert optimizer.memory()["moments"] - plain == 8 * 8 * 4
    assert "max_exp_avg_sq" not in optimizer.state[params[0]]
    torch.testing.assert_close(
        optimizer.state[params[1]]["max_exp_avg_sq"],
        reference.state_dict()["state"][0]["max_exp_avg_sq"],
        rtol=0,
        atol=1e-6,
    )


@pytest.mark.parametrize("mode", MODES)
def test_frozen_parameters_may_be_of_any_dtype_until_they_thaw(ranks: RankPool, mode: str) -> None:
    """As when adapters train beside a frozen base in low precision."""
    for moved, frozen, text, unchanged in ranks.run(2, _frozen_base, mode):
        assert moved and frozen
        assert "parameter 0: got torch.float8_e5m2, wanted torch.float32" in text and unchanged


def _frozen_base(rank: Rank, mode: str) -> Any:
    base = torch.nn.Parameter(torch.ones(6).to(torch.float8_e5m2), requires_grad=False)
    (adapter,) = make_params([(5,)])
    before = adapter.detach().clone()
    optimizer = fusedshard.AdamW([base, adapter], mode=mode, process_group=rank.group)
    adapter.grad = torch.ones(5)
    optimizer.step()
    moved, frozen = not torch.equal(adapter, before), bool((base.float() == 1).all())
    base.requires_grad_(True)
    base.grad = torch.ones_like(base) if rank.rank == 1 else None
    stepped = adapter.detach().clone()
    with pytest.raises(TypeError) as caught:
        optimizer.step()
    unchanged = torch.equal(adapter, stepped) and optimizer.state[adapter]["step"].item() == 1
    return moved, frozen, str(caught.value), unchanged
