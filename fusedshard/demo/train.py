"""What every rank of `fusedshard demo` does: train the same job four ways, and compare.

`train` returns plain numbers and tensors; `run_variants` turns them into plain numbers alone,
which is what a rank sends to the process that reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fusedshard
from fusedshard.demo.baseline import DDPMeter, MasterAdamW
from fusedshard.demo.model import GPT, Batches
from fusedshard.demo.verdicts import MASTERS, MOMENTS
from fusedshard.layout import Layout, iterate_buckets, owned_ranges

VARIANTS = ("ddp", "replicated", "sharded", "mistake")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STATE_DTYPES = {**DTYPES, "8bit": torch.uint8}
Range = tuple[int, int, int]  # parameter index, first element, element after the last
# Not worth timing: first touches of memory, and DDP rebuilds its buckets after the first step.
UNTIMED_STEPS = 3
AUDIT_EVERY = 10  # of a run of the mistake that is to be stopped
EXACT_PROBES = 5  # the first steps, each of which is compared between the ranks
SPARSE_PROBES = 25  # and about as many later ones


@dataclass(frozen=True)
class Settings:
    """One run of the demo. `bucket_cap_mb` holds for DDP and fusedshard alike, `dtype` for all
    parameters, `state_dtype` for fusedshard's moments: names in `DTYPES` and `STATE_DTYPES`."""

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
    dtype: str = "fp32"
    state_dtype: str = "fp32"


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
        moment_bytes: of exp_avg and exp_avg_sq held by this rank, with the padding between them.
        master_bytes: of the fp32 copies, or the remainders, of bf16 parameters.
        probes: by step, the differences from the first rank, by name: "parameters", "step", and
            both moments and "master_weights", where there are, unless each rank holds its own
            shard of them.
        parameters: all of them, flat, after the last step.
        state: moments, masters and step counts, whole and flat (a collective gathers shards).
        held: elements of exp_avg that this rank holds, by parameter.
        owned: (parameter, start, stop) of the elements that are this rank's where state is sharded.
        buckets: (parameter, start, stop) of what each of fusedshard's buckets holds.
        audit: what `fusedshard.audit` says after the last step: kind, ok and headline.
    """

    losses: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    wire_bytes: int = 0
    moment_bytes: int = 0
    master_bytes: int = 0
    probes: dict[int, dict[str, Difference]] = field(default_factory=dict)
    parameters: Tensor = field(default_factory=lambda: torch.zeros(0))
    state: dict[str, Tensor] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)
    owned: list[Range] = field(default_factory=list)
    buckets: list[list[Range]] = field(default_factory=list)
    audit: dict[str, Any] = field(default_factory=dict)


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


def build(
    variant: str, settings: Settings, audit_every: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer, Meter]:
    """The variant's model, with the same initial weights for all, its optimizer and meter."""
    torch.manual_seed(settings.seed)
    model = GPT(settings.width, settings.depth, settings.heads, settings.context)
    model = model.to(DTYPES[settings.dtype])
    usual: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if variant == "ddp":
        ddp = DistributedDataParallel(model, bucket_cap_mb=settings.bucket_cap_mb)
        return ddp, torch_adamw(list(model.parameters()), **usual), DDPMeter(ddp)
    optimizer = fusedshard.AdamW(
        model.named_parameters(),
        mode="sharded" if variant == "sharded" else "replicated",
        # The mistake: this says that gradients are averaged already, and nobody has done it.
        grad_sync="external" if variant == "mistake" else "backward",
        reduction="ordered",
        bucket_cap_mb=settings.bucket_cap_mb,
        state_dtype=STATE_DTYPES[settings.state_dtype],
        seed=settings.seed,
        audit_every=audit_every,
        **usual,
    )
    return model, optimizer, FusedMeter(optimizer)


def torch_adamw(parameters: list[nn.Parameter], **options: Any) -> torch.optim.AdamW:
    if parameters[0].dtype == torch.float32:
        return torch.optim.AdamW(parameters, fused=True, **options)
    return MasterAdamW(parameters, **options)


def train(
    variant: str, settings: Settings, text: bytes, on_step: Callable[[int, float], None]
) -> Trained:
    """Train one variant on this rank. Collective; calls `on_step(step, loss)` after each step."""
    model, optimizer, meter = build(variant, settings)
    batches = batches_of(settings, text)
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
    found = fusedshard.audit(optimizer, model)
    trained.audit = {"kind": found.kind, "ok": found.ok, "headline": found.headline}
    return trained


