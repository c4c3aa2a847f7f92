"""What every rank of `fusedshard demo` does: train the same job four ways, and compare.

`train` returns plain numbers and tensors; `run_variants` turns them into plain numbers alone,
which is what a rank sends to the process that reports.
"""

# No `from __future__ import annotations`: DDP reads the annotations of a communication hook.

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import fusedshard
from fusedshard.demo.model import GPT, Batches
from fusedshard.layout import Layout, iterate_buckets, owned_ranges

VARIANTS = ("ddp", "replicated", "sharded", "mistake")
MOMENTS = ("exp_avg", "exp_avg_sq")
Range = tuple[int, int, int]  # parameter index, first element, element after the last
# Not worth timing: first touches of memory, and DDP rebuilds its buckets after the first step.
UNTIMED_STEPS = 3
EXACT_PROBES = 5  # the first steps, each of which is compared between the ranks
SPARSE_PROBES = 25  # and about as many later ones


@dataclass(frozen=True)
class Settings:
    """One run of the demo. `bucket_cap_mb` holds for DDP and fusedshard alike."""

    ranks: int = 2
    steps: int = 100
    seed: int = 0
    batch: int = 4  # windows of text a rank and step
    context: int = 128  # bytes a window
    width: int = 256
    depth: int = 4
    heads: int = 8
    lr: float = 3e-4
    weight_decay: float = 0.1
    bucket_cap_mb: int = 4  # several buckets, though the model is small


@dataclass(frozen=True)
class Difference:
    """How far a tensor is from a reference.

    `identical` compares bits; `relative` is the norm of the difference over the reference's.
    """

    identical: bool
    max_abs: float
    relative: float


@dataclass
class Trained:
    """What one variant did on one rank.

    Attributes:
        losses: nats a byte, of this rank's batch, at each step.
        seconds: of each step, by phase: "total", "forward_backward", "exchange", "update",
            "gather".
        wire_bytes: put on the wire by this rank in one step.
        state_bytes: of exp_avg and exp_avg_sq held by this rank.
        probes: by step, the differences from the first rank, by name: "parameters", "step", and
            both moments unless each rank holds its own shard of them.
        parameters: all of them, flat, after the last step.
        state: both moments and the step counts, whole and flat (a collective gathers shards).
        held: elements of exp_avg that this rank holds, by parameter.
        owned: (parameter, start, stop) of the elements that are this rank's where state is sharded.
        buckets: (parameter, start, stop) of what each of fusedshard's buckets holds.
    """

    losses: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    wire_bytes: int = 0
    state_bytes: int = 0
    probes: dict[int, dict[str, Difference]] = field(default_factory=dict)
    parameters: Tensor = field(default_factory=lambda: torch.zeros(0))
    state: dict[str, Tensor] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)
    owned: list[Range] = field(default_factory=list)
    buckets: list[list[Range]] = field(default_factory=list)


class Meter(Protocol):
    """Where a step's time and traffic are read, once after each step."""

    def read(self, step_seconds: float) -> tuple[dict[str, float], int]:
        """Seconds by phase and bytes sent since the last call, of which step() took some."""


class FusedMeter:
    """Reads the optimizer's own counters; the small status message counts as exchange."""

    def __init__(self, optimizer: fusedshard.AdamW) -> None:
        self._stats = optimizer.stats
        self._stats.reset()

    def read(self, step_seconds: float) -> tuple[dict[str, float], int]:
        spent = self._stats.seconds
        seconds = {
            "exchange": spent["exchange"] + spent["status"],
            "update": spent["update"],
            "gather": spent["gather"],
        }
        sent = sum(self._stats.sent_bytes.values())
        self._stats.reset()
        return seconds, sent


class DDPMeter:
    """Times DDP's all-reduces, which overlap backward, from the first start to the last end."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._started = self._ended = 0.0
        self._reduced_bytes = 0
        model.register_comm_hook(self, DDPMeter.all_reduce)

    def all_reduce(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        self._started = self._started or time.perf_counter()
        self._reduced_bytes += bucket.buffer().nbytes
        group = dist.group.WORLD
        assert group is not None
        return allreduce_hook(group, bucket).then(self._finish)

    def _finish(self, reduced: torch.futures.Future[Tensor]) -> Tensor:
        self._ended = time.perf_counter()
        return reduced.value()

    def read(self, step_seconds: float) -> tuple[dict[str, float], int]:
        seconds = {
            "exchange": self._ended - self._started,
            "update": step_seconds,
            "gather": 0.0,
        }
        world_size = dist.get_world_size()
        sent = 2 * (world_size - 1) * self._reduced_bytes // world_size
        self._started, self._reduced_bytes = 0.0, 0
        return seconds, sent


def build(variant: str, settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Meter]:
    """The variant's model, with the same initial weights for all, its optimizer and meter."""
    torch.manual_seed(settings.seed)
    model = GPT(settings.width, settings.depth, settings.heads, settings.context)
    usual: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if variant == "ddp":
        ddp = DistributedDataParallel(model, bucket_cap_mb=settings.bucket_cap_mb)
        return ddp, torch.optim.AdamW(model.parameters(), fused=True, **usual), DDPMeter(ddp)
    optimizer = fusedshard.AdamW(
        model.parameters(),
        mode="sharded" if variant == "sharded" else "replicated",
        # The mistake: this says that gradients are averaged already, and nobody has done it.
        grad_sync="external" if variant == "mistake" else "backward",
        reduction="ordered",
        bucket_cap_mb=settings.bucket_cap_mb,
        **usual,
    )
    return model, optimizer, FusedMeter(optimizer)


