"""What the ranks tell each other at each step: one small all-gather, before anything changes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fusedshard.comm import Communicator
from fusedshard.tables import GroupScalars

_DIGEST_BYTES = 8


class Status(NamedTuple):
    """One rank's view.

    Attributes:
        error: what is wrong on this rank already, or None.
        call: the function that the ranks agree in, and what it was asked to do.
        groups: hyperparameters of each param group.
        turn: how many agreements were before this one: ranks that call step() unequally often
            must not be taken for each other.
        scaling: what a loss scaler wants of this step, in words; empty without one, or where it
            is known that all ranks' scalers want the same.
        present: for each parameter whether this rank has a gradient of it.
        changed: whether any gradient is another one than was averaged last.
        stale: for each bucket whether its gradients must be sent (again).
    """

    error: Exception | None
    call: str
    groups: Sequence[GroupScalars]
    turn: int
    scaling: str
    present: Sequence[bool]
    changed: bool
    stale: Sequence[bool]


class Agreement(NamedTuple):
    """What follows for all ranks alike.

    Attributes:
        used: for each parameter 1 if any rank has a gradient of it, else 0.
        partly: the numbers of those that only some ranks have.
        changed: whether any rank's gradients are others than were averaged last.
        stale: the numbers of the buckets that must be sent (again).
    """

    used: list[int]
    partly: list[int]
    changed: bool
    stale: list[int]


def agree(comm: Communicator, status: Status) -> Agreement:
    """Combine the ranks' views. Collective.

    Raises:
        RuntimeError: on every rank, if one of them has an error, or the ranks' calls, or their
            hyperparameters or loss scalers, differ. TypeError, ValueError: where that is the kind
            of a rank's error.
    """
    if comm.world_size == 1:
        if status.error is not None:
            raise status.error
        return Agreement([int(present) for present in status.present], [], status.changed, [])
    known = [group.on_host() for group in status.groups]
    wanted = (status.call, status.turn, status.scaling, known)
    digest = hashlib.sha256(repr(wanted).encode()).digest()[:_DIGEST_BYTES]
    row = [*digest, status.error is not None, status.changed, *status.stale, *status.present]
    with comm.stats.phase("status"):
        rows = comm.gather_rows(torch.tensor(row, dtype=torch.uint8, device="cpu"))
        digests, flags = rows[:, :_DIGEST_BYTES], rows[:, _DIGEST_BYTES:]
        failed, changed, *anywhere = flags.amax(dim=0).tolist()
        if failed:
            comm.raise_everywhere(status.error)
        if bool((digests != digests[0]).any()):
            calls, turns, scalings, groups = zip(*comm.gather_objects(wanted), strict=True)
            raise RuntimeError(
                _call_difference(calls)
                or _turn_difference(turns)
                or _scaling_difference(scalings)
                or _group_difference(groups)
            )
    count = len(status.stale)
    stale = [number for number, is_stale in enumerate(anywhere[:count]) if is_stale]
    used, everywhere = anywhere[count:], flags[:, 2 + count :].amin(dim=0).tolist()
    partly = [i for i, (some, all_) in enumerate(zip(used, everywhere, strict=True)) if some > all_]
    return Agreement(used, partly, bool(changed), stale)


def _call_difference(by_rank: Sequence[str]) -> str:
    """In words, which calls the ranks are in; empty where all are in one."""
    calls = _unless_alike(by_rank)
    return calls and (
        "optimizer: the ranks' calls differ, and each must be made by all of them, equally often "
        f"and with the same arguments: {calls}"
    )


def _turn_difference(by_rank: Sequence[int]) -> str:
    """In words, which rank is ahead; empty where none is."""
    counts = _unless_alike(by_rank)
    return counts and (
        "step: the ranks have not called it (or clip_grad_norm_, synchronize, GradScaler.unscale_, "
        f"or backward in replicated mode) equally often: calls before this one are {counts}"
    )


def _unless_alike(by_rank: Sequence[object]) -> str:
    """What each rank has; empty where all have the same."""
    if len(set(by_rank)) == 1:
        return ""
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(by_rank))


def _scaling_difference(by_rank: Sequence[str]) -> str:
    """In words, how a rank's loss scaler differs from rank 0's; empty where none does."""
    for rank, scaling in enumerate(by_rank):
        if scaling != by_rank[0]:
            return (
                f"GradScaler: the ranks' differ ({by_rank[0] or 'none'} on rank 0, "
                f"{scaling or 'none'} on rank {rank}): give all the same scale, and load its state "
                "on every rank; torch.amp.GradScaler looks at its own rank's gradients alone: use "
                "fusedshard.GradScaler"
            )
    return ""


def _group_difference(by_rank: Sequence[list[tuple[float, ...]]]) -> str:
    """In words, the first hyperparameter in which a rank differs from rank 0."""
    for rank, theirs in enumerate(by_rank):
        for index, (other, first) in enumerate(zip(theirs, by_rank[0], strict=True)):
            for name, here, there in zip(GroupScalars._fields, other, first, strict=True):
                if repr(here) != repr(there):
                    return (
                        f"param_groups[{index}]: {name} is {here} on rank {rank} and {there} on "
                        "rank 0: set it alike on every rank"
                    )
    return "param_groups: the ranks' hyperparameters differ"
