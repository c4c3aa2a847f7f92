"""State dicts in torch.optim.Adam's format, from and to the flat moments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fusedshard import kernels
from fusedshard.comm import Communicator
from fusedshard.flat import FlatBuffer, view_as_param
from fusedshard.kernels import flat_memory
from fusedshard.layout import Slot
from fusedshard.moments import Moment, Piece
from fusedshard.params import in_storage_order
from fusedshard.sharded_state import ShardedState, Stretch

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
EXPONENTS = tuple(f"{name}_exponents" for name in MOMENTS)  # beside 8-bit moments
MASTERS = "master_weights"  # of 16-bit parameters, beside their moments


# Moments by torch's names, and masters: of each parameter, by its number. Tensors have the
# parameter's shape and strides.
State = dict[int, dict[str, torch.Tensor]]


def full_state(
    flats: Sequence[FlatBuffer],
    params: Sequence[torch.Tensor],
    comm: Communicator,
    *,
    keep: bool,
    cpu: bool,
) -> State:
    """Copies of all state, fp32 for bf16 and fp16 parameters; empty on ranks that do not ``keep``
    them.

    Collective where it is sharded. Beside the result a rank holds one parameter at most; where it
    does not keep it, or keeps it elsewhere, one bucket.
    """
    state: State = {}
    for flat in flats:
        place = (kernels.CPU if cpu else flat.device) if keep else None
        for name, read in _readers(flat).items():
            whole = _whole(flat, read, comm, place)
            if whole is None:
                continue
            for slot in flat.layout.slots:
                view = view_as_param(whole, slot, params[slot.param])
                state.setdefault(slot.param, {})[name] = view
    return state


# Writes reals of what this rank owns of a flat buffer, from an element on, to a 1-D tensor.
Read = Callable[[int, torch.Tensor], None]


def _readers(flat: FlatBuffer) -> dict[str, Read]:
    """By the names of state dicts; what is read is fp32 or fp64."""
    readers: dict[str, Read] = {name: moment.read_to for name, moment in flat.moments.items()}
    if flat.masters is not None:
        readers[MASTERS] = flat.read_masters_to
    return readers


def sharded_state(
    flats: Sequence[FlatBuffer], params: Sequence[torch.Tensor]
) -> dict[int, dict[str, ShardedState]]:
    """What this rank holds of every parameter's moments and masters, without communication, as
    tensors of the parameter's shape: in their own format, but fp32 for codes and remainders."""
    state: dict[int, dict[str, ShardedState]] = {}
    for flat in flats:
        for slot in flat.layout.slots:
            part = partial(_sharded, flat, slot, params[slot.param])
            state[slot.param] = {
                name: part(moment.stored_dtype, partial(_stored, moment))
                for name, moment in flat.moments.items()
            }
            if flat.masters is not None:
                state[slot.param][MASTERS] = part(flat.wide, flat.masters.read)
    return state


def _stored(moment: Moment, piece: Piece) -> torch.Tensor:
    return moment.stored(piece.owned_start, piece.length)


def _sharded(
    flat: FlatBuffer,
    slot: Slot,
    param: torch.Tensor,
    dtype: torch.dtype,
    read: Callable[[Piece], torch.Tensor],
) -> ShardedState:
    """``read`` returns a piece's reals, of ``dtype``."""
    shown = dtype.to_complex() if param.is_complex() else dtype

    def read_stretch(piece: Piece) -> torch.Tensor:
        return read(piece).view(shown)

    stretches = [
        Stretch(*in_numbers(piece, param), partial(read_stretch, piece))
        for piece in flat.pieces.get(slot.param, ())
    ]
    return ShardedState(param.size(), param.stride(), shown, flat.device, stretches)


def in_numbers(piece: Piece, param: torch.Tensor) -> tuple[int, int]:
    """Start and length of a piece in the parameter's own numbers, which may be complex."""
    reals = 2 if param.is_complex() else 1
    return piece.param_start // reals, piece.length // reals


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
    flat: FlatBuffer, params: Sequence[torch.Tensor], state: Mapping[int, Mapping[str, Any]]
) -> None:
    """The same for masters; parameters that have none there are their own."""
    if flat.masters is None:
        return
    for slot in flat.layout.slots:
        saved = state.get(slot.param, {}).get(MASTERS)
        if saved is None:
            for piece in flat.pieces.get(slot.param, ()):
                flat.masters.forget(piece)
            continue
        for piece, stretch in _stretches(flat, params[slot.param], slot, saved):
            flat.masters.write(piece, stretch)


