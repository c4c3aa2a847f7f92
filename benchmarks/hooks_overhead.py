"""What a step of many tiny parameters costs beyond its backward: hooks, exchange, optimizer."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from charts import Panel, spreads_of
from harness import Samples, Spread, ratio
from record import Bar, open_console
from rich.table import Table
from runner import (
    Outcome,
    Runner,
    begin_report,
    heading,
    phases_table,
    publish,
    take_turns,
)
from step_variants import (
    DDP,
    DDP_FOREACH,
    DDP_VIEW,
    HYPERPARAMETERS,
    REPLICATED,
    SHARDED,
    SHARDED_IN_STEP,
    Build,
    Built,
    ddp,
    ours,
)
from torch import nn

BARE = "backward alone"
PLAIN = "AdamW fused, without DDP"
PLAIN_FOREACH = "AdamW foreach, without DDP"

NUMEL = 4  # of each parameter
# With this eps an update shows the scale of its gradient.
ADAM = HYPERPARAMETERS | {"eps": 1.0}
FOREACH, FUSED = ADAM | {"foreach": True}, ADAM | {"fused": True}


class _Given(torch.autograd.Function):
    """A loss whose gradients are known beforehand: accumulating them is all that backward does."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *params: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return None, *ctx.gradients


class TinyParameters(nn.Module):
    """Parameters with the same values on every rank, and gradients that differ."""

    def __init__(self, count: int) -> None:
        super().__init__()
        values = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(NUMEL, generator=values) for _ in range(count))
        slopes = torch.Generator().manual_seed(1 + dist.get_rank())
        self._gradients = [torch.randn(NUMEL, generator=slopes) for _ in range(count)]

    def forward(self) -> torch.Tensor:
        return _Given.apply(self._gradients, *self.weights)


class TinyRunner(Runner):
    """The forward is left out of all times: it is made up, but for what DDP does in it."""

    phases = ("backward", "step", "zero_grad")

    def __init__(self, build: Build, args: argparse.Namespace) -> None:
        model = TinyParameters(args.tensors)
        super().__init__(model, build, args.overhead_steps)
        self._params = list(model.parameters())
        self._first = self._values()

    def step(self) -> Sequence[float]:
        loss = self.model()
        marks = [time.perf_counter()]
        loss.backward()
        marks.append(time.perf_counter())
        self.optimizer.step()
        marks.append(time.perf_counter())
        self.optimizer.zero_grad()
        marks.append(time.perf_counter())
        return marks

    def _values(self) -> torch.Tensor:
        return torch.cat([param.detach() for param in self._params])

    def change(self) -> torch.Tensor:
        """What all steps together have added to the parameters."""
        return self._values() - self._first


class _NoUpdate(torch.optim.SGD):
    """Only clears gradients."""

    def step(self, closure: Any = None) -> Any:
        return None


def _bare(model: nn.Module) -> Built:
    return model, _NoUpdate(model.parameters(), lr=0.0)


def _plain(model: nn.Module, adam: dict[str, Any]) -> Built:
    return model, torch.optim.AdamW(model.parameters(), **adam)


def builders(ranks: int) -> dict[str, Build]:
    alone: dict[str, Build] = {
        PLAIN_FOREACH: partial(_plain, adam=FOREACH),
        PLAIN: partial(_plain, adam=FUSED),
    }
    return {
        BARE: _bare,
        **(alone if ranks == 1 else {}),
        DDP_FOREACH: partial(ddp, adam=FOREACH),
        DDP: partial(ddp, adam=FUSED),
        DDP_VIEW: partial(ddp, adam=FUSED, gradient_as_bucket_view=True),
        REPLICATED: partial(ours, **ADAM, mode="replicated"),
        SHARDED: partial(ours, **ADAM, mode="sharded"),
        SHARDED_IN_STEP: partial(ours, **ADAM, mode="sharded", grad_sync="step"),
    }


def measure(args: argparse.Namespace) -> None:
    """Time all runners on the ranks of the default group; its first rank reports. Collective."""
    torch.set_num_threads(args.threads)
    ranks = dist.get_world_size()
    runners = {name: TinyRunner(build, args) for name, build in builders(ranks).items()}
    outcome = take_turns(runners, args)
    if dist.get_rank() == 0:
        found = begin_report("hooks", outcome, args)
        wanted = runners[DDP_FOREACH].change()
        others = [runner.change() for name, runner in runners.items() if name != BARE]
        found["largest_change"] = float(wanted.abs().max())
        found["largest_difference"] = max(float((o - wanted).abs().max()) for o in others)
        report(found, outcome, args)


def overhead(samples: Samples) -> Samples:
    """What each sample took longer than the bare backward of its round."""
    return {
        name: [value - bare for value, bare in zip(seconds, samples[BARE], strict=True)]
        for name, seconds in samples.items()
        if name != BARE
    }


def report(found: dict[str, Any], outcome: Outcome, args: argparse.Namespace) -> None:
    """Complete what was found, print it and write it."""
    console, net = open_console(), overhead(outcome.samples)
    found["results"] = [outcome.row(name) for name in outcome.samples]
    for result in found["results"]:
        name = result["name"]
        if name in net:
            result["overhead_seconds"] = asdict(Spread.of(net[name]))
            result["overhead_against_ddp_foreach"] = asdict(ratio(net, name, DDP_FOREACH))
    console.print(heading(found, args.overhead_steps, f" in tensors of {NUMEL}"))
    console.print(times_table(found["results"]), phases_table(found["results"], digits=2))
    console.print(
        f"after {found['settings']['steps_of_each']} equal steps, which changed parameters by up "
        f"to {found['largest_change']:.2g}, the largest difference from {DDP_FOREACH} is "
        f"{found['largest_difference']:.1e}"
    )
    label = f"overhead / that of {DDP_FOREACH}"
    beyond = spreads_of(found["results"], "overhead_against_ddp_foreach")
    panels = [Panel("backward, step and zero_grad of tiny parameters", beyond, label, 1.0)]
    publish(
        found,
        bars(net, found["settings"]["ranks"]),
        console,
        args,
        ("Many tiny parameters", panels),
    )


def bars(net: Samples, ranks: int) -> list[Bar]:
    if ranks > 1:
        return []
    claim = f"overhead of {SHARDED} / of {DDP_FOREACH}"
    return [Bar(claim, ratio(net, SHARDED, DDP_FOREACH), at_most=1.0)]


def times_table(results: list[dict[str, Any]]) -> Table:
    table = Table(title="one step without its forward")
    columns = ("ms: median (quartiles)", "overhead: ms", f"of {DDP_FOREACH}", "CPU ms")
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left")
    for result in results:
        beyond, against = "", ""
        if result["name"] != BARE:
            beyond = Spread(**result["overhead_seconds"]).text(scale=1e3)
            against = Spread(**result["overhead_against_ddp_foreach"]).text()
        table.add_row(
            result["name"],
            Spread(**result["step_seconds"]).text(scale=1e3),
            beyond,
            against,
            f"{result['cpu_seconds'] * 1e3:.1f}",
        )
    return table