def batches_of(settings: Settings, text: bytes) -> Batches:
    """This rank's."""
    return Batches(
        text, dist.get_rank(), settings.ranks, settings.seed, settings.batch, settings.context
    )


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
    if moments_differ_by_design:
        mine = {"step": flat(state["step"] for state in local_states(optimizer))}
    else:
        mine = flat_state(optimizer.state_dict())
    differences = {}
    for name, tensor in {"parameters": flat(parameters), **mine}.items():
        reference = tensor.clone()
        dist.broadcast(reference, src=0)
        differences[name] = difference(tensor, reference)
    return differences


def difference(tensor: Tensor, reference: Tensor) -> Difference:
    """Compare two tensors of one shape and of one dtype, fp32 or bf16."""
    gap = tensor.float() - reference.float()
    norm = reference.float().norm().item()
    return Difference(
        identical=torch.equal(tensor.view(torch.int16), reference.view(torch.int16)),
        max_abs=gap.abs().max().item(),
        relative=gap.norm().item() / norm if norm else 0.0,
    )


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def local_states(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """What this rank holds of each parameter's state, in the format that it has in memory."""
    return [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]


def flat_state(saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Of a state dict, by name: moments, step counts and, where there are, master weights."""
    states = [saved["state"][index] for index in sorted(saved["state"])]
    by_name = {
        name: [state[name] for state in states if name in state]
        for name in (*MOMENTS, MASTERS, "step")
    }
    return {name: flat(tensors) for name, tensors in by_name.items() if tensors}


def record_state(
    trained: Trained, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Fill in what is known after the last step. Collective where the state is sharded."""
    trained.parameters = flat(parameters)
    states = local_states(optimizer)
    trained.held = [state["exp_avg"].numel() for state in states]
    if isinstance(optimizer, fusedshard.AdamW):
        memory = optimizer.memory()
        trained.moment_bytes, trained.master_bytes = memory["moments"], memory["masters"]
        trained.owned, trained.buckets = describe_layout(optimizer.layout, dist.get_rank())
        trained.state = flat_state(optimizer.full_state_dict())
    else:
        trained.moment_bytes = sum(state[name].nbytes for state in states for name in MOMENTS)
        if isinstance(optimizer, MasterAdamW):
            trained.master_bytes = sum(master.nbytes for master in optimizer.masters)
        trained.state = flat_state(optimizer.state_dict())


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


def catch_mistake(settings: Settings, text: bytes) -> dict[str, Any] | None:
    """Train the mistake with audits, which must stop it: what this rank was told, or None.
    Collective."""
    every = audit_every(settings)
    model, optimizer, _ = build("mistake", settings, every)
    batches = batches_of(settings, text)
    try:
        for _ in range(2 * every):
            model(*batches.next()).backward()
            optimizer.step()
            optimizer.zero_grad()
    except fusedshard.DivergenceError as error:
        return {"step": error.step, "part": error.part, "message": str(error)}
    return None


def audit_every(settings: Settings) -> int:
    return min(AUDIT_EVERY, settings.steps)


def run_variants(
    settings: Settings, text: bytes, on_step: Callable[[str, int, float], None]
) -> dict[str, Any]:
    """Train every variant on this rank, one after another, and compare. Collective.

    Calls `on_step(variant, step, loss)`. The result holds plain numbers only: what `Trained`
    holds but for its tensors, and in their place the differences from DDP's parameters, and
    between sharded and replicated in parameters and state; and how the mistake was caught.
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
        "caught": catch_mistake(settings, text),
    }


def plain(run: Trained, ddp: Trained) -> dict[str, Any]:
    """A variant's results without tensors."""
    return {
        "losses": run.losses,
        "seconds": run.seconds,
        "wire_bytes": run.wire_bytes,
        "moment_bytes": run.moment_bytes,
        "master_bytes": run.master_bytes,
        "probes": [
            {"step": step, "from_rank_0": {name: asdict(found) for name, found in probe.items()}}
            for step, probe in run.probes.items()
        ],
        "difference_from_ddp": asdict(difference(run.parameters, ddp.parameters)),
        "held": run.held,
        "owned": run.owned,
        "buckets": run.buckets,
        "audit": run.audit,
    }
