"""Audits of a running optimizer of ours, every so many steps: fingerprints alone, and an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fusedshard.auditing.own import arrays_of
from fusedshard.auditing.pieces import PARAM
from fusedshard.auditing.prints import by_device, in_memory
from fusedshard.dense import is_plain
from fusedshard.engine import Engine
from fusedshard.kernels import CPU, FingerprintTable, capturing, fingerprints

GRAD, STEP = "grad", "step"
_NOTHING = torch.empty(0, device="cpu")


class DivergenceError(RuntimeError):
    """Ranks differ in what must be the same on all; raised on every rank.

    Attributes:
        step: how many steps the parameters have taken, with the one that was audited.
        parameter: the name of the first that differs, or ``"parameter 3"``.
        part: ``"param"``, ``"grad"``, ``"exp_avg"``, ``"exp_avg_sq"``, ``"step"``, ...
        ranks: those that are not like most; of two equally frequent ones, not like the lowest.
    """

    def __init__(
        self,
        message: str,
        step: int = 0,
        parameter: str = "",
        part: str = "",
        ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(message, step, parameter, part, list(ranks))
        self.step, self.parameter, self.part, self.ranks = step, parameter, part, list(ranks)

    def __str__(self) -> str:
        return str(self.args[0])


class Watched(NamedTuple):
    """A tensor that must be the same on every rank."""

    parameter: str
    part: str
    tensor: torch.Tensor


class Watch:
    """The audits of one optimizer.

    Args:
        every: how many calls of ``step()`` lie between two; 0: none.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._calls = 0
        self._known: list[Any] = []  # what the table was made of
        self._watched: list[Watched] = []
        self._table: FingerprintTable | None = None

    def is_due(self, engine: Engine) -> bool:
        """Whether this call of ``step()`` audits; the same on every rank.

        Raises:
            RuntimeError: it would, while a CUDA graph is captured.
        """
        self._calls += 1
        due = self._every > 0 and self._calls % self._every == 0 and engine.comm.world_size > 1
        if due and capturing(engine.device or CPU):
            raise RuntimeError(
                "audit_every: this step is captured in a CUDA graph, which cannot compare ranks: "
                "build the optimizer with audit_every=0 and call fusedshard.audit between replays"
            )
        return due

    def check_gradients(self, engine: Engine, names: Sequence[str]) -> None:
        """That those which are said to be averaged are the same on every rank. Collective; nothing
        has changed yet."""
        with engine.comm.stats.phase("audit"):
            # One of each parameter, so that the ranks' rows are of one length whatever they hold.
            grads = [
                Watched(name, GRAD, _NOTHING if param.grad is None else in_memory(param.grad))
                for name, param in zip(names, engine.params, strict=True)
            ]
            try:
                _compare(engine, grads, _prints_of(grads), names)
            except DivergenceError:
                self._calls -= 1  # nothing was done: a step in its place is audited as well
                raise

    def check_state(self, engine: Engine, names: Sequence[str]) -> None:
        """That parameters, step counts and in replicated mode all state are the same on every
        rank. Collective."""
        with engine.comm.stats.phase("audit"):
            self._refresh_table(engine, names)
            assert self._table is not None
            in_flats = {engine.params[s.param] for f in engine.flats for s in f.layout.slots}
            frozen = [
                Watched(name, PARAM, in_memory(param) if is_plain(param) else _NOTHING)
                for name, param in zip(names, engine.params, strict=True)
                if param not in in_flats
            ]
            steps = Watched("", STEP, engine.steps)  # of all parameters
            watched = [*self._watched, *frozen, steps]
            prints = torch.cat([self._table.fingerprints(), _prints_of([*frozen, steps])])
            _compare(engine, watched, prints, names)

    def _refresh_table(self, engine: Engine, names: Sequence[str]) -> None:
        """Make it anew where there is other memory than before: in between an audit costs no Python
        for each tensor."""
        known = [(flat, *flat.moments) for flat in engine.flats]
        if self._table is not None and known == self._known:
            return
        watched = []
        for flat in engine.flats:
            for slot in flat.layout.slots:
                param, name = engine.params[slot.param], names[slot.param]
                watched.append(Watched(name, PARAM, param.detach()))
                if flat.owners == 1:
                    arrays = arrays_of(flat, slot, param)
                    watched += [Watched(name, array.part, array.tensor) for array in arrays]
        self._known, self._watched = known, watched
        self._table = FingerprintTable([item.tensor for item in watched])


def _compare(
    engine: Engine, watched: Sequence[Watched], prints: torch.Tensor, names: Sequence[str]
) -> None:
    """Raise DivergenceError on every rank where fingerprints differ. Collective."""
    rows = engine.comm.gather_fingerprints(prints)
    differs = (rows != rows[0]).any(dim=0).nonzero().flatten().tolist()
    if not differs:
        return
    first, column = watched[differs[0]], rows[:, differs[0]].tolist()
    most, count = Counter(column).most_common(1)[0]  # of equal ones the lowest rank's
    ranks = [rank for rank, value in enumerate(column) if value != most]
    reference = column.index(most)
    steps = engine.comm.gather_objects(engine.steps.tolist())
    step = max(steps[reference]) + (first.part == GRAD)
    parameter = first.parameter
    if first.part == STEP:
        pairs = zip(steps[reference], steps[ranks[0]], strict=True)
        parameter = names[[ours != theirs for ours, theirs in pairs].index(True)]
    who = _unlike(ranks, reference, has_majority=2 * count > len(column))
    more = f" (and {len(differs) - 1} tensors more)" if len(differs) > 1 else ""
    advice = _ADVICE.get(first.part, _USUAL_ADVICE)
    text = f"audit at step {step}: {first.part} of {parameter} {who}{more}: {advice}"
    raise DivergenceError(text, step, parameter, first.part, ranks)


_ADVICE = {
    GRAD: 'grad_sync="external" takes gradients that are averaged over the ranks already: wrap the '
    'model in DistributedDataParallel, or let grad_sync="backward" average them'
}
_USUAL_ADVICE = "fusedshard.audit(optimizer, model) says how far they are apart"


def _unlike(ranks: Sequence[int], reference: int, *, has_majority: bool) -> str:
    listed = ", ".join(map(str, ranks))
    if has_majority:
        return f"on rank{'s' if len(ranks) > 1 else ''} {listed} differs from that on most ranks"
    return f"differs between rank {reference} and rank{'s' if len(ranks) > 1 else ''} {listed}"


def _prints_of(watched: Sequence[Watched]) -> torch.Tensor:
    prints = torch.zeros(len(watched), dtype=torch.int64, device="cpu")
    for places in by_device([item.tensor for item in watched]):
        prints[places] = fingerprints([watched[place].tensor for place in places])
    return prints