def _stretches(
    flat: FlatBuffer, param: torch.Tensor, slot: Slot, saved: torch.Tensor | None
) -> list[tuple[Piece, torch.Tensor]]:
    """What this rank owns of a whole tensor of the parameter's shape, of zeros for None; 1-D
    reals."""
    pieces = flat.pieces.get(slot.param, [])
    if isinstance(saved, ShardedState):
        read = [
            stretch.read().to(flat.wide).view(flat.wide.to_real()) for stretch in saved.stretches
        ]
        return list(zip(pieces, read, strict=True))
    whole = torch.empty_strided(param.size(), param.stride(), dtype=flat.wide, device=flat.device)
    whole.zero_() if saved is None else whole.copy_(saved)
    source = in_storage_order(whole)
    return [(piece, source.narrow(0, piece.param_start, piece.length)) for piece in pieces]


def fill_in(packed: dict[str, Any], full: State) -> None:
    """Replace what a packed state dict shows of this rank's memory by whole moments and masters,
    and whatever else it holds of the optimizer by copies in host memory. Where a group has amsgrad,
    every state has its third moment: zero, if the parameter had no gradient since it was switched
    on."""
    for group in packed["param_groups"]:
        for index in group["params"]:
            state = packed["state"].get(index)
            if not state:
                continue
            whole = full.get(index, {})
            names = _shown_names(state, whole, group)
            packed["state"][index] = {
                name: whole[name] if name in whole else _on_host({**state, **whole}, name)
                for name in names
            }


def filled(state: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's visible state, with whole arrays in place of this rank's memory."""
    shown = {name: value for name, value in state.items() if name not in EXPONENTS}
    return {**shown, **{n: value for n, value in whole.items() if n in shown or n == MASTERS}}


def without_arrays(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """What torch is to load of a state dict, which would cast arrays to the parameters' dtype: None
    for each moment, which says that there is one."""
    state = {
        key: {n: None if n in MOMENTS else v for n, v in values.items() if n != MASTERS}
        if isinstance(values, Mapping)
        else values
        for key, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def with_groups(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A kept state dict with the hyperparameters that the groups have now, as a scheduler changes
    them."""
    copied: dict[str, Any] = in_new_containers(dict(state_dict))
    for saved, group in zip(copied["param_groups"], groups, strict=True):
        saved |= {
            key: value for key, value in group.items() if key not in ("params", "param_names")
        }
    return copied


def in_new_containers(value: Any) -> Any:
    """A state dict with the same tensors, whose dicts and lists are the caller's to change, as
    torch.distributed.checkpoint does."""
    if isinstance(value, dict):
        return {key: in_new_containers(entry) for key, entry in value.items()}
    return [in_new_containers(entry) for entry in value] if isinstance(value, list) else value


def show_shards(packed: dict[str, Any], shards: Mapping[int, Mapping[str, Any]]) -> None:
    """Replace what a packed state dict shows of this rank's memory by ``shards``, parameter by
    parameter, and steps by copies: what is loaded into the dict must not be the optimizer's yet."""
    for group in packed["param_groups"]:
        for index in group["params"]:
            state = packed["state"].get(index)
            if state:
                own = shards.get(index, {})
                shown = {"step": state["step"].cpu().clone(), **own}
                names = _shown_names(state, own, group)
                packed["state"][index] = {name: shown.get(name, state.get(name)) for name in names}


def _shown_names(
    state: Mapping[str, Any], own: Mapping[str, Any], group: Mapping[str, Any]
) -> list[str]:
    """Of what a state dict has of a parameter, given what is visible of it."""
    third = MOMENTS if group["amsgrad"] else ()
    masters = (MASTERS,) if MASTERS in own else ()
    visible = (name for name in state if name not in EXPONENTS)
    return list(dict.fromkeys([*visible, *third, *masters]))


def _on_host(state: Mapping[str, Any], name: str) -> Any:
    if name not in state:
        return torch.zeros_like(state["exp_avg"], device="cpu")
    value = state[name]
    return value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _whole(
    flat: FlatBuffer, read: Read, comm: Communicator, place: torch.device | None
) -> torch.Tensor | None:
    """All of an array of a flat buffer, there; or None, if it is to be nowhere and this rank only
    does its part."""
    buckets, dtype, in_place = flat.layout.buckets, flat.wide.to_real(), place == flat.device
    whole = None if place is None else flat_memory(flat.layout.numel, dtype, place)
    room = whole if in_place else flat_memory(max(b.numel for b in buckets), dtype, flat.device)
    assert room is not None
    for bucket in buckets:
        here = room.narrow(0, bucket.start if in_place else 0, bucket.numel)
        owned = bucket.numel // flat.owners
        read(bucket.start // flat.owners, here.narrow(0, flat.rank * owned, owned))
        if flat.owners > 1:
            comm.all_gather_(here).wait()
        if whole is not None and not in_place:
            whole.narrow(0, bucket.start, bucket.numel).copy_(here)
    return whole
