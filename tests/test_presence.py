"""Gradients that are missing, late, sparse or frozen; parameters that moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Rank, RankPool
from training import assert_same_bits, gradient, make_params, mean_gradient

import fusedshard

MODES = ("sharded", "replicated")


def snapshot(optimizer: fusedshard.Adam, params: list[torch.nn.Parameter]) -> Any:
    return [p.detach().clone() for p in params], optimizer.full_state_dict()["state"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("user", [0, 1])
def test_lif_01_a_gradient_on_one_rank_counts_as_half(
    ranks: RankPool, mode: str, user: int
) -> None:
    for a, b, grad in ranks.run(2, _lif_01, mode, user):
        assert b == pytest.approx(-1 / 3, abs=1e-6)  # the mean is 0.5
        assert a == pytest.approx(-1 / 2, abs=1e-6)  # both ranks have 1
        assert grad == (0.5 if mode == "replicated" else None)


def _lif_01(rank: Rank, mode: str, user: int) -> tuple[float, float, float | None]:
    a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = fusedshard.Adam([a, b], lr=1.0, eps=1.0, mode=mode, process_group=rank.group)
    a.grad = torch.ones(1)
    b.grad = torch.ones(1) if rank.rank == user else None
    optimizer.step()
    other = b.grad if rank.rank != user or mode == "replicated" else None
    return a.item(), b.item(), None if other is None else other.item()


@pytest.mark.parametrize("mode", MODES)
def test_lif_02_no_gradient_anywhere_leaves_all_bits(ranks: RankPool, mode: str) -> None:
    for before, after, moved in ranks.run(2, _lif_02, mode):
        assert_same_bits(before[0][1], after[0][1])
        assert_same_bits(before[1][1], after[1][1])
        assert after[1][1]["step"] == 3 and after[1][0]["step"] == 6
        assert not torch.equal(before[0][0], after[0][0])
        # A zero gradient, in contrast, decays the weight and counts.
        assert not torch.equal(moved[0][1], after[0][1]) and moved[1][1]["step"] == 4


def _lif_02(rank: Rank, mode: str) -> Any:
    params = make_params([(9,), (5, 3)])
    options: dict[str, Any] = {"weight_decay": 0.1, "mode": mode, "process_group": rank.group}
    optimizer = fusedshard.AdamW(params, **options)
    before = None
    for step in range(6):
        if step == 3:
            before = snapshot(optimizer, params)
        params[0].grad = gradient(params[0], step, 0, rank.rank)
        params[1].grad = gradient(params[1], step, 1, rank.rank) if step < 3 else None
        optimizer.step()
    after = snapshot(optimizer, params)
    params[1].grad = torch.zeros(5, 3)
    optimizer.step()
    return before, after, snapshot(optimizer, params)


@pytest.mark.parametrize("mode", MODES)
def test_lif_03_frozen_parameters_are_left_alone(ranks: RankPool, mode: str) -> None:
    for before, after, moment_bytes, padded in ranks.run(2, _lif_03, mode):
        for index in (0, 2):
            assert torch.equal(before[index], after[0][index])
        assert not torch.equal(before[1], after[0][1])
        assert after[1].keys() == {1}
        # No memory for frozen ones: 300 elements, 8 bytes each, and padding.
        assert moment_bytes == (8 * padded if mode == "replicated" else 4 * padded)
        assert padded == 320


def _lif_03(rank: Rank, mode: str) -> Any:
    params = make_params([(100, 7), (300,), (10, 10)])
    params[0].requires_grad_(False)
    params[2].requires_grad_(False)
    options: dict[str, Any] = {"weight_decay": 0.1, "mode": mode, "process_group": rank.group}
    optimizer = fusedshard.AdamW(params, **options)
    before = [p.detach().clone() for p in params]
    for step in range(5):
        params[1].grad = gradient(params[1], step, 1, rank.rank)
        optimizer.step()
    return (
        before,
        snapshot(optimizer, params),
        optimizer.memory()["moments"],
        optimizer.layout.padded_numel,
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("everywhere", [True, False])
def test_lif_04_unfrozen_later_and_frozen_again(
    ranks: RankPool, mode: str, everywhere: bool
) -> None:
    results = ranks.run(3, _lif_04, mode, everywhere)
    params = make_params([(5, 3), (7,)])
    params[1].requires_grad_(False)
    reference = torch.optim.AdamW(params, lr=0.1, eps=1.0)
    for step in range(8):
        params[1].requires_grad_(3 <= step < 6)
        for index, param in enumerate(params):
            used = [0, 1, 2] if everywhere or index == 0 else [1]
            total = torch.stack([gradient(param, step, index, rank) for rank in used]).sum(0)
            param.grad = total / 3 if param.requires_grad else None
        reference.step()
        for result in results:
            for ours, expected in zip(result[step][0], params, strict=True):
                torch.testing.assert_close(ours, expected.detach(), rtol=0, atol=1e-6)
            steps = {index: state["step"].item() for index, state in result[step][1].items()}
            assert steps == {
                index: reference.state[p]["step"].item()
                for index, p in enumerate(params)
                if p in reference.state
            }


def _lif_04(rank: Rank, mode: str, everywhere: bool) -> Any:
    params = make_params([(5, 3), (7,)])
    params[1].requires_grad_(False)
    options: dict[str, Any] = {"lr": 0.1, "eps": 1.0, "mode": mode, "process_group": rank.group}
    optimizer = fusedshard.AdamW(params, **options)
    results = []
    for step in range(8):
        params[1].requires_grad_(3 <= step < 6)
        for index, param in enumerate(params):
            has_one = everywhere or index == 0 or rank.rank == 1
            grad = gradient(param, step, index, rank.rank)
            param.grad = grad if param.requires_grad and has_one else None
        optimizer.step()
        results.append(snapshot(optimizer, params))
    return results


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_any_gradient_is_a_no_op(ranks: RankPool, mode: str) -> None:
    for before, after, state in ranks.run(2, _no_gradient, mode):
        assert_same_bits(before, after)
        assert state == {}


def _no_gradient(rank: Rank, mode: str) -> Any:
    params = make_params([(5, 3), (7,)])
    optimizer = fusedshard.AdamW(params, mode=mode, process_group=rank.group)
    before = [p.detach().clone() for p in params]
    optimizer.step()
    optimizer.step()
    return before, [p.detach().clone() for p in params], dict(optimizer.state)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("everywhere", [True, False])
def test_shp_09_sparse_gradients_raise_everywhere(
    ranks: RankPool, mode: str, everywhere: bool
) -> None:
    for text, unchanged in ranks.run(2, _shp_09, mode, everywhere):
        assert "parameter 0 ('embedding')" in text and "sparse" in text
        assert unchanged


def _shp_09(rank: Rank, mode: str, everywhere: bool) -> tuple[str, bool]:
    embedding = torch.nn.Embedding(5, 3, sparse=everywhere or rank.rank == 1)
    linear = torch.nn.Linear(3, 2)
    named = [("embedding", embedding.weight), ("weight", linear.weight)]
    optimizer = fusedshard.AdamW(named, mode=mode, process_group=rank.group)
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
@pytest.mark.parametrize("how", ["double", "clone", "resize"])
def test_lif_10_and_dst_07_moved_parameters_raise_everywhere(
    ranks: RankPool, mode: str, how: str
) -> None:
    for text, unchanged in ranks.run(2, _lif_10, mode, how):
        assert "parameter 1" in text and "model.to" in text
        assert unchanged


def _lif_10(rank: Rank, mode: str, how: str) -> tuple[str, bool]:
    params = make_params([(5, 3), (7,)])
    optimizer = fusedshard.AdamW(params, mode=mode, process_group=rank.group)
    if rank.rank == 1:
        moved = params[1].detach().clone()
        values = {"double": moved.double(), "clone": moved, "resize": torch.zeros(6)}
        params[1].data = values[how]
    before = [p.detach().clone() for p in params]
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    same = all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    return str(caught.value), same and not optimizer.state


@pytest.mark.parametrize("mode", MODES)
def test_lif_05_groups_added_after_steps(ranks: RankPool, mode: str) -> None:
    results = ranks.run(3, _lif_05, mode)
    params = make_params([(5, 7), (11,), (3,)])
    reference = torch.optim.AdamW(params[:2], lr=0.1, eps=1.0)
    for step in range(6):
        if step == 3:
            reference.add_param_group({"params": params[2:], "lr": 0.01, "betas": (0.5, 0.6)})
        for index, param in enumerate(params):
            param.grad = mean_gradient(param, step, index, 3)
        reference.step()
    for kept, added, refused, count in results:
        assert_same_bits(kept[0], kept[1])
        assert "more than one parameter group" in refused and count == 2
        for ours, expected in zip(added[0], params, strict=True):
            torch.testing.assert_close(ours, expected.detach(), rtol=0, atol=1e-6)
        for index, param in enumerate(params):
            assert added[1][index]["step"] == reference.state[param]["step"]


def _lif_05(rank: Rank, mode: str) -> Any:
    params = make_params([(5, 7), (11,), (3,)])
    options: dict[str, Any] = {"lr": 0.1, "eps": 1.0, "mode": mode, "process_group": rank.group}
    optimizer = fusedshard.AdamW(params[:2], **options)
    kept: Any = None
    for step in range(6):
        if step == 3:
            before = snapshot(optimizer, params[:2])
            optimizer.add_param_group({"params": params[2:], "lr": 0.01, "betas": (0.5, 0.6)})
            kept = before, snapshot(optimizer, params[:2])
        for index, param in enumerate(params):
            param.grad = gradient(param, step, index, rank.rank)
        optimizer.step()
    with pytest.raises(ValueError) as caught:
        repeated = params[0] if rank.rank == 1 else make_params([(5, 7)])[0]
        optimizer.add_param_group({"params": [repeated]})
    return kept, snapshot(optimizer, params), str(caught.value), len(optimizer.param_groups)


@pytest.mark.parametrize("mode", MODES)
def test_lif_06_both_kinds_of_zero_grad(ranks: RankPool, mode: str) -> None:
    results = ranks.run(2, _lif_06, mode)
    (param,) = make_params([(5,)])
    reference = torch.optim.AdamW([param], lr=0.1, eps=1.0)
    for step in range(4):
        param.grad = mean_gradient(param, step, 0, 2) if step != 2 else torch.zeros(5)
        reference.step()
    for ours, grads in results:
        torch.testing.assert_close(ours, param.detach(), rtol=0, atol=1e-6)
        assert grads == [None, 0.0]


def _lif_06(rank: Rank, mode: str) -> Any:
    (param,) = make_params([(5,)])
    options: dict[str, Any] = {"lr": 0.1, "eps": 1.0, "mode": mode, "process_group": rank.group}
    optimizer = fusedshard.AdamW([param], **options)
    grads = []
    for step in range(4):
        if step != 2:
            big = gradient(torch.empty(3, 5), step, 0, rank.rank)
            big[1] = gradient(param, step, 0, rank.rank)
            param.grad = big[1:2].reshape(5)  # a view into another tensor
        optimizer.step()
        if step in (0, 1):
            optimizer.zero_grad(set_to_none=step == 0)
            grads.append(None if param.grad is None else param.grad.abs().sum().item())
    return param.detach().clone(), grads


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
def test_lif_09_closure_runs_once_with_gradients_enabled(ranks: RankPool, mode: str) -> None:
    for calls, loss, param in ranks.run(2, _lif_09, mode):
        assert calls == 1
        assert loss in (2.0, 4.0)
        assert param == pytest.approx(1 - 3 / 4, abs=1e-6)  # mean gradient 3, eps=1, lr=1


def _lif_09(rank: Rank, mode: str) -> tuple[int, float, float]:
    param = torch.nn.Parameter(torch.ones(1))
    options: dict[str, Any] = {"lr": 1.0, "eps": 1.0, "mode": mode, "process_group": rank.group}
    optimizer = fusedshard.Adam([param], **options)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (param * 2.0 * (rank.rank + 1)).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    return len(calls), loss.item(), param.item()


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
        assert "parameter 0: got torch.bfloat16, wanted torch.float32" in text and unchanged


def _frozen_base(rank: Rank, mode: str) -> Any:
    base = torch.nn.Parameter(torch.ones(6, dtype=torch.bfloat16), requires_grad=False)
    (adapter,) = make_params([(5,)])
    before = adapter.detach().clone()
    optimizer = fusedshard.AdamW([base, adapter], mode=mode, process_group=rank.group)
    adapter.grad = torch.ones(5)
    optimizer.step()
    moved, frozen = not torch.equal(adapter, before), bool((base == 1).all())
    base.requires_grad_(True)
    base.grad = torch.ones_like(base) if rank.rank == 1 else None
    stepped = adapter.detach().clone()
    with pytest.raises(TypeError) as caught:
        optimizer.step()
    unchanged = torch.equal(adapter, stepped) and optimizer.state[adapter]["step"].item() == 1
    return moved, frozen, str(caught.value), unchanged
