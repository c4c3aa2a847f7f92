"""The arguments that torch tests its Adam and AdamW with, right and wrong ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from training import gradient, make_params

import fusedshard

each_kind = pytest.mark.parametrize("kind", ["Adam", "AdamW"])

TENSORS: dict[str, Any] = {
    "lr": torch.tensor(0.001),
    "betas": (torch.tensor(0.9), torch.tensor(0.99)),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.01},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True},
    {"weight_decay": 0.1, "amsgrad": True},
    {"capturable": True},
    {"weight_decay": 0.1, "amsgrad": True, "capturable": True},
    {"lr": torch.tensor(0.001), "amsgrad": True, "capturable": True},
    {**TENSORS, "betas": (torch.tensor([[[0.9]]]), torch.tensor([[0.99]])), "capturable": True},
    TENSORS,
    # What torch refuses of its own implementations.
    {**TENSORS, "foreach": True},
    {"betas": (0.9, torch.tensor(0.99))},
]


@each_kind
@pytest.mark.parametrize("implementation", ["foreach", "fused", None])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(kind: str, implementation: str | None, options: dict[str, Any]) -> None:
    """As torch's loop over parameters with plain numbers; the last parameter gets no gradient."""
    plain = {name: as_numbers(value) for name, value in options.items()}
    ours, theirs = make_params([(3, 2), (3,), (1, 3), ()]), make_params([(3, 2), (3,), (1, 3), ()])
    chosen = {implementation: True} if implementation else {}
    optimizer = getattr(fusedshard, kind)(ours, **{**options, **chosen})
    reference = getattr(torch.optim, kind)(
        theirs, **{**plain, "foreach": False, "capturable": False}
    )
    for step in range(7):
        for index, pair in enumerate(zip(ours[:3], theirs[:3], strict=True)):
            for param in pair:
                param.grad = gradient(param, step, index, 0)
        optimizer.step()
        reference.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    states = optimizer.state_dict()["state"], reference.state_dict()["state"]
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-6)


def as_numbers(value: Any) -> Any:
    return tuple(map(float, value)) if isinstance(value, tuple) else float(value)


ONE, TWO = (nn.Parameter(torch.ones(1, 1)) for _ in range(2))
NO_ITERABLE = "params argument given to the optimizer should be an iterable"
WITHOUT_NAMES = "all optimizer params should be with/without names"
ERRORS: list[tuple[type[Exception], Any, dict[str, Any], str]] = [
    (TypeError, ONE, {}, NO_ITERABLE),
    (ValueError, [{"params": ONE}, {"params": ONE}], {}, "appear in more than one parameter"),
    (ValueError, [("weight", ONE), TWO], {}, WITHOUT_NAMES),
    (
        ValueError,
        [{"params": [ONE], "lr": 1e-2}, {"params": [("weight", TWO)]}],
        {},
        "all optimizer param groups should be with/without names",
    ),
    (ValueError, [ONE], {"lr": 1e-2, "betas": (1.0, 0.0)}, "Invalid beta parameter at index 0"),
    (ValueError, [ONE], {"lr": 1e-2, "weight_decay": -1}, "Invalid weight_decay value: -1"),
    (ValueError, [ONE], {"lr": torch.tensor([0.001, 0.001])}, "lr"),
    (ValueError, [], {}, "optimizer got an empty parameter list"),
    (ValueError, [torch.ones(1, requires_grad=True) * 2], {}, "non-leaf"),
    (TypeError, [1.0], {}, "optimizer can only optimize Tensors"),
]


@each_kind
@pytest.mark.parametrize(("error", "params", "options", "message"), ERRORS)
def test_errors(kind: str, error: Any, params: Any, options: Any, message: str) -> None:
    for module in (torch.optim, fusedshard):
        with pytest.raises(error, match=message):
            getattr(module, kind)(params, **options)


def test_plain_tensors_are_parameters_too() -> None:
    leaf, constant = torch.ones(3, requires_grad=True), torch.ones(3)
    optimizer = fusedshard.Adam([leaf, constant], lr=1.0, eps=1.0)
    leaf.sum().backward()
    constant.grad = torch.full((3,), 3.0)
    optimizer.step()
    torch.testing.assert_close(leaf.detach(), torch.full((3,), 0.5))
    torch.testing.assert_close(constant, torch.full((3,), 0.25))