def train(
    variant: str, settings: Settings, text: bytes, on_step: Callable[[int, float], None]
) -> Trained:
    """Train one variant on this rank. Collective; calls `on_step(step, loss)` after each step."""
    model, optimizer, meter = build(variant, settings)
    batches = Batches(
        text, dist.get_rank(), settings.ranks, settings.seed, settings.batch, settings.context
    )
    trained = Trained()
    parameters = list(model.parameters())
    probed = set(probe_steps(settings.steps))
    for step in range(1, settings.steps + 1):
        loss, seconds, trained.wire_bytes = timed_step(model, optimizer, meter, batches.next())
        trained.losses.append(loss)
        for phase, spent in seconds.items():
            trained.seconds.setdefault(phase, []).append(spent)
        if step in probed:
            trained.probes[step] = compare_ranks(
                parameters, optimizer, moments_differ_by_design=variant == "sharded"
            )
        on_step(step, loss)
    record_state(trained, parameters, optimizer)
    return trained


def timed_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    meter: Meter,
    batch: tuple[Tensor, Tensor],
) -> tuple[float, dict[str, float], int]:
    """One step: its loss, its seconds by phase, and the bytes it sent."""
    start = time.perf_counter()
    loss = model(*batch)
    loss.backward()
    backward_end = time.perf_counter()
    optimizer.step()
    step_end = time.perf_counter()
    optimizer.zero_grad()
    end = time.perf_counter()
    phases, sent = meter.read(step_end - backward_end)
    seconds = {"total": end - start, "forward_backward": backward_end - start, **phases}
    return loss.item(), seconds, sent


def probe_steps(steps: int) -> list[int]:
    """Steps after which ranks are compared: each of the first, the last, some between."""
    stride = max(1, steps // SPARSE_PROBES)
    first = range(1, min(EXACT_PROBES, steps) + 1)
    return sorted({*first, *range(stride, steps + 1, stride), steps})


def compare_ranks(
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    moments_differ_by_design: bool,
) -> dict[str, Difference]:
    """This rank's parameters and optimizer state against those of rank 0. Collective."""
    mine = {"parameters": flat(parameters), "step": local_state(parameters, optimizer, "step")}
    if not moments_differ_by_design:
        mine |= {name: local_state(parameters, optimizer, name) for name in MOMENTS}
    differences = {}
    for name, tensor in mine.items():
        reference = tensor.clone()
        dist.broadcast(reference, src=0)
        differences[name] = difference(tensor, reference)
    return differences


def difference(tensor: Tensor, reference: Tensor) -> Difference:
    """Compare two fp32 tensors of one shape."""
    gap = tensor - reference
    norm = reference.norm().item()
    return Difference(
        identical=torch.equal(tensor.view(torch.int32), reference.view(torch.int32)),
        max_abs=gap.abs().max().item(),
        relative=gap.norm().item() / norm if norm else 0.0,
    )


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def local_state(
    parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, name: str
) -> Tensor:
    return flat(optimizer.state[parameter][name] for parameter in parameters)


def record_state(
    trained: Trained, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Fill in what is known after the last step. Collective where the state is sharded."""
    trained.parameters = flat(parameters)
    trained.held = [optimizer.state[parameter]["exp_avg"].numel() for parameter in parameters]
    trained.state_bytes = sum(
        optimizer.state[parameter][name].nbytes for parameter in parameters for name in MOMENTS
    )
    if isinstance(optimizer, fusedshard.AdamW):
        whole = optimizer.full_state_dict()
        trained.owned, trained.buckets = describe_layout(optimizer.layout, dist.get_rank())
    else:
        whole = optimizer.state_dict()
    trained.state = {
        name: flat(whole["state"][index][name] for index in range(len(parameters)))
        for name in (*MOMENTS, "step")
    }


def describe_layout(layout: Layout, rank: int) -> tuple[list[Range], list[list[Range]]]:
    """What the rank owns, and what each bucket holds."""
    owned = [
        (parameter, start, stop)
        for parameter, ranges in owned_ranges(layout, rank).items()
        for start, stop in ranges
    ]
    buckets = [
        [
            (segment.param, segment.param_start, segment.param_start + segment.length)
            for segment in flat_layout.segments(bucket.start, bucket.numel)
        ]
        for flat_layout, bucket in iterate_buckets(layout)
    ]
    return owned, buckets


def run_variants(
    settings: Settings, text: bytes, on_step: Callable[[str, int, float], None]
) -> dict[str, Any]:
    """Train every variant on this rank, one after another, and compare. Collective.

    Calls `on_step(variant, step, loss)`. The result holds plain numbers only: what `Trained`
    holds but for its tensors, and in their place the differences from DDP's parameters, and
    between sharded and replicated in parameters and state.
    """
    runs = {
        variant: train(variant, settings, text, partial(on_step, variant)) for variant in VARIANTS
    }
    sharded, replicated = runs["sharded"], runs["replicated"]
    equality = {"parameters": difference(sharded.parameters, replicated.parameters)} | {
        name: difference(sharded.state[name], replicated.state[name]) for name in sharded.state
    }
    return {
        "variants": {variant: plain(run, runs["ddp"]) for variant, run in runs.items()},
        "sharded_vs_replicated": {name: asdict(found) for name, found in equality.items()},
    }


def plain(run: Trained, ddp: Trained) -> dict[str, Any]:
    """A variant's results without tensors."""
    return {
        "losses": run.losses,
        "seconds": run.seconds,
        "wire_bytes": run.wire_bytes,
        "state_bytes": run.state_bytes,
        "probes": [
            {"step": step, "from_rank_0": {name: asdict(found) for name, found in probe.items()}}
            for step, probe in run.probes.items()
        ],
        "difference_from_ddp": asdict(difference(run.parameters, ddp.parameters)),
        "held": run.held,
        "owned": run.owned,
        "buckets": run.buckets,
    }
