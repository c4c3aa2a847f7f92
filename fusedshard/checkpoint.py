"""State dicts in torch.optim.Adam's format, from and to the flat moments."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fusedshard.comm import Communicator
from fusedshard.dense import is_wrapper
from fusedshard.fingerprint import HYPERPARAMETERS, plain
from fusedshard.flat import FlatBuffer, view_as_param
from fusedshard.kernels import flat_memory
from fusedshard.layout import Slot
from fusedshard.moments import Piece
from fusedshard.options import check_hyperparameters
from fusedshard.params import in_storage_order, parameter_labels

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
EXPONENTS = tuple(f"{name}_exponents" for name in MOMENTS)  # beside 8-bit moments
MASTERS = "master_weights"  # key of a state dict
MAX_STEP = 2.0**53  # up to which a double counts


class FullState(NamedTuple):
    """Of every parameter, by its number: whole tensors in host memory with the parameter's shape
    and strides, fp32 for bf16 and fp16 parameters.

    Attributes:
        moments: by torch's names.
        masters: the fp32 values of 16-bit parameters that have any beside them.
    """

    moments: dict[int, dict[str, torch.Tensor]]
    masters: dict[int, torch.Tensor]


def full_state(
    flats: Sequence[FlatBuffer], params: Sequence[torch.Tensor], comm: Communicator, *, keep: bool
) -> FullState:
    """Copies of all state.

    Collective where it is sharded. At most one flat buffer is held beside the result, which is
    empty on ranks that do not ``keep`` it.
    """
    state = FullState({}, {})
    for flat in flats:
        slots = flat.layout.slots if keep else ()
        for name, moment in flat.moments.items():
            whole = _whole(flat, moment.read(0, len(moment.values)), comm)
            for slot in slots:
                view = view_as_param(whole, slot, params[slot.param])
                state.moments.setdefault(slot.param, {})[name] = view.to("cpu", copy=True)
        if flat.masters is not None:
            whole = _whole(flat, flat.owned_masters(), comm)
            for slot in slots:
                view = view_as_param(whole, slot, params[slot.param])
                state.masters[slot.param] = view.to("cpu", copy=True)
    return state


def store_moments(
    flat: FlatBuffer, params: Sequence[torch.Tensor], state: Mapping[int, Mapping[str, Any]]
) -> None:
    """Overwrite the owned moments of a flat buffer by ``state`` (parameter index to whole
    tensors of the parameter's shape); parameters that are not in it get zeros.

    ``state`` may hold these very moments, as one does that was taken from the same optimizer.
    """
    for name, moment in flat.moments.items():
        for slot in flat.layout.slots:
            saved = state.get(slot.param, {}).get(name)
            for piece, stretch in _stretches(flat, params[slot.param], slot, saved):
                moment.write(piece.owned_start, stretch)


def store_masters(
    flat: FlatBuffer, params: Sequence[torch.Tensor], masters: Mapping[int, torch.Tensor]
) -> None:
    """The same for masters; parameters that have none there are their own."""
    if flat.masters is None:
        return
    for slot in flat.layout.slots:
        if slot.param not in masters:
            for piece in flat.pieces.get(slot.param, ()):
                flat.masters.forget(piece)
            continue
        saved = masters[slot.param]
        for piece, stretch in _stretches(flat, params[slot.param], slot, saved):
            flat.masters.write(piece, stretch)


def _stretches(
    flat: FlatBuffer, param: torch.Tensor, slot: Slot, saved: torch.Tensor | None
) -> list[tuple[Piece, torch.Tensor]]:
    """What this rank owns of a whole tensor of the parameter's shape, of zeros for None."""
    whole = torch.empty_strided(param.size(), param.stride(), dtype=flat.wide, device=flat.device)
    whole.zero_() if saved is None else whole.copy_(saved)
    source = in_storage_order(whole)
    return [
        (piece, source.narrow(0, piece.param_start, piece.length))
        for piece in flat.pieces.get(slot.param, ())
    ]


def fill_in(packed: dict[str, Any], full: FullState) -> None:
    """Replace what a packed state dict shows of this rank's memory by whole moments, and whatever
    else it holds of the optimizer by copies in host memory. Where a group has amsgrad, every state
    has its third moment: zero, if the parameter had no gradient since it was switched on. Masters
    come beside ``state``, which torch casts when it loads it."""
    if full.masters:
        packed[MASTERS] = full.masters
    for group in packed["param_groups"]:
        for index in group["params"]:
            state = packed["state"].get(index)
            if not state:
                continue
            whole = full.moments.get(index, {})
            shown = [name for name in state if name not in EXPONENTS]
            names = dict.fromkeys([*shown, *(MOMENTS if group["amsgrad"] else ())])
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
    masters = state_dict.get(MASTERS, {})
    if not isinstance(masters, Mapping):
        kind = type(masters).__name__
        raise ValueError(f"{MASTERS}: got a {kind} in the state dict, wanted tensors by parameter")
    for number, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"group {number}: got {len(saved['params'])} parameters in the state dict, "
                f"wanted {len(group['params'])}"
            )
        check_hyperparameters({**group, **saved})
        for key, param in zip(saved["params"], group["params"], strict=True):
            label = next(labels)
            _check_state(label, state_dict["state"].get(key), param)
            if key in masters:
                _check_array(label, MASTERS, masters[key], param)


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
    masters = sorted(map(repr, state_dict.get(MASTERS, ())))
    return hashlib.sha256(repr((groups, states, masters)).encode()).hexdigest()


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
        if name in state:
            _check_array(label, name, state[name], param)


def _check_array(label: str, name: str, saved: Any, param: torch.Tensor) -> None:
    if not isinstance(saved, torch.Tensor):
        kind = type(saved).__name__
        raise ValueError(f"{label}: {name} is a {kind} in the state dict, wanted a tensor")
    if saved.layout != torch.strided or is_wrapper(saved):
        raise ValueError(f"{label}: {name} is no plain dense tensor in the state dict")
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


def _whole(flat: FlatBuffer, owned: torch.Tensor, comm: Communicator) -> torch.Tensor:
    return owned if flat.owners == 1 else _gather(flat, owned, comm)


def _gather(flat: FlatBuffer, owned: torch.Tensor, comm: Communicator) -> torch.Tensor:
    whole = flat_memory(flat.layout.numel, owned.dtype, flat.device)
    for bucket in flat.layout.buckets:
        mine = whole.narrow(0, bucket.shard_start(comm.rank), bucket.shard_numel)
        mine.copy_(owned.narrow(0, bucket.start // flat.owners, bucket.shard_numel))
        comm.all_gather_(whole.narrow(0, bucket.start, bucket.numel)).wait()
    return whole
