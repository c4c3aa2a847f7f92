"""The state dicts of models and optimizers in what was saved, and the names of their parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusedshard.auditing.inventory import leaves

Key = int | str  # of a parameter in an optimizer's state dict: its number, or its name

DEEPEST = 4  # levels of dicts that are searched
WRAPPERS = ("module.", "_orig_mod.")  # what DDP and torch.compile put before every name
BATCH_NORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class UnusableFile(ValueError):
    """A path that cannot be audited; the message says which, and why."""


class SavedOptimizer(NamedTuple):
    """An optimizer's state dict.

    Attributes:
        groups: the parameters of each group, by name where the dict says it.
        state: tensors by parameter and part; numbers are made tensors.
    """

    groups: Sequence[Sequence[Key]]
    state: Mapping[Key, Mapping[str, torch.Tensor]]

    @property
    def keys(self) -> list[Key]:
        """Of all parameters, once."""
        return list(dict.fromkeys([*itertools.chain(*self.groups), *self.state]))


class Contents(NamedTuple):
    """What a file holds, by the keys that lead to it; nothing else in it is looked at."""

    models: dict[str, dict[str, torch.Tensor]]
    optimizers: dict[str, SavedOptimizer]


def find(saved: Any) -> Contents:
    """The state dicts in nested dicts and lists, however these call them."""
    contents = Contents({}, {})
    _collect(saved, (), contents)
    if len(contents.models) == 1:
        contents.models[""] = contents.models.popitem()[1]
    if len(contents.optimizers) == 1:
        contents.optimizers[""] = contents.optimizers.popitem()[1]
    return contents


def check_holds_state(path: Path, contents: Contents) -> None:
    if not contents.models and not contents.optimizers:
        raise UnusableFile(
            f"{path}: got no state dict, wanted a model's or an optimizer's, or dicts with such"
        )


def is_buffer(name: str, tensor: torch.Tensor) -> bool:
    """Whether an entry of a model's state dict cannot be a parameter."""
    trains = tensor.is_floating_point() or tensor.is_complex()
    return not trains or name.rpartition(".")[2] in BATCH_NORM_BUFFERS


def _collect(saved: Any, path: tuple[str, ...], contents: Contents) -> None:
    if not isinstance(saved, Mapping | list | tuple) or len(path) > DEEPEST:
        return
    key = ".".join(path)
    if isinstance(saved, Mapping):
        if _is_optimizer(saved):
            contents.optimizers[key] = _optimizer(saved)
            return
        tensors = {k: v for k, v in saved.items() if isinstance(v, torch.Tensor)}
        if _is_model(saved, tensors):
            contents.models[key] = {_bare(name, tensors): t for name, t in tensors.items()}
            return
    items = saved.items() if isinstance(saved, Mapping) else enumerate(saved)
    for name, item in items:
        _collect(item, (*path, str(name)), contents)


def _is_optimizer(saved: Mapping[Any, Any]) -> bool:
    state = saved.get("state")
    if not isinstance(state, Mapping):
        return False
    return "param_groups" in saved or (
        len(state) > 0 and all(isinstance(item, Mapping) for item in state.values())
    )


def _is_model(saved: Mapping[Any, Any], tensors: Mapping[Any, torch.Tensor]) -> bool:
    """Generators' states are tensors as well, of bytes; a dict beside dicts is a container."""
    return (
        all(isinstance(name, str) for name in saved)
        and any(t.is_floating_point() or t.is_complex() for t in tensors.values())
        and not any(isinstance(item, Mapping) for item in saved.values())
    )


def _bare(name: str, names: Iterable[str]) -> str:
    """Without the prefixes that all names have."""
    prefix = ""
    while wrapper := next(
        (w for w in WRAPPERS if all(n.startswith(prefix + w) for n in names)), None
    ):
        prefix += wrapper
    return name.removeprefix(prefix)


def _optimizer(saved: Mapping[str, Any]) -> SavedOptimizer:
    listed = list(_groups(saved.get("param_groups", ())))
    names: dict[Key, str] = {
        _key(key): name
        for group in listed
        for key, name in zip(group["params"], group.get("param_names") or (), strict=False)
    }
    groups = [[_key(key) for key in group["params"]] for group in listed]
    state = {
        _key(key): dict(leaves(parts))
        for key, parts in saved["state"].items()
        if isinstance(parts, Mapping)
    }
    named = {key: names.get(key, key) for key in [*itertools.chain(*groups), *state]}
    texts = {key: name for key, name in named.items() if isinstance(name, str)}
    renamed = {key: _bare(name, texts.values()) for key, name in texts.items()}
    return SavedOptimizer(
        [[renamed.get(key, key) for key in group] for group in groups or [list(state)]],
        {renamed.get(key, key): parts for key, parts in state.items()},
    )


def _groups(saved: Any) -> Iterator[Mapping[str, Any]]:
    for group in saved.values() if isinstance(saved, Mapping) else saved:
        if isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple):
            yield group


def _key(key: Any) -> Key:
    """torch.distributed.checkpoint makes text of numbers."""
    return int(key) if str(key).isdigit() else str(key)
