"""torch's own tests of its optimizers, as far as they apply, with ours in their place."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Rank, RankPool
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.profiler import profile
from training import assert_same_bits, gradient

import fusedshard

KINDS = ("Adam", "AdamW")
each_kind = pytest.mark.parametrize("kind", KINDS)
BATCH = torch.rand(2, 4, 4, 4, generator=torch.Generator().manual_seed(0))


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    # No bias before the BatchNorm: its gradient is rounding noise, which Adam scales up.
    convolution = nn.Conv2d(4, 2, 1, stride=2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


def train(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(BATCH).square().sum().backward()
        optimizer.step()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def check_like_torch(use: Callable[[Any, nn.Sequential], None], kind: str = "AdamW") -> None:
    """``use(optimizer, model)`` leaves the same parameters and moments with either optimizer."""
    results = []
    for module in (fusedshard, torch.optim):
        model = make_model()
        optimizer = getattr(module, kind)(model.parameters(), lr=1e-2)
        use(optimizer, model)
        results.append((weights(model), optimizer.state_dict()["state"]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    assert not torch.equal(results[0][0][0], weights(make_model())[0])


TENSORS: dict[str, Any] = {
    "lr": torch.tensor(0.001),
    "betas": (torch.tensor(0.9), torch.tensor(0.99)),
}


@each_kind
@pytest.mark.parametrize("amsgrad", [False, True])
def test_found_inf_stops_the_step(kind: str, amsgrad: bool) -> None:
    """Set as attributes, as a scaler does around the step of an optimizer that takes them."""
    model = make_model()
    optimizer = getattr(fusedshard, kind)(model.parameters(), amsgrad=amsgrad, weight_decay=0.1)
    train(optimizer, model)
    before = copy.deepcopy((weights(model), optimizer.state_dict()["state"]))
    optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(1.0)
    train(optimizer, model)
    assert_same_bits((weights(model), optimizer.state_dict()["state"]), before)
    optimizer.found_inf = torch.tensor(0.0)
    train(optimizer, model)
    del optimizer.grad_scale, optimizer.found_inf
    assert all(state["step"] == 6 for state in optimizer.state.values())


@each_kind
@pytest.mark.parametrize("named", [(False, False), (True, False), (False, True), (True, True)])
def test_state_dicts_depend_on_values_alone(kind: str, named: tuple[bool, bool]) -> None:
    first, second = make_model(), make_model()
    optimizers = [
        getattr(fusedshard, kind)(model.named_parameters() if names else model.parameters())
        for model, names in zip((first, second), named, strict=True)
    ]
    train(optimizers[0], first)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for model, optimizer in zip((first, second), optimizers, strict=True):
        train(optimizer, model)
    assert_same_bits(weights(first), weights(second))
    states = [optimizer.state_dict() for optimizer in optimizers]
    names = [state["param_groups"][0].pop("param_names", None) for state in states]
    assert_same_bits(states[0], states[1])
    expected = [name for name, _ in first.named_parameters()]
    assert names[0] == (expected if named[0] else None)
    assert names[1] == (expected if any(named) else None)


@each_kind
def test_state_dicts_of_older_versions_load(kind: str) -> None:
    """Without the keys that came later, and with steps that are numbers."""
    model = make_model()
    optimizer = getattr(fusedshard, kind)(model.parameters(), weight_decay=0.1)
    train(optimizer, model)
    before = copy.deepcopy(optimizer.state_dict())
    older = copy.deepcopy(before)
    for key in ("foreach", "maximize", "capturable", "differentiable", "fused"):
        del older["param_groups"][0][key]
    older["param_groups"][0].pop("decoupled_weight_decay")
    for state in older["state"].values():
        state["step"] = int(state["step"])
    optimizer.load_state_dict(older)
    assert_same_bits(optimizer.state_dict(), before)


def test_state_dicts_with_tensors_load_with_weights_only() -> None:
    model = make_model()
    optimizer = fusedshard.AdamW(model.parameters(), **TENSORS)
    train(optimizer, model)
    for state in (optimizer.state_dict(), optimizer.full_state_dict()):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert_same_bits(loaded, state)
        optimizer.load_state_dict(loaded)


def test_step_hooks_come_in_torchs_order() -> None:
    calls: list[str] = []

    def note(name: str) -> Any:
        return lambda *_: calls.append(name)

    model = make_model()
    optimizer = fusedshard.AdamW(model.parameters())
    handles = [
        register_optimizer_step_pre_hook(note("every pre")),
        register_optimizer_step_post_hook(note("every post")),
        optimizer.register_step_pre_hook(note("pre")),
        optimizer.register_step_post_hook(note("post")),
    ]
    try:
        optimizer.step(lambda: calls.append("closure"))
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["every pre", "pre", "closure", "post", "every post"]
    optimizer.step()
    assert len(calls) == 5


def test_a_step_hook_may_replace_the_closure() -> None:
    optimizer = fusedshard.AdamW(make_model().parameters())
    optimizer.register_step_pre_hook(lambda self, args, kwargs: ((self, lambda: 7), {}))
    assert optimizer.step() == 7


def test_state_dict_hooks_see_and_replace_it() -> None:
    optimizer: Any = fusedshard.AdamW(make_model().parameters())
    optimizer.register_state_dict_pre_hook(lambda self: self.state.update(test=1))

    def rename(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "found": state["state"].pop("test")}

    optimizer.register_state_dict_post_hook(rename)
    for state in (optimizer.state_dict(), optimizer.full_state_dict()):
        assert state["found"] == 1 and state["state"] == {}


@pytest.mark.parametrize("prepend", [False, True])
def test_load_hooks_run_in_order(prepend: bool) -> None:
    optimizer = fusedshard.AdamW(make_model().parameters())
    learnt = []

    def in_place(_: Any, state: dict[str, Any]) -> None:
        state["param_groups"][0]["lr"] = 0.002

    def instead(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(state)
        changed["param_groups"][0]["lr"] = 0.003
        return changed

    optimizer.register_load_state_dict_pre_hook(in_place)
    optimizer.register_load_state_dict_pre_hook(instead, prepend=prepend)
    optimizer.register_load_state_dict_post_hook(lambda o: learnt.append(o.param_groups[0]["lr"]))
    optimizer.load_state_dict(optimizer.state_dict())
    assert learnt == [0.002 if prepend else 0.003]


def test_the_profiler_shows_the_step_and_its_phases() -> None:
    model = make_model()
    optimizer = fusedshard.AdamW(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the profiler's own
        with profile() as profiler:
            train(optimizer, model, 1)
    names = {event.key for event in profiler.key_averages()}
    assert names >= {"Optimizer.step#AdamW.step", "Optimizer.zero_grad#AdamW.zero_grad"}
    assert names >= {"fusedshard.update", "fusedshard.gather"}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, while it compiles
def test_a_compiled_function_may_step(whole: bool) -> None:
    """Alone, or with forward and backward around it."""

    def use(optimizer: Any, model: nn.Module) -> None:
        @torch.compile(backend="eager")
        def run() -> None:
            if whole:
                optimizer.zero_grad()
                model(BATCH).square().sum().backward()
            optimizer.step()

        for _ in range(3):
            if not whole:
                optimizer.zero_grad()
                model(BATCH).square().sum().backward()
            run()

    torch.compiler.reset()
    check_like_torch(use)


def test_averaged_models_follow_and_can_be_taken_over() -> None:
    def use(optimizer: Any, model: nn.Module) -> None:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for _ in range(3):
            train(optimizer, model, 1)
            average.update_parameters(model)
        with torch.no_grad():
            for param, mean in zip(model.parameters(), average.parameters(), strict=True):
                param.copy_(mean)
        train(optimizer, model, 1)

    check_like_torch(use)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_parametrized_modules(name: str) -> None:
    def use(_: Any, model: nn.Sequential) -> None:
        getattr(nn.utils.parametrizations, name)(model[3])
        kind = fusedshard.Adam if isinstance(_, fusedshard.Adam) else torch.optim.Adam
        train(kind(model.parameters(), lr=1e-2), model, 4)

    check_like_torch(use)


def test_weights_written_in_place_are_where_training_goes_on() -> None:
    def use(optimizer: Any, model: nn.Sequential) -> None:
        train(optimizer, model)
        torch.manual_seed(3)
        model[3].reset_parameters()  # type: ignore[operator]
        nn.init.constant_(model[1].weight, 2.0)  # type: ignore[arg-type]
        train(optimizer, model)
        saved = copy.deepcopy(model.state_dict())
        train(optimizer, model)
        model.load_state_dict(saved)
        train(optimizer, model)

    check_like_torch(use)


def test_weights_that_are_replaced_are_refused() -> None:
    """As torch's own vector_to_parameters does it."""
    model = make_model()
    optimizer = fusedshard.AdamW(model.parameters())
    train(optimizer, model)
    vector_to_parameters(2 * parameters_to_vector(model.parameters()), model.parameters())
    with pytest.raises(RuntimeError, match="moved after the optimizer was built"):
        train(optimizer, model, 1)


