"""Everything that others rely on in a torch.optim.Optimizer, and in its parameters."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from oracles import same_bits
from ranks import Rank, RankPool
from training import Variant, assert_same_bits, each_variant, make_params

import fusedshard

SHAPES = [(5,), (3, 4), (0,), ()]


def step_with_ones(
    optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], count: int = 1
) -> None:
    for _ in range(count):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()


def test_cmp_04_attributes_before_and_after_steps() -> None:
    params = make_params(SHAPES)
    optimizer = fusedshard.AdamW(params, lr=0.5)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, fusedshard.Adam)
    assert optimizer.defaults["lr"] == 0.5
    for steps in (0, 2):
        step_with_ones(optimizer, params, steps)
        assert [group["params"] for group in optimizer.param_groups] == [params]
        assert len(optimizer.state) == (len(params) if steps else 0)
        for p, state in optimizer.state.items():
            assert [*state] == ["step", "exp_avg", "exp_avg_sq"]
            assert all(isinstance(value, torch.Tensor) for value in state.values())
            assert state["step"] == steps and state["step"].shape == ()
            for name in ("exp_avg", "exp_avg_sq"):
                assert (state[name].shape, state[name].dtype) == (p.shape, p.dtype)
        assert "AdamW" in repr(optimizer) and "lr: 0.5" in repr(optimizer)


def test_cmp_04_state_shows_the_live_moments() -> None:
    (p,) = make_params([(4, 3)])
    optimizer = fusedshard.Adam([p], betas=(0.5, 0.5))
    step_with_ones(optimizer, [p])
    state = optimizer.state[p]
    step_with_ones(optimizer, [p])
    assert optimizer.state[p] is state
    assert torch.equal(state["exp_avg"], torch.full((4, 3), 0.75))
    state["exp_avg"].zero_()
    step_with_ones(optimizer, [p])
    assert torch.equal(state["exp_avg"], torch.full((4, 3), 0.5))


HOOKS = [
    "register_step_pre_hook",
    "register_step_post_hook",
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
]


@pytest.mark.parametrize("register", HOOKS)
def test_cmp_04_hooks(register: str) -> None:
    params = make_params([(3,)])
    optimizer = fusedshard.Adam(params)
    calls = []
    handle = getattr(optimizer, register)(lambda optimizer, *_: calls.append(optimizer))

    def use_all() -> None:
        step_with_ones(optimizer, params)
        optimizer.load_state_dict(optimizer.state_dict())

    use_all()
    assert len(calls) == 1 and calls[0] is optimizer
    handle.remove()
    use_all()
    assert len(calls) == 1


@each_variant
def test_cmp_04_on_every_rank(ranks: RankPool, variant: Variant) -> None:
    owned = ranks.run(2, _on_every_rank, variant)
    whole = [6, 2, 4]
    if variant.mode == "replicated":
        assert owned == [whole, whole]
    else:  # pieces, which together are the whole
        assert [a + b for a, b in zip(*owned, strict=True)] == whole


def _on_every_rank(rank: Rank, variant: Variant) -> list[int]:
    """Elements of the moments that this rank has of each parameter."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2, bias=False))
    optimizer = variant.ours(model.named_parameters(), rank, lr=0.5)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults["lr"] == 0.5
    for steps in range(3):
        assert f"{variant.kind} (" in repr(optimizer) and "lr: 0.5" in repr(optimizer)
        assert optimizer.param_groups[0]["params"] == list(model.parameters())
        assert len(optimizer.state) == (3 if steps else 0)
        for state in optimizer.state.values():
            assert {key for key, _ in state.items()} == {"step", "exp_avg", "exp_avg_sq"}
            assert all(isinstance(value, torch.Tensor) for _, value in state.items())
            assert state["step"] == steps
        saved = optimizer.full_state_dict()
        assert saved["param_groups"][0]["param_names"] == ["0.weight", "0.bias", "1.weight"]
        _use_hooks(optimizer, saved, model)
    return [optimizer.state[p]["exp_avg"].numel() for p in model.parameters()]


