"""Training the jobs of consistency.py on this rank, with looks at all ranks on the way."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from consistency_jobs import Job
from harness import gather, progress_bar
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters
from torch.optim import Optimizer

import fusedshard
from fusedshard.demo.model import GPT, Batches
from fusedshard.demo.train import describe_layout, difference, flat, flat_state, local_states
from fusedshard.demo.verdicts import MOMENTS, count_gaps_and_overlaps

PARTS = ("parameters", *MOMENTS)
HELD_OUT_SHARE = 16  # one byte of so many is held out, at the end of the text
Snapshot = dict[str, Tensor]  # by part, flat


@dataclass(frozen=True)
class Gap:
    """How far a tensor is from a reference: elements whose bits differ, the largest difference, and
    the norm of the difference over the reference's."""

    differing: int
    max_abs: float
    relative: float

    @staticmethod
    def between(tensor: Tensor, reference: Tensor) -> Gap:
        found = difference(tensor, reference)
        differing = (tensor.view(torch.int32) != reference.view(torch.int32)).sum().item()
        return Gap(int(differing), found.max_abs, found.relative)

    @staticmethod
    def widest(gaps: Iterable[Gap]) -> Gap:
        """The largest of each; NaN is larger than any number."""
        columns = zip(*((gap.differing, gap.max_abs, gap.relative) for gap in gaps), strict=True)
        return Gap(*(max(column, key=lambda x: (math.isnan(x), x)) for column in columns))


def mark_steps(steps: int) -> list[int]:
    """1, 2, 5, 10, 20 and so on, which look even on a log scale, and the last."""
    marks = (digit * 10**power for power in range(len(str(steps))) for digit in (1, 2, 5))
    return sorted({*(mark for mark in marks if mark <= steps), steps})


def probe_steps(args: argparse.Namespace) -> list[int]:
    """After which steps the ranks are compared: so many from the first, and from the loss, on."""
    late = (args.lost_after + mark for mark in mark_steps(args.steps - args.lost_after))
    return sorted({*mark_steps(args.steps), args.lost_after, *late})


def steps_of(job: Job, args: argparse.Namespace) -> int:
    steps: int = args.lost_after if job.brief else args.steps
    return steps


class Watch:
    """What this rank sees of a job at its probes. Every method is collective.

    Args:
        windows: inputs and targets that no rank trains on.
        spare: a model of the same shape, for the ranks' average.
        reference: by step, the snapshots that this rank's are compared with.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        optimizer: Optimizer,
        windows: tuple[Tensor, Tensor],
        spare: GPT,
        reference: Mapping[int, Snapshot] | None,
    ) -> None:
        self.probes: list[dict[str, Any]] = []
        self.snapshots: dict[int, Snapshot] = {}
        self._job, self._model, self._optimizer = job, model, optimizer
        self._parameters = list(model.parameters())
        self._windows, self._spare, self._reference = windows, spare, reference

    def look(self, step: int, before: Tensor, losses: list[float]) -> None:
        """After a step: `before` are the parameters before it, `losses` those since the last."""
        mine = self._snapshot()
        self.snapshots[step] = mine
        shared = PARTS[:1] if self._job.sharded else PARTS
        found: dict[str, Any] = {
            "step": step,
            "between_ranks": {
                part: widest_gap(mine[part], first_ranks(mine[part])) for part in shared
            },
            "update": widest_gap(mine["parameters"], before),
            "train_loss": gather(statistics.fmean(losses)),
            "held_out": gather(self._loss(self._model)),
        }
        if found["between_ranks"]["parameters"]["differing"]:
            mean = mine["parameters"].clone()
            dist.all_reduce(mean)
            vector_to_parameters(mean / dist.get_world_size(), self._spare.parameters())
            found["held_out_of_average"] = self._loss(self._spare)
        if self._reference is not None:
            theirs = self._reference[step]
            found["from_reference"] = {part: widest_gap(mine[part], theirs[part]) for part in PARTS}
        self.probes.append(found)

    def ownership(self) -> dict[str, Any] | None:
        """Who holds which moments, where not everybody holds all."""
        optimizer = self._optimizer
        if not (self._job.sharded and isinstance(optimizer, fusedshard.AdamW)):
            return None
        owned = gather(describe_layout(optimizer.layout, dist.get_rank())[0])
        sizes = [parameter.numel() for parameter in self._parameters]
        gaps, overlaps = count_gaps_and_overlaps(sizes, owned)
        held = sum(state["exp_avg"].numel() for state in local_states(optimizer))
        return {"gaps": gaps, "overlaps": overlaps, "elements": sum(sizes), "held": gather(held)}

    def _snapshot(self) -> Snapshot:
        """Whole, where the moments are sharded, too."""
        optimizer = self._optimizer
        if isinstance(optimizer, fusedshard.AdamW):
            state = flat_state(optimizer.full_state_dict())
        else:
            state = flat_state(optimizer.state_dict())
        return {"parameters": flat(self._parameters)} | {part: state[part] for part in MOMENTS}

    @torch.no_grad()
    def _loss(self, model: nn.Module) -> float:
        loss: float = getattr(model, "module", model)(*self._windows).item()
        return loss


def first_ranks(tensor: Tensor) -> Tensor:
    """The first rank's. Collective."""
    reference = tensor.clone()
    dist.broadcast(reference, src=0)
    return reference


