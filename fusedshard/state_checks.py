"""Whether a state dict can be loaded, and is the same on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusedshard.checkpoint import MASTERS, MOMENTS
from fusedshard.dense import is_wrapper
from fusedshard.fingerprint import HYPERPARAMETERS, plain
from fusedshard.options import check_hyperparameters
from fusedshard.params import parameter_labels
from fusedshard.sharded_state import ShardedState

MAX_STEP = 2.0**53  # up to which a double counts


def check_fits(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    owned: Sequence[list[tuple[int, int]]],
) -> None:
    """Raise ValueError, naming the group or parameter, where a state dict cannot be loaded.

    Args:
        owned: starts and lengths of what this rank owns of each parameter.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            found = ", ".join(map(repr, state_dict)) or "nothing"
            raise ValueError(f"state_dict: got the keys {found}, wanted 'state' and 'param_groups'")
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"param_groups: got {len(saved_groups)} in the state dict, wanted {len(groups)}"
        )
    labels = iter(zip(parameter_labels(groups), owned, strict=True))
    for number, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"group {number}: got {len(saved['params'])} parameters in the state dict, "
                f"wanted {len(group['params'])}"
            )
        check_hyperparameters({**group, **saved})
        for key, param in zip(saved["params"], group["params"], strict=True):
            label, ranges = next(labels)
            _check_state(label, state_dict["state"].get(key), param, ranges)


def describe_content(state_dict: Mapping[str, Any]) -> str:
    """What must be the same in every rank's dict, short of the values: hyperparameters, steps,
    and which parameters have which state, whole or a shard, and whether that was loaded."""
    groups = [
        [repr(plain(group.get(name))) for name in ("params", *HYPERPARAMETERS)]
        for group in state_dict["param_groups"]
    ]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    states = [(state_dict["state"].get(key) or {}) for key in keys]
    held = [sorted((name, _kind(value)) for name, value in state.items()) for state in states]
    steps = [float(state.get("step", 0)) for state in states]
    return hashlib.sha256(repr((groups, steps, held)).encode()).hexdigest()


def _kind(value: Any) -> str:
    if not isinstance(value, ShardedState):
        return "whole"
    return "loaded shard" if value.is_loaded else "shard"


def _check_state(
    label: str,
    state: Mapping[str, Any] | None,
    param: torch.Tensor,
    owned: list[tuple[int, int]],
) -> None:
    if not state:
        return
    # Without max_exp_avg_sq amsgrad begins at zero, as where it is switched on later.
    for name in ("step", *MOMENTS[:2]):
        if name not in state:
            raise ValueError(f"{label}: {name} is missing in the state dict")
    step = float(state["step"])
    if not (0 <= step <= MAX_STEP and step.is_integer()):
        raise ValueError(
            f"{label}: step is {step} in the state dict, wanted an integer from 0 to 2^53"
        )
    for name in (*MOMENTS, MASTERS):
        if name in state:
            _check_array(label, name, state[name], param)
            if isinstance(state[name], ShardedState):
                _check_shard(label, name, state[name], owned)


def _check_shard(label: str, name: str, saved: ShardedState, owned: list[tuple[int, int]]) -> None:
    ranges = [(stretch.start, stretch.length) for stretch in saved.stretches]
    if ranges != owned:
        raise ValueError(
            f"{label}: {name} is of another rank, or of another number of ranks: got elements "
            f"{_text(ranges)}, wanted {_text(owned)}: load it through "
            "torch.distributed.checkpoint, or from full_state_dict()"
        )
    missing = sum(stretch.missing() for stretch in saved.stretches)
    if missing:
        raise ValueError(
            f"{label}: {name}: {missing} of this rank's elements were not loaded: the checkpoint "
            "lacks them, or was not loaded to the end"
        )


def _text(ranges: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{start}:{start + length}" for start, length in ranges) or "none"


def _check_array(label: str, name: str, saved: Any, param: torch.Tensor) -> None:
    if not isinstance(saved, torch.Tensor):
        kind = type(saved).__name__
        raise ValueError(f"{label}: {name} is a {kind} in the state dict, wanted a tensor")
    wrapped = is_wrapper(saved) and not isinstance(saved, ShardedState)
    if saved.layout != torch.strided or wrapped:
        raise ValueError(f"{label}: {name} is no plain dense tensor in the state dict")
    if saved.device.type == "meta":
        raise ValueError(f"{label}: {name} is on the meta device in the state dict: has no numbers")
    if not (saved.is_floating_point() or saved.is_complex()):
        raise ValueError(f"{label}: {name} is {saved.dtype} in the state dict, wanted floats")
    if saved.is_complex() != param.is_complex():
        raise ValueError(
            f"{label}: {name} is {saved.dtype} in the state dict, which does not fit {param.dtype}"
        )
    if saved.shape != param.shape:
        raise ValueError(
            f"{label}: {name} has shape {tuple(saved.shape)} in the state dict, "
            f"wanted {tuple(param.shape)}"
        )