def _use_hooks(optimizer: Any, saved: Any, model: torch.nn.Module) -> None:
    """A step, a save and a load, at which each hook is called once; after that, none is."""
    calls: list[str] = []
    handles = [getattr(optimizer, register)(partial(_note, calls, register)) for register in HOOKS]
    optimizer.full_state_dict()
    optimizer.load_state_dict(saved)
    for handle in handles[2:]:
        handle.remove()
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for handle in handles[:2]:
        handle.remove()
    assert sorted(calls) == sorted(HOOKS)


def _note(calls: list[str], register: str, *_: Any) -> None:
    calls.append(register)


def test_a_step_is_seen_by_the_profiler() -> None:
    params = make_params([(3,)])
    optimizer = fusedshard.AdamW(params)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step_with_ones(optimizer, params)
    names = [event.key for event in profile.key_averages()]
    assert "Optimizer.step#AdamW.step" in names


def test_cmp_04_named_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2, bias=False))
    optimizer = fusedshard.AdamW(model.named_parameters())
    names = ["0.weight", "0.bias", "1.weight"]
    assert optimizer.param_groups[0]["param_names"] == names
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == names


def test_names_stand_in_errors() -> None:
    bad = torch.nn.Parameter(torch.ones(1, 4).expand(3, 4))
    with pytest.raises(ValueError, match=r"parameter 1 \('weird'\): got shape"):
        fusedshard.Adam([("fine", torch.nn.Parameter(torch.ones(2))), ("weird", bad)])


def two_steps(kind: type[fusedshard.Adam], **options: Any) -> torch.Tensor:
    params = make_params([(17, 5)])
    step_with_ones(kind(params, weight_decay=0.3, **options), params, 2)
    return params[0].detach()


@pytest.mark.parametrize("option", ["foreach", "fused", "capturable"])
def test_options_of_other_implementations_change_nothing(option: str) -> None:
    given = [two_steps(fusedshard.AdamW, **{option: value}) for value in (True, False)]
    assert_same_bits(given, [two_steps(fusedshard.AdamW)] * 2)


def test_decoupled_weight_decay_makes_adam_adamw() -> None:
    decoupled = two_steps(fusedshard.Adam, decoupled_weight_decay=True)
    assert_same_bits(decoupled, two_steps(fusedshard.AdamW))
    assert not torch.equal(decoupled, two_steps(fusedshard.Adam))


def test_hyperparameters_are_read_at_each_step() -> None:
    """Each key alone, changed after a step, gives what torch gives."""
    changes: dict[str, Any] = {"lr": 0.5, "betas": (0.5, 0.6), "eps": 1.0, "weight_decay": 0.3}
    changes |= {"maximize": True, "amsgrad": True}
    for key, value in changes.items():
        ours, theirs = make_params([(7, 3)]), make_params([(7, 3)])
        pairs = (fusedshard.AdamW(ours), ours), (torch.optim.AdamW(theirs, foreach=False), theirs)
        for optimizer, params in pairs:
            step_with_ones(optimizer, params)
            optimizer.param_groups[0][key] = value
            if key == "amsgrad" and optimizer is pairs[1][0]:  # torch cannot begin it later
                optimizer.state[params[0]]["max_exp_avg_sq"] = torch.zeros(7, 3)
            step_with_ones(optimizer, params, 2)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6, msg=key)


def test_parameters_stay_themselves() -> None:
    """The same objects, leaves, of the same values, each with a storage of its own."""
    params = make_params([*SHAPES, (17, 257)])
    before, identity = copy.deepcopy(params), [id(p) for p in params]
    optimizer = fusedshard.Adam(params)
    step_with_ones(optimizer, params[:1])
    assert [id(p) for p in params] == identity
    assert_same_bits([p.detach() for p in params[1:]], [p.detach() for p in before[1:]])
    for p, old in zip(params, before, strict=True):
        assert p.is_leaf and p.requires_grad and p._base is None
        assert p.stride() == old.stride()
        assert (p.untyped_storage().nbytes(), p.storage_offset()) == (p.nbytes, 0)
    addresses = [p.data_ptr() for p in params if p.numel() > 0]
    assert len({*addresses}) == len(addresses)


