"""What a rank holds of the state of an optimizer of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fusedshard.auditing.pieces import Held, Piece, dtype_name, stretch, whole
from fusedshard.checkpoint import EXPONENTS, MASTERS
from fusedshard.flat import FlatBuffer
from fusedshard.holdings import Holdings
from fusedshard.layout import Slot
from fusedshard.native import CODE_BLOCK

if TYPE_CHECKING:
    from fusedshard.state import ShardedOptimizer

CHECKS = f"{MASTERS}_checks"  # of remainders


class Array(NamedTuple):
    """What the kernels use of an array: this rank's part.

    Attributes:
        part: its name.
        tensor: the elements.
        unit: reals of the parameter that one of them belongs to.
        visible: whether ``optimizer.state`` shows it.
    """

    part: str
    tensor: torch.Tensor
    unit: int
    visible: bool


def held_state(optimizer: ShardedOptimizer, names: Mapping[torch.Tensor, str]) -> Sequence[Held]:
    """Moments, master weights and step counts in the formats that they have in memory.

    Where ``optimizer.state`` shows something else, since somebody has removed or replaced an
    entry, that is what counts: it is what the user sees and saves.
    """
    engine = optimizer._built
    engine.comm.check_world()
    world_size, steps = engine.comm.world_size, engine.steps.cpu()
    held: list[Held] = []
    for flat in engine.flats:
        for slot in flat.layout.slots:
            param = engine.params[slot.param]
            step, shown = steps[slot.param], optimizer.state.get(param)
            held += _held_steps(names[param], step, shown, world_size)
            for array in arrays_of(flat, slot, param):
                if array.visible and (shown is not None or step):
                    array = _as_shown(array, shown or {})
                held += _placed(flat, slot, array, names[param], world_size)
    return held


def expected_state(optimizer: Any, names: Mapping[torch.Tensor, str]) -> Sequence[Piece]:
    """The moments that are there from the beginning on one rank or another; none of other
    optimizers."""
    engine = getattr(optimizer, "_engine", None)
    if not isinstance(engine, Holdings):
        return ()
    world_size, expected = engine.comm.world_size, []
    for flat in engine.flats:
        copies = world_size if flat.owners == 1 else 1
        for slot in flat.layout.slots:
            param = engine.params[slot.param]
            for array in arrays_of(flat, slot, param):
                numel = -(-slot.numel // array.unit)
                shape = tuple(array.tensor.shape) if flat.owners == 1 else (numel,)
                nothing, dtype = (0,) * len(shape), dtype_name(array.tensor.dtype)
                if array.visible:
                    place = (names[param], array.part, shape, nothing, nothing)
                    expected.append(Piece(*place, dtype, copies, nothing))
    return expected


def _held_steps(
    name: str, step: torch.Tensor, shown: Mapping[str, Any] | None, world_size: int
) -> Sequence[Held]:
    """What ``optimizer.state`` shows, if that is not the count."""
    told = step if shown is None else shown.get("step")
    if not isinstance(told, (torch.Tensor, float, int)):
        return []
    same = shown is None or float(told) == float(step)
    counted = step if same else torch.as_tensor(told, device="cpu")
    return [whole(name, "step", counted.to(torch.float64), world_size)]


def arrays_of(flat: FlatBuffer, slot: Slot, param: torch.Tensor) -> Iterator[Array]:
    """All arrays of a parameter's state but its step count."""
    pieces = flat.pieces.get(slot.param, [])
    reals = 2 if param.is_complex() else 1
    for part, values in flat.visible_moments(slot, param).items():
        yield Array(part, values, CODE_BLOCK if part in EXPONENTS else reals, True)
    if flat.masters is not None and pieces:
        # What a rank owns of a parameter adjoins, see FlatBuffer.visible_moments.
        length = sum(piece.length for piece in pieces)
        masters, checks = flat.masters.arrays(pieces[0].owned_start, length)
        yield Array(MASTERS, masters, 1, False)
        if checks is not None:
            yield Array(CHECKS, checks, CODE_BLOCK, False)


def _as_shown(array: Array, state: Mapping[str, Any]) -> Array:
    """Nothing where the state has no such tensor."""
    shown = state.get(array.part)
    if not isinstance(shown, torch.Tensor):
        shown = array.tensor.new_empty(0)
    return array._replace(tensor=shown)


def _placed(
    flat: FlatBuffer, slot: Slot, array: Array, name: str, world_size: int
) -> Sequence[Held]:
    """The pieces that lie in an array of this rank: what it owns, in that order, and if there is
    more, that as elements behind it, or as far before as there must be room."""
    if flat.owners == 1:
        return [whole(name, array.part, array.tensor, world_size)]
    numel = -(-slot.numel // array.unit)
    values = array.tensor.reshape(-1)
    at, held = 0, []
    for piece in flat.pieces.get(slot.param, []):
        mine = values[: -(-piece.length // array.unit)]
        held.append(stretch(name, array.part, mine, piece.param_start // array.unit, numel))
        at, values = piece.param_start // array.unit + len(mine), values[len(mine) :]
    rest = values[:numel]
    return [*held, stretch(name, array.part, rest, min(at, numel - len(rest)), numel)]