@pytest.mark.parametrize("foreach", [None, False, True])
def test_zero_grad_keeps_the_tensors_where_asked(foreach: bool | None) -> None:
    model = make_model()
    optimizer = fusedshard.AdamW(model.parameters(), foreach=foreach)
    train(optimizer, model)
    grads = [p.grad for p in model.parameters()]
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert all(grad is not None and not grad.any() for grad in grads)


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_optimizers_that_step_within_backward(ranks: RankPool, mode: str) -> None:
    """One for each parameter, from its hook, so that no gradient outlives its use."""
    results = ranks.run(2, _step_within_backward, mode)
    for ours in results:
        torch.testing.assert_close(ours, _within_backward(None), rtol=1e-5, atol=1e-6)
        assert_same_bits(ours, results[0])


def _step_within_backward(rank: Rank, mode: str) -> list[torch.Tensor]:
    return _within_backward(rank, mode=mode, process_group=rank.group)


def _within_backward(rank: Rank | None, **options: Any) -> list[torch.Tensor]:
    params = [nn.Parameter(torch.full((n,), 1.0)) for n in (3, 7)]
    kind: Any = torch.optim.AdamW if rank is None else fusedshard.AdamW
    optimizers = {p: kind([p], lr=0.1, eps=1.0, **options) for p in params}

    def step(param: torch.Tensor) -> None:
        optimizers[param].step()  # type: ignore[index]
        optimizers[param].zero_grad()  # type: ignore[index]

    for param in params:
        param.register_post_accumulate_grad_hook(step)
    for t in range(3):
        seen = range(2) if rank is None else [rank.rank]
        scale = 1.0 / len(seen)
        loss = sum(
            (p * gradient(p, t, i, r)).sum() * scale for i, p in enumerate(params) for r in seen
        )
        loss.backward()  # type: ignore[union-attr]
    assert all(param.grad is None for param in params)
    return [param.detach() for param in params]
