"""What is right and wrong, from the pieces and fingerprints of all ranks. Pure functions."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fusedshard.auditing.coverage import NOTHING_WRONG, cover
from fusedshard.auditing.pieces import PARAM, Index, Inventory, ParamInfo, Piece
from fusedshard.auditing.report import (
    DIFFERENT,
    IDENTICAL,
    MISOWNED,
    MISSING,
    OWNED_ONCE,
    AuditReport,
    Difference,
    ParameterReport,
    PartReport,
    Region,
    Share,
)

Box = tuple[Index, Index]  # offset, size
Array = tuple[str, str]  # parameter, part


class Holding(NamedTuple):
    """A piece, who holds it, and the fingerprint of its bits there."""

    rank: int
    piece: Piece
    fingerprint: int


class Mismatch(NamedTuple):
    """A box of which ranks have different copies.

    Attributes:
        array: which one.
        box: of it.
        reference: the lowest rank that has the most frequent copy.
        has_majority: whether that is more than half of them.
        ranks: those that have others.
    """

    array: Array
    box: Box
    reference: int
    has_majority: bool
    ranks: tuple[int, ...]


def holdings_by_array(
    pieces: Sequence[Sequence[Piece]], fingerprints: Sequence[Sequence[int]]
) -> dict[Array, list[Holding]]:
    """Of all ranks, in rank order."""
    arrays: defaultdict[Array, list[Holding]] = defaultdict(list)
    for rank, (ours, prints) in enumerate(zip(pieces, fingerprints, strict=True)):
        for piece, fingerprint in zip(ours, prints, strict=True):
            arrays[piece.array].append(Holding(rank, piece, fingerprint))
    return dict(arrays)


def mixed_arrays(pieces: Iterable[Sequence[Piece]]) -> set[Array]:
    """Arrays whose elements lie in another order on some ranks: their bits must be compared by
    index."""
    orders: defaultdict[Array, set[Index]] = defaultdict(set)
    for ours in pieces:
        for piece in ours:
            orders[piece.array].add(piece.strides)
    return {array for array, strides in orders.items() if len(strides) > 1}


def mismatches(arrays: Mapping[Array, Sequence[Holding]], world_size: int) -> list[Mismatch]:
    """Every box that several ranks must hold alike, and do not; in the same order on every rank."""
    copies = wanted_copies(arrays, world_size)
    return [
        mismatch
        for array, held in arrays.items()
        if len(_forms(held)) == 1 and copies[array] > 1
        for mismatch in _mismatches_of(array, held)
    ]


def _mismatches_of(array: Array, held: Sequence[Holding]) -> list[Mismatch]:
    boxes: defaultdict[Box, list[Holding]] = defaultdict(list)
    for holding in held:
        boxes[holding.piece.offset, holding.piece.size].append(holding)
    found = []
    for box, holders in boxes.items():
        counts = Counter(holding.fingerprint for holding in holders)
        if len(counts) > 1:
            most, count = counts.most_common(1)[0]  # of equal ones the first: the lowest rank's
            reference = next(h.rank for h in holders if h.fingerprint == most)
            others = tuple(h.rank for h in holders if h.fingerprint != most)
            found.append(Mismatch(array, box, reference, 2 * count > len(holders), others))
    return found


def judge(
    inventory: Inventory,
    arrays: Mapping[Array, Sequence[Holding]],
    differences: Mapping[Array, Sequence[Difference]],
    ranks: Sequence[str],
) -> AuditReport:
    """The report over all ranks.

    Args:
        inventory: of any rank, for what all of them have in common.
        arrays: who holds what.
        differences: what is behind each of the `mismatches`.
        ranks: what they are called.
    """
    by_param: defaultdict[str, list[PartReport]] = defaultdict(list)
    copies = wanted_copies(arrays, len(ranks))
    for array, held in arrays.items():
        by_param[array[0]].append(
            _judge_part(array[1], held, copies[array], differences.get(array, ()), ranks)
        )
    for piece in inventory.expected:
        if piece.array not in arrays:
            lost = _lost(piece.part, piece.shape, piece.dtype, min(piece.copies, len(ranks)))
            by_param[piece.param].append(lost)
    if inventory.must_have_state:
        _add_lost_state(inventory.params, by_param)
    reports = [_parameter_report(info, by_param[info.name]) for info in inventory.params]
    parameters = tuple(r for r in reports if r.name not in inventory.buffers)
    buffers = tuple(r for r in reports if r.name in inventory.buffers)
    known = {info.name for info in inventory.params}
    groups = tuple(
        ParameterReport(name, (), tuple(parts))
        for name, parts in by_param.items()
        if name not in known
    )
    kind = _kind(parameters, groups, len(ranks))
    return AuditReport(kind, tuple(ranks), parameters, buffers, groups)


def _parameter_report(info: ParamInfo, parts: Iterable[PartReport]) -> ParameterReport:
    first = sorted(parts, key=lambda part: part.part != PARAM)
    return ParameterReport(info.name, info.shape, tuple(first))


def wanted_copies(arrays: Mapping[Array, Sequence[Holding]], world_size: int) -> dict[Array, int]:
    """How many ranks must hold each element of an array: what its pieces say, or where these
    cannot know as many as hold any."""
    stated = {array: _most_common([h.piece.copies for h in held]) for array, held in arrays.items()}
    return {
        array: min(copies, world_size) if copies else _most_copies(arrays[array])
        for array, copies in stated.items()
    }


def _most_common(numbers: Sequence[int]) -> int:
    """Of equally frequent ones the smallest."""
    counts = Counter(numbers)
    return min(counts, key=lambda number: (-counts[number], number))


def _most_copies(held: Sequence[Holding]) -> int:
    boxes = Counter((h.piece.offset, h.piece.size) for h in held)
    return max(boxes.values())


def _judge_part(
    part: str,
    held: Sequence[Holding],
    copies: int,
    differences: Sequence[Difference],
    ranks: Sequence[str],
) -> PartReport:
    first = held[0].piece
    shares = _shares(held)
    forms, problem = _forms(held), ""
    if len(forms) > 1:
        each = [f"{form} on {_listed(holders, ranks)}" for form, holders in forms.items()]
        return PartReport(
            part, DIFFERENT, first.shape, first.dtype, copies, shares, problem="; ".join(each)
        )
    coverage = NOTHING_WRONG
    if first.copies:
        coverage = cover(first.shape, [(h.rank, h.piece) for h in held], copies)
    if coverage.overlaps or (coverage.gaps and copies < max(2, len(ranks))):
        verdict = MISOWNED
    elif coverage.gaps:
        verdict = MISSING
        absent = sorted(set(range(len(ranks))) - {h.rank for h in held})
        problem = f"not on {_listed(absent, ranks)}" if absent else ""
    elif differences:
        verdict = DIFFERENT
    else:
        verdict = OWNED_ONCE if copies == 1 else IDENTICAL
    return PartReport(
        part,
        verdict,
        first.shape,
        first.dtype,
        copies,
        shares,
        *coverage,
        differences=tuple(differences),
        problem=problem,
    )


def _shares(held: Sequence[Holding]) -> tuple[Share, ...]:
    boxes: defaultdict[Box, list[int]] = defaultdict(list)
    for holding in held:
        boxes[holding.piece.offset, holding.piece.size].append(holding.rank)
    return tuple(Share(offset, size, tuple(ranks)) for (offset, size), ranks in boxes.items())


def _forms(held: Sequence[Holding]) -> dict[str, list[int]]:
    """The ranks of each dtype and shape that an array has."""
    forms: defaultdict[str, list[int]] = defaultdict(list)
    for holding in held:
        form = f"{holding.piece.dtype} of shape {holding.piece.shape}"
        if holding.rank not in forms[form]:
            forms[form].append(holding.rank)
    return forms


def _listed(numbers: Sequence[int], ranks: Sequence[str]) -> str:
    return ", ".join(ranks[number] for number in numbers)


def _add_lost_state(params: Sequence[ParamInfo], by_param: dict[str, list[PartReport]]) -> None:
    """Of parameters that train, the parts that others of their group have, or where none has any
    those that others have, and that no rank has of them."""
    everywhere: dict[str, PartReport] = {}
    in_group: defaultdict[int, dict[str, PartReport]] = defaultdict(dict)
    for info in params:
        for part in by_param[info.name]:
            if part.part != PARAM and part.shape != ():
                in_group[info.group][part.part] = everywhere[part.part] = part
    for info in params:
        wanted = in_group[info.group] or everywhere
        present = {part.part for part in by_param[info.name]}
        lost = [name for name in wanted if name not in present]
        for name in lost if info.trains and 0 not in info.shape else ():
            by_param[info.name].append(_lost(name, info.shape, wanted[name].dtype, 1))


def _lost(part: str, shape: Index, dtype: str, copies: int) -> PartReport:
    """An array that no rank has anything of."""
    gap = Region((0,) * len(shape), shape, ())
    return PartReport(
        part,
        MISOWNED if copies == 1 else MISSING,
        shape,
        dtype,
        copies,
        (),
        gaps=(gap,),
        gap_elements=math.prod(shape),
        problem="" if copies == 1 else "on no rank",
    )


def _kind(
    parameters: Sequence[ParameterReport], groups: Sequence[ParameterReport], world_size: int
) -> str:
    parts = [part for parameter in parameters for part in parameter.parts]
    if any(part.verdict == MISOWNED for part in parts):
        return "misowned"
    if not all(part.ok for part in parts) or not all(group.ok for group in groups):
        return "diverged"
    if world_size == 1:
        return "single"
    state = [
        part
        for parameter in parameters
        for part in parameter.parts
        # Step counts are on all ranks in either world.
        if part.part not in (PARAM, "step") and (part.shape != () or parameter.shape == ())
    ]
    copies = {part.copies for part in state or parts}
    if copies <= {world_size}:
        return "replicated"
    return "sharded" if copies == {1} else "hybrid"
