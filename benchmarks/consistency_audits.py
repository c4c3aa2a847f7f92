"""The mistakes of consistency.py under `audit_every`: after which step does it stop them?"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from consistency_jobs import AUDIT_EVERY, Job
from consistency_train import start
from harness import gather

import fusedshard


@dataclass(frozen=True)
class Caught:
    """What a rank's DivergenceError says."""

    step: int
    part: str
    ranks: list[int]
    message: str


def catch(job: Job, text: bytes, args: argparse.Namespace) -> Caught | None:
    """Train until this rank is stopped, or for two audits after all mistakes. Collective."""
    model, optimizer, batches = start(job, text, args)
    for step in range(1, args.lost_after + 2 * AUDIT_EVERY + 1):
        job.begin(optimizer, step, args)
        model(*batches.next()).backward()
        try:
            job.update(model, optimizer)
        except fusedshard.DivergenceError as error:
            return Caught(error.step, error.part, error.ranks, str(error))
        optimizer.zero_grad()
    return None


def catch_all(jobs: Mapping[str, Job], text: bytes, args: argparse.Namespace) -> dict[str, Any]:
    """What every rank of each job was told, by name; None where it was not stopped. Collective."""
    # In the middle between two audits.
    args = argparse.Namespace(**vars(args) | {"lost_after": AUDIT_EVERY + AUDIT_EVERY // 2})
    found = {}
    for name, job in jobs.items():
        caught = gather(catch(job, text, args))
        found[name] = [asdict(of_rank) if of_rank else None for of_rank in caught]
    return found
