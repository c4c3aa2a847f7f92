"""What the audit of files finds in them: state dicts wherever they are, and names for numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_jobs import (
    audit,
    entries,
    optimizer_dict,
)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda optimizer: optimizer,
        lambda optimizer: {"optimizer": optimizer, "rng": torch.zeros(8, dtype=torch.uint8)},
        lambda optimizer: {"trainer": {"optimizer_states": [optimizer]}, "epoch": 3},
    ],
)
@pytest.mark.parametrize("in_zip", [True, False])
def test_wherever_it_is_in_the_file(
    tmp_path: Path, wrap: Callable[[Any], Any], in_zip: bool
) -> None:
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for path in paths:
        content = wrap(optimizer_dict())
        torch.save(content, path, _use_new_zipfile_serialization=in_zip)
    report = audit(*paths)
    assert report.kind == "replicated"
    assert [p.name for p in report.parameters] == ["parameter 0", "parameter 1"]
    assert {part.part for part in report.parameters[0].parts} == {"step", "exp_avg"}


def names_in(folder: Path, content: Any) -> list[str]:
    for name in ("a.pt", "b.pt"):
        torch.save(content, folder / name)
    return [p.name for p in audit(folder / "a.pt", folder / "b.pt").parameters]


def test_names_that_the_optimizer_has(tmp_path: Path) -> None:
    named = optimizer_dict(param_names=["module.w", "module.b"])
    assert names_in(tmp_path, named) == ["w", "b"]


@pytest.mark.parametrize(
    ("model", "first", "expected"),
    [
        ({"w": [6], "b": [6]}, [0, 1], ["w", "b"]),
        # Statistics cannot be the optimizer's.
        ({"w": [6], "b": [6], "running_mean": [6]}, [0, 1], ["w", "b"]),
        ({"v": [5], "w": [6], "b": [6]}, [0, 1], ["v", "w", "b"]),
        # Any two of the three.
        ({"v": [6], "w": [6], "b": [6]}, [0, 1], ["v", "w", "b", "parameter 0", "parameter 1"]),
        # A group each: which is which?
        ({"w": [6], "b": [6]}, [0], ["w", "b", "parameter 0", "parameter 1"]),
        ({"w": [7], "b": [6]}, [0, 1], ["w", "b", "parameter 0", "parameter 1"]),
    ],
)
def test_names_by_the_models_shapes(
    tmp_path: Path, model: dict[str, Sequence[int]], first: list[int], expected: list[str]
) -> None:
    optimizer = optimizer_dict()
    rest = [number for number in (0, 1) if number not in first]
    groups = [{"params": params} for params in (first, rest) if params]
    optimizer["param_groups"] = groups
    content = {"model": entries(**model), "optimizer": optimizer}
    assert names_in(tmp_path, content) == expected


def test_groups_that_shapes_tell_apart(tmp_path: Path) -> None:
    """Weights that decay and biases that do not, as is usual."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    params = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": params[::2]}, {"params": params[1::2]}])
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for name in ("a.pt", "b.pt"):
        torch.save(content, tmp_path / name)
    report = audit(tmp_path / "a.pt", tmp_path / "b.pt")
    assert [p.name for p in report.parameters] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    for parameter in report.parameters:
        assert {part.shape for part in parameter.parts} == {parameter.shape, ()}


def test_two_models_and_two_optimizers(tmp_path: Path) -> None:
    content = {
        "generator": entries(w=[6], b=[6]),
        "critic": entries(w=[5], v=[6], b=[6], c=[6]),
        "generator_opt": optimizer_dict(),
        "critic_opt": optimizer_dict(),
    }
    names = names_in(tmp_path, content)
    assert names[:6] == [
        "generator.w",
        "generator.b",
        "critic.w",
        "critic.v",
        "critic.b",
        "critic.c",
    ]
    # Both fit the generator.
    assert names[6:] == [
        f"{optimizer}: parameter {number}"
        for optimizer in ("generator_opt", "critic_opt")
        for number in (0, 1)
    ]