def test_modules_and_views_see_each_step() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = fusedshard.Adam(model.parameters(), lr=0.1)
    row = model.weight.detach()[0]
    x = torch.ones(1, 3)
    before, row_before = model(x).detach(), row.clone()
    step_with_ones(optimizer, list(model.parameters()))
    torch.testing.assert_close(model(x).detach(), before - 0.4)
    torch.testing.assert_close(row, row_before - 0.1)


def test_a_step_is_announced_to_autograd() -> None:
    used, idle = make_params([(5,), (5,)])
    optimizer = fusedshard.Adam([used, idle])
    loss = (used * used).sum() + (idle * idle).sum()
    versions = used._version, idle._version
    step_with_ones(optimizer, [used])
    assert used._version > versions[0] and idle._version == versions[1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("how", ["expanded", "permuted", "offset", "one address", "negated"])
def test_gradients_of_any_memory(how: str) -> None:
    """As plain ones of the same values, and left as they are."""
    ours, theirs = make_params([(6, 4)]), make_params([(6, 4)])
    grads: dict[str, torch.Tensor] = {
        "expanded": torch.arange(4.0).expand(6, 4),
        "permuted": torch.arange(24.0).reshape(4, 6).t(),
        "offset": torch.arange(25.0)[1:].view(6, 4),
        "one address": torch.tensor(3.0).expand(6, 4),
        "negated": torch._neg_view(torch.arange(24.0).reshape(6, 4)),
    }
    ours[0].grad = grads[how]
    theirs[0].grad = grads[how].contiguous().clone().resolve_neg()
    before = theirs[0].grad.clone()
    fusedshard.Adam(ours, eps=1.0).step()
    fusedshard.Adam(theirs, eps=1.0).step()
    assert ours[0].grad is grads[how]
    assert same_bits(ours[0].grad.contiguous().resolve_neg(), before)
    assert_same_bits(ours[0].detach(), theirs[0].detach())


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has one dtype")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_gradient_of_another_dtype_is_converted(dtype: torch.dtype) -> None:
    ours, theirs = make_params([(6, 4)]), make_params([(6, 4)])
    ours[0].grad_dtype = dtype
    grad = torch.arange(24.0).reshape(6, 4)
    ours[0].grad, theirs[0].grad = grad.to(dtype), grad
    fusedshard.Adam(ours, eps=1.0).step()
    fusedshard.Adam(theirs, eps=1.0).step()
    assert_same_bits(ours[0].detach(), theirs[0].detach())


def test_cmp_04_state_that_was_looked_at_before_the_first_step() -> None:
    """Looking makes an empty entry, as with torch, which the step fills."""
    seen = []
    for kind in (fusedshard.AdamW, torch.optim.AdamW):
        (p,) = params = make_params([(4,)])
        optimizer = kind(params)
        assert optimizer.state[p] == {}
        step_with_ones(optimizer, params)
        seen.append(optimizer.state_dict()["state"])
    torch.testing.assert_close(seen[0], seen[1], rtol=0, atol=1e-6)


def test_a_users_own_entries_stay_in_the_state() -> None:
    """Beside a late group, and through a state dict."""
    (p,) = params = make_params([(4,)])
    optimizer: Any = fusedshard.AdamW(params)
    step_with_ones(optimizer, params)
    optimizer.state[p]["mine"], optimizer.state["everyones"] = torch.arange(2), 7
    optimizer.add_param_group({"params": make_params([(3,)])})
    assert optimizer.state[p]["mine"].tolist() == [0, 1]
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[p]["mine"].tolist() == [0, 1] and optimizer.state["everyones"] == 7
    step_with_ones(optimizer, params)
    assert optimizer.state[p]["step"] == 2
