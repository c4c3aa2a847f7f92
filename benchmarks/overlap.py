"""Which part of the exchange of gradients lies in backward, and so costs no time of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from harness import Spread

Exchanges = Sequence[tuple[float, float]]  # when each bucket was started, and when it had arrived


class Overlap(NamedTuple):
    """What one rank's backward hid in one step.

    Attributes:
        hidden: seconds of exchange before the end of backward, over all buckets.
        total: seconds of exchange.
        buckets: exchanged.
        early: those started before the end of backward.
        first: when the first was started: 0 is the beginning of backward, 1 its end.
    """

    hidden: float
    total: float
    buckets: int
    early: int
    first: float

    @staticmethod
    def of(exchanges: Exchanges, backward: tuple[float, float]) -> Overlap:
        """``backward`` is when it began, and when it returned."""
        began, ended = backward
        return Overlap(
            hidden=sum(max(0.0, min(arrived, ended) - started) for started, arrived in exchanges),
            total=sum(arrived - started for started, arrived in exchanges),
            buckets=len(exchanges),
            early=sum(started < ended for started, _ in exchanges),
            first=(min(started for started, _ in exchanges) - began) / (ended - began),
        )


def summary(steps: Sequence[Sequence[Overlap]]) -> dict[str, Any]:
    """Of steps, each as every rank saw it."""
    shares = [sum(r.hidden for r in ranks) / sum(r.total for r in ranks) for ranks in steps]
    return {
        "hidden_share": asdict(Spread.of(shares)),
        "hidden_shares": shares,
        "buckets": steps[0][0].buckets,
        "early_buckets": asdict(Spread.of([min(r.early for r in ranks) for ranks in steps])),
        "first_bucket": asdict(Spread.of([max(r.first for r in ranks) for ranks in steps])),
        "steps": len(steps),
        "steps_begun_early": sum(all(r.early for r in ranks) for ranks in steps),
    }
