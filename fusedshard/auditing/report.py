"""What an audit has found: plain numbers, the same on every rank."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusedshard.auditing.pieces import Index

if TYPE_CHECKING:
    from rich.table import Table

# Of a part:
IDENTICAL = "identical"  # all copies are there and have the same bits
OWNED_ONCE = "owned once"  # each element has one owner
DIFFERENT = "different"  # copies differ
MISSING = "missing"  # ranks lack their copy
MISOWNED = "misowned"  # elements have no owner, or too many

KINDS = ("single", "replicated", "sharded", "hybrid", "diverged", "misowned")


@dataclass(frozen=True)
class Difference:
    """How a rank's copy of a box differs from the one that most ranks have (of two equally
    frequent ones, the one that the lowest rank has).

    Attributes:
        rank: whose copy it is.
        reference: a rank that has the other.
        has_majority: whether more than half of the copies are like the reference's.
        elements: how many have other bits.
        max_abs, max_rel: the largest absolute difference, and relative to the reference's value;
            NaN where NaNs are involved.
        first_index: of the first such element, in the whole array.
        here, there: its values, on ``rank`` and on ``reference``.
    """

    rank: int
    reference: int
    has_majority: bool
    elements: int
    max_abs: float
    max_rel: float
    first_index: Index
    here: str
    there: str


@dataclass(frozen=True)
class Region:
    """A box of elements that other ranks hold than should: nobody, or too many."""

    offset: Index
    size: Index
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """A box that some ranks hold."""

    offset: Index
    size: Index
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class PartReport:
    """One array: a parameter, or a part of its state.

    Attributes:
        part: ``"param"``, ``"exp_avg"``, ``"exp_avg_sq"``, ``"step"``, ...
        verdict: ``"identical"``, ``"owned once"``, ``"different"``, ``"missing"`` or
            ``"misowned"``.
        shape: of the whole array: the parameter's, or ``(elements,)`` of its storage order.
        dtype: its name.
        copies: how many ranks must hold each element.
        shares: who holds what.
        gaps, overlaps: boxes that fewer or more ranks hold than ``copies``. Of many, the first.
        gap_elements, overlap_elements: how many elements are in all of them.
        differences: one for each rank and box that differs.
        problem: what else is wrong, as other shapes on other ranks.
    """

    part: str
    verdict: str
    shape: Index
    dtype: str
    copies: int
    shares: tuple[Share, ...]
    gaps: tuple[Region, ...] = ()
    overlaps: tuple[Region, ...] = ()
    gap_elements: int = 0
    overlap_elements: int = 0
    differences: tuple[Difference, ...] = ()
    problem: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict in (IDENTICAL, OWNED_ONCE)

    @property
    def differing_ranks(self) -> tuple[int, ...]:
        return tuple(sorted({difference.rank for difference in self.differences}))


@dataclass(frozen=True)
class ParameterReport:
    """A parameter and its state; ``parts`` has the parameter itself first."""

    name: str
    shape: Index
    parts: tuple[PartReport, ...]

    @property
    def ok(self) -> bool:
        return all(part.ok for part in self.parts)


@dataclass(frozen=True)
class AuditReport:
    """What `fusedshard.audit` returns, the same on every rank.

    Attributes:
        kind: ``"replicated"``: every rank holds all of the state, with the same bits.
            ``"sharded"``: each element of the state is owned by one rank.
            ``"hybrid"``: shards of which several ranks have a copy each, with the same bits; or
            some parameters replicated and some sharded.
            ``"diverged"``: copies that must be the same differ, or are missing.
            ``"misowned"``: elements of sharded state have no owner, or too many.
            ``"single"``: one rank, nothing to compare.
        ranks: what the columns of ranks are called: ``"rank 0"``, ..., or files.
        parameters: what was found of each. Parameters are compared, too.
        buffers: the model's buffers (BatchNorm's statistics). They do not count in `ok`: each
            rank's are its own until somebody shares them.
        groups: numbers among the hyperparameters of each param group: lr, betas, ...; they must
            be the same on all ranks.
    """

    kind: str
    ranks: tuple[str, ...]
    parameters: tuple[ParameterReport, ...]
    buffers: tuple[ParameterReport, ...] = ()
    groups: tuple[ParameterReport, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the state is what it should be."""
        return self.kind not in ("diverged", "misowned")

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def headline(self) -> str:
        """The finding in one line."""
        from fusedshard.auditing import words

        return words.headline(self)

    def table(self, *, every: bool = False) -> Table:
        """What was found, as a rich table: parameters that follow each other and are alike in one
        row, or ``every`` one in its own. Needs rich."""
        from fusedshard.auditing import words

        return words.table(self, every=every)

    def to_json(self) -> str:
        """All of it as JSON text; numbers that are not finite as strings."""
        found = {"ok": self.ok, "headline": self.headline, **dataclasses.asdict(self)}
        return json.dumps(_finite(found), indent=1)

    def plot(self, path: str | Path) -> None:
        """Draw who owns what, and how much ranks differ from each other. Needs matplotlib."""
        from fusedshard.auditing import plot

        plot.draw(self, Path(path))

    def __str__(self) -> str:
        return self.headline


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
