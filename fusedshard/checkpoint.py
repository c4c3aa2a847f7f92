"""State dicts in torch.optim.Adam's format, from and to the flat moments."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusedshard.comm import Communicator
from fusedshard.fingerprint import HYPERPARAMETERS, plain
from fusedshard.flat import FlatBuffer, view_as_param
from fusedshard.kernels import flat_memory
from fusedshard.options import check_hyperparameters
from fusedshard.params import in_storage_order, is_wrapper, parameter_labels

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
MAX_STEP = 2.0**53  # up to which a double counts


def full_moments(
    flats: Sequence[FlatBuffer], params: Sequence[torch.Tensor], comm: Communicator, *, keep: bool
) -> dict[int, dict[str, torch.Tensor]]:
    """Every parameter's moments, whole, as copies in host memory with the parameter's shape and
    strides.

    Collective where the moments are sharded. At most one flat buffer is held beside the result,
    which is empty on ranks that do not ``keep`` it.
    """
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for flat in flats:
        for name, owned in flat.owned_moments().items():
            whole = owned if flat.owners == 1 else _gather(flat, owned, comm)
            for slot in flat.layout.slots if keep else ():
                view = view_as_param(whole, slot, params[slot.param])
                moments.setdefault(slot.param, {})[name] = view.to("cpu", copy=True)
    return moments


def store_moments(
    flat: FlatBuffer, params: Sequence[torch.Tensor], state: Mapping[int, Mapping[str, Any]]
) -> None:
    """Overwrite the owned moments of a flat buffer by ``state`` (parameter index to whole
    tensors of the parameter's shape); parameters that are not in it get zeros.

    ``state`` may hold these very moments, as one does that was taken from the same optimizer.
    """
    for name, owned in flat.owned_moments().items():
        for slot in flat.layout.slots:
            param = params[slot.param]
            whole = torch.empty_strided(
                param.size(), param.stride(), dtype=flat.dtype, device=flat.device
            )
            saved = state.get(slot.param, {}).get(name)
            whole.zero_() if saved is None else whole.copy_(saved)
            source = in_storage_order(whole)
            for piece in flat.pieces.get(slot.param, []):
                stretch = source.narrow(0, piece.param_start, piece.length)
                owned.narrow(0, piece.owned_start, piece.length).copy_(stretch)


def fill_in(packed: dict[str, Any], moments: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
    """Replace this rank's pieces in a packed state dict by whole moments, and whatever else it
    holds of the optimizer by copies in host memory. Where a group has amsgrad, every state has its
    third moment: zero, if the parameter had no gradient since it was switched on."""
    for group in packed["param_groups"]:
        for index in group["params"]:
            state = packed["state"].get(index)
            if not state:
                continue
            whole = moments.get(index, {})
            names = dict.fromkeys([*state, *(MOMENTS if group["amsgrad"] else ())])
            packed["state"][index] = {
                name: whole[name] if name in whole else _on_host({**state, **whole}, name)
                for name in names
            }


def _on_host(state: Mapping[str, Any], name: str) -> Any:
    if name not in state:
        return torch.zeros_like(state["exp_avg"], device="cpu")
    value = state[name]
    return value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def check_fits(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError, naming the group or parameter, where a state dict cannot be loaded."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            found = ", ".join(map(repr, state_dict)) or "nothing"
            raise ValueError(f"state_dict: got the keys {found}, wanted 'state' and 'param_groups'")
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"param_groups: got {len(saved_groups)} in the state dict, wanted {len(groups)}"
        )
    labels = iter(parameter_labels(groups))
    for number, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"group {number}: got {len(saved['params'])} parameters in the state dict, "
                f"wanted {len(group['params'])}"
            )
        check_hyperparameters({**group, **saved})
        for key, param in zip(saved["params"], group["params"], strict=True):
            _check_state(next(labels), state_dict["state"].get(key), param)


def describe_content(state_dict: Mapping[str, Any]) -> str:
    """What must be the same in every rank's dict, short of the values: hyperparameters, steps,
    and which parameters have which state."""
    groups = [
        [repr(plain(group.get(name))) for name in ("params", *HYPERPARAMETERS)]
        for group in state_dict["param_groups"]
    ]
    states = sorted(
        (key, float(state["step"]), sorted(state))
        for key, state in state_dict["state"].items()
        if isinstance(key, int) and state  # beside a user's own entries
    )
    return hashlib.sha256(repr((groups, states)).encode()).hexdigest()


def _check_state(label: str, state: Mapping[str, Any] | None, param: torch.Tensor) -> None:
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
    for name in MOMENTS:
        if name in state and not isinstance(state[name], torch.Tensor):
            kind = type(state[name]).__name__
            raise ValueError(f"{label}: {name} is a {kind} in the state dict, wanted a tensor")
        if name in state and (state[name].layout != torch.strided or is_wrapper(state[name])):
            raise ValueError(f"{label}: {name} is no plain dense tensor in the state dict")
        if name in state and state[name].is_complex() != param.is_complex():
            raise ValueError(
                f"{label}: {name} is {state[name].dtype} in the state dict, which does not fit "
                f"{param.dtype}"
            )
        if name in state and state[name].shape != param.shape:
            raise ValueError(
                f"{label}: {name} has shape {tuple(state[name].shape)} in the state dict, "
                f"wanted {tuple(param.shape)}"
            )


def _gather(flat: FlatBuffer, owned: torch.Tensor, comm: Communicator) -> torch.Tensor:
    whole = flat_memory(flat.layout.numel, owned.dtype, flat.device)
    for bucket in flat.layout.buckets:
        mine = whole.narrow(0, bucket.shard_start(comm.rank), bucket.shard_numel)
        mine.copy_(owned.narrow(0, bucket.start // flat.owners, bucket.shard_numel))
        comm.all_gather_(whole.narrow(0, bucket.start, bucket.numel)).wait()
    return whole
