"""What one way to train takes on a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Usage:
    """Bytes on one rank, after a step: on the fullest rank, where ranks differ.

    Attributes:
        parameters, gradients: of the model.
        masters: fp32 values behind 16-bit parameters.
        exp_avg, exp_avg_sq: the moments.
        steps: step counts.
        buffers: all else, by what it is for.
        sent: bytes that the rank puts on the wire in a step, by collective.
        moved: bytes that the update reads and writes.
    """

    parameters: int
    gradients: int
    masters: int
    exp_avg: int
    exp_avg_sq: int
    steps: int
    buffers: Mapping[str, int] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict)
    moved: int = 0

    @property
    def memory(self) -> dict[str, int]:
        """By kind."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "masters": self.masters,
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
            "steps": self.steps,
            "buffers": sum(self.buffers.values()),
        }

    @property
    def total(self) -> int:
        return sum(self.memory.values())

    @property
    def total_sent(self) -> int:
        return sum(self.sent.values())


MODEL = ("parameters", "gradients")
STATE = ("masters", "exp_avg", "exp_avg_sq")


class Way(NamedTuple):
    """One way to train.

    Attributes:
        library: whose.
        name: of the way.
        usage: what it takes on so many ranks.
        kept_whole: kinds of memory of which each rank has all.
    """

    library: str
    name: str
    usage: Callable[[int], Usage]
    kept_whole: tuple[str, ...]


def all_reduced(nbytes: int, ranks: int) -> int:
    """What a rank sends of ``nbytes`` in a ring all-reduce: a reduce-scatter and an all-gather."""
    return 2 * passed_on(nbytes, ranks)


def passed_on(nbytes: int, ranks: int) -> int:
    """What a rank sends of ``nbytes``, all ranks' together, in a ring reduce-scatter or all-gather;
    in a broadcast along a chain, on the average of the ranks."""
    return nbytes * (ranks - 1) // ranks