def widest_gap(tensor: Tensor, reference: Tensor) -> dict[str, Any]:
    """The largest of all ranks', without its zeros where there is none. Collective."""
    gap = Gap.widest(gather(Gap.between(tensor, reference)))
    return asdict(gap) if gap.differing else {"differing": 0}


def start(job: Job, text: bytes, args: argparse.Namespace) -> tuple[nn.Module, Optimizer, Batches]:
    """The job's model, with the same initial weights for all, its optimizer, and this rank's
    batches. Collective."""
    torch.manual_seed(args.seed)
    model, optimizer = job.build(make_model(args))
    seed = args.seed + job.other_batches
    taught = split(text)[0]
    ranks = dist.get_rank(), dist.get_world_size()
    return model, optimizer, Batches(taught, *ranks, seed, args.batch, args.context)


def make_model(args: argparse.Namespace) -> GPT:
    return GPT(args.width, args.depth, args.heads, args.context)


def train(
    job: Job,
    reference: Mapping[int, Snapshot] | None,
    text: bytes,
    args: argparse.Namespace,
    advance: Callable[[], None],
) -> Watch:
    """Train as the job says; calls `advance()` after each step. Collective."""
    held_out = split(text)[1]
    windows = Batches(held_out, 0, 1, args.seed, args.held_out, args.context).next()
    spare = make_model(args)
    model, optimizer, batches = start(job, text, args)
    watch = Watch(job, model, optimizer, windows, spare, reference)
    probed, losses = set(probe_steps(args)), []
    for step in range(1, steps_of(job, args) + 1):
        job.begin(optimizer, step, args)
        before = flat(model.parameters()) if step in probed else None
        loss = model(*batches.next())
        loss.backward()
        job.update(model, optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
        if before is not None:
            watch.look(step, before, losses)
            losses = []
        advance()
    return watch


def split(text: bytes) -> tuple[bytes, bytes]:
    """What the ranks share, and what none of them sees."""
    held_out = len(text) // HELD_OUT_SHARE
    return text[:-held_out], text[-held_out:]


def train_all(jobs: Mapping[str, Job], text: bytes, args: argparse.Namespace) -> dict[str, Any]:
    """Train one job after another, and return what was found of each, by name. Collective."""
    snapshots: dict[str, Mapping[int, Snapshot]] = {}
    wanted = {job.reference for job in jobs.values()}
    found: dict[str, dict[str, Any]] = {}
    with progress_bar(dist.get_rank() == 0) as bar:
        task = bar.add_task("", total=sum(steps_of(job, args) for job in jobs.values()))
        for name, job in jobs.items():
            bar.update(task, description=f"{dist.get_world_size()} ranks: {name}")
            reference = snapshots[job.reference] if job.reference else None
            watch = train(job, reference, text, args, lambda: bar.advance(task))
            if name in wanted:
                snapshots[name] = watch.snapshots
            found[name] = {"reference": job.reference, "probes": watch.probes}
            if (ownership := watch.ownership()) is not None:
                found[name]["ownership"] = ownership
            if dist.get_rank() == 0 and not bar.console.is_terminal:
                bar.console.print(
                    f"{dist.get_world_size()} ranks: {name}: {steps_of(job, args)} steps"
                )
    rounded_found: dict[str, Any] = rounded(found)
    return rounded_found


def rounded(value: Any) -> Any:
    """With numbers to seven digits, which is all that fp32 has."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value
