"""How fusedshard grows: layout, construction and Python's share of a step at 8 to 16,384 ranks.

    python benchmarks/bench_scale.py [--ranks 8 1024] [--quick]

Of models of 70 billion and of 1 trillion parameters, and of 10,000 small tensors, on one process
without the model's memory (`scale_dry_run`). README.md says how to read the figures.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from charts import COLOURS, new_figure, save_figure
from harness import Spread, progress_bar
from record import (
    Bar,
    add_run_options,
    bars_table,
    folder_of,
    header,
    open_console,
    positive,
    write,
)
from rich.console import Console
from rich.table import Table
from scale_dry_run import AddressSpace, dry_rank

import fusedshard
from fusedshard.comm import Communicator
from fusedshard.fingerprint import agree_on_groups
from fusedshard.layout import FlatLayout, Layout, build_layout
from fusedshard.params import spec_of
from fusedshard.precision import Precision
from fusedshard.stats import Stats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Shapes = list[tuple[int, ...]]
PHASES = ("exchange", "status", "update", "gather")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CAP_BYTES = 25 * 1024 * 1024  # the default of bucket_cap_mb
JUDGED_RANKS = 1024
MOST_SECONDS, MOST_WASTE = 2.0, 1.0  # of construction; % of padding


def transformer(
    width: int,
    layers: int,
    *,
    key_value: int,
    feed_forward: int,
    vocabulary: int,
    experts: int | None = None,
) -> Shapes:
    """Weights of a decoder as Llama's, or with a router and so many experts in each layer."""
    attention = [(width, width), (key_value, width), (key_value, width), (width, width)]
    mlp = [(feed_forward, width), (feed_forward, width), (width, feed_forward)]
    router = [] if experts is None else [(experts, width)]
    layer = [*attention, *router, *mlp * (experts or 1), (width,), (width,)]
    return [(vocabulary, width), *layer * layers, (width,), (vocabulary, width)]


def models(*, quick: bool) -> dict[str, Shapes]:
    if quick:
        sizes = {"key_value": 64, "feed_forward": 512, "vocabulary": 1000}
        return {
            "small dense": transformer(256, 2, **sizes),
            "small experts": transformer(256, 2, experts=4, **sizes),
            "50 tensors": [(1000,)] * 50,
        }
    sizes = {"key_value": 1024, "vocabulary": 128256}
    return {
        "70 B, dense": transformer(8192, 80, feed_forward=28672, **sizes),
        "1 T, 16 experts": transformer(8192, 96, feed_forward=26624, experts=16, **sizes),
        "10,000 tensors": [(1000,)] * 10_000,
    }


def numel_of(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


def waste_of(layout: Layout, numel: int) -> float:
    """Padding as a share of what is padded."""
    return layout.padded_numel / numel - 1


def owned_numels(layout: Layout) -> torch.Tensor:
    """Elements that each rank owns, without padding: int64."""
    owned = torch.zeros(layout.world_size, dtype=torch.int64)
    for flat in layout.flats:
        for bucket in flat.buckets:
            places = bucket.start + torch.arange(layout.world_size + 1) * bucket.shard_numel
            owned += _elements_before(flat, places).diff()
    return owned


def _elements_before(flat: FlatLayout, places: torch.Tensor) -> torch.Tensor:
    """How many of the flat buffer's elements before each place are not padding."""
    starts = torch.tensor([slot.start for slot in flat.slots])
    lengths = torch.tensor([slot.numel for slot in flat.slots])
    slots = torch.searchsorted(starts, places, right=True) - 1
    whole = (lengths.cumsum(0) - lengths)[slots]
    return whole + torch.minimum(places - starts[slots], lengths[slots])


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Job:
    """One rank's part of a job, without its memory."""

    def __init__(self, space: AddressSpace, shapes: Shapes, dtype: torch.dtype) -> None:
        self._space, self._shapes, self._dtype = space, shapes, dtype
        self.params = [torch.nn.Parameter(tensor) for tensor in self._tensors()]

    def _tensors(self) -> list[torch.Tensor]:
        news = (self._space.new(math.prod(shape), self._dtype) for shape in self._shapes)
        return [tensor.view(shape) for tensor, shape in zip(news, self._shapes, strict=True)]

    def build_layout(self, ranks: int) -> float:
        specs = [spec_of(i, param, DEFAULTS) for i, param in enumerate(self.params)]
        return timed(lambda: build_layout(specs, ranks, CAP_BYTES))

    def agree(self) -> float:
        """What the ranks compare at construction."""
        comm, groups = Communicator(None, Stats()), torch.optim.AdamW(self.params).param_groups
        return timed(lambda: agree_on_groups(comm, None, {}, groups))

    def build(self) -> float:
        def build() -> None:
            self.optimizer = fusedshard.AdamW(self.params)

        return timed(build)

    def backward(self) -> float:
        """Autograd's own part of it, and the hooks: gradients are added to those of other
        addresses than before."""
        for param, grad in zip(self.params, self._tensors(), strict=True):
            param.grad = grad
        gradients = self._tensors()
        return timed(lambda: torch.autograd.backward(self.params, gradients))

    def step(self) -> dict[str, float]:
        """Seconds by phase, and those of none of them; hooks are what takes longer than
        `backward` without any."""
        stats = self.optimizer.stats
        stats.reset()
        backward = self.backward()
        in_backward = stats.seconds["exchange"]
        step = timed(self.optimizer.step)
        phases = {name: stats.seconds[name] for name in PHASES}
        rest = step + in_backward - sum(phases.values())
        return {"backward": backward - in_backward, **phases, "rest of step": rest}


DEFAULTS = Precision(None, torch.float32, True, 0)


def measure(shapes: Shapes, dtype: torch.dtype, ranks: int, repeats: int) -> dict[str, Any]:
    """One row of the report, but for its name."""
    with dry_rank(ranks) as space:
        built = []
        for _ in range(repeats + 1):
            job = Job(space, shapes, dtype)
            gc.collect()  # what earlier ones have left is not this one's
            bare_backward = job.backward()
            built.append((job.build_layout(ranks), job.agree(), job.build(), bare_backward))
        names = ("layout", "agreement", "construction", "bare backward")
        samples = dict(zip(names, map(list, zip(*built[1:], strict=True)), strict=True))
        bare = samples.pop("bare backward")
        steps = [job.step() for _ in range(repeats + 1)][1:]
        row = description(job.optimizer, shapes)
    # Where all of it is shorter than backward's own jitter, nothing is left.
    hooks = [max(0.0, s.pop("backward") - alone) for s, alone in zip(steps, bare, strict=True)]
    phases = {name: [step[name] for step in steps] for name in steps[0]} | {"hooks": hooks}
    samples["step"] = [sum(values) for values in zip(*phases.values(), strict=True)]
    return {
        **row,
        "seconds": {name: asdict(Spread.of(values)) for name, values in samples.items()},
        "step_seconds": {name: asdict(Spread.of(values)) for name, values in phases.items()},
        "samples": samples | {f"step: {name}": values for name, values in phases.items()},
    }


def description(optimizer: fusedshard.Adam, shapes: Shapes) -> dict[str, Any]:
    """What does not depend on time, after a step."""
    layout, memory, stats = optimizer.layout, optimizer.memory(), optimizer.stats
    buckets = [(b.numel, b.shard_numel, f.itemsize) for f in layout.flats for b in f.buckets]
    owned = owned_numels(layout)
    return {
        "ranks": layout.world_size,
        "tensors": len(shapes),
        "parameters": numel_of(shapes),
        "buckets": len(buckets),
        "largest_bucket_bytes": max(numel * size for numel, _, size in buckets),
        "largest_shard_bytes": max(shard * size for _, shard, size in buckets),
        "padding_waste": waste_of(layout, numel_of(shapes)),
        "owned_elements": {"least": int(owned.min()), "most": int(owned.max())},
        "memory_bytes": memory,
        "state_bytes": memory["moments"] + memory["masters"],
        "buffer_bytes": memory["send"] + memory["receive"],
        "collectives": dict(stats.calls),
        "sent_bytes": dict(stats.sent_bytes),
    }


def measure_all(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    jobs = list(itertools.product(models(quick=args.quick).items(), DTYPES, args.ranks))
    with progress_bar(True) as bar:
        task = bar.add_task("", total=len(jobs))
        for (model, shapes), dtype, ranks in jobs:
            bar.update(task, description=f"{model}, {dtype}, {ranks:,} ranks")
            row = measure(shapes, DTYPES[dtype], ranks, args.repeats)
            bar.advance(task)
            yield {"model": model, "dtype": dtype, **row}


def bars_of(rows: Sequence[Mapping[str, Any]], model: str, ranks: int) -> list[Bar]:
    bars = []
    for row in rows:
        if (row["model"], row["ranks"]) == (model, ranks):
            name = f"{model}, {row['dtype']}, {ranks:,} ranks"
            seconds = Spread(**row["seconds"]["construction"])
            waste = Spread.of([row["padding_waste"] * 100])
            bars.append(Bar(f"{name}: s of construction", seconds, at_most=MOST_SECONDS))
            bars.append(Bar(f"{name}: % of padding", waste, at_most=MOST_WASTE))
    return bars


def layout_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("", "ranks", "tensors", "buckets", "largest MiB", "shard KiB", "padding %")
    others = ("most owned/mean", "state MiB", "buffers MiB", "collectives")
    table = Table(*columns, *others, title="Layout, and one rank's part")
    for row in rows:
        mean = row["parameters"] / row["ranks"]
        table.add_row(
            f"{row['model']}, {row['dtype']}",
            f"{row['ranks']:,}",
            f"{row['tensors']:,}",
            f"{row['buckets']:,}",
            f"{row['largest_bucket_bytes'] / 2**20:.1f}",
            f"{row['largest_shard_bytes'] / 2**10:,.1f}",
            f"{row['padding_waste'] * 100:.3f}",
            f"{row['owned_elements']['most'] / mean:.3f}",
            f"{row['state_bytes'] / 2**20:,.1f}",
            f"{row['buffer_bytes'] / 2**20:,.1f}",
            f"{sum(row['collectives'].values()):,}",
        )
    return table


def time_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("", "ranks", "layout", "compare", "construction", "step", "hooks", *PHASES, "rest")
    title = "Milliseconds of Python: medians (and quartiles)"
    table = Table(*columns, "us a bucket", title=title)
    for row in rows:
        seconds, phases = row["seconds"], row["step_seconds"]
        short = [phases[name]["median"] for name in ("hooks", *PHASES, "rest of step")]
        table.add_row(
            f"{row['model']}, {row['dtype']}",
            f"{row['ranks']:,}",
            *(f"{seconds[name]['median'] * 1e3:.1f}" for name in ("layout", "agreement")),
            *(Spread(**seconds[name]).text(1e3, 1) for name in ("construction", "step")),
            *(f"{value * 1e3:.1f}" for value in short),
            f"{seconds['step']['median'] / row['buckets'] * 1e6:.0f}",
        )
    return table


def draw(found: Mapping[str, Any], args: argparse.Namespace, console: Console) -> None:
    figure = new_figure("One rank's Python, and padding, over the number of ranks", 16, 6)
    rows = found["results"]
    for axes, title, value, limit in zip(
        figure.subplots(1, 3),
        ("construction: s", "Python of a step: s", "padding: %"),
        (
            lambda row: row["seconds"]["construction"]["median"],
            lambda row: row["seconds"]["step"]["median"],
            lambda row: row["padding_waste"] * 100,
        ),
        (MOST_SECONDS, None, MOST_WASTE),
        strict=True,
    ):
        draw_curves(axes, rows, value, limit)
        axes.set_title(title)
    axes.set_yscale("symlog", linthresh=0.01)  # some waste nothing
    axes.legend(fontsize=8)
    save_figure(figure, found, folder_of(args), "scale", console)


def draw_curves(
    axes: Axes,
    rows: Sequence[Mapping[str, Any]],
    value: Callable[[Mapping[str, Any]], float],
    limit: float | None,
) -> None:
    """One curve a model and dtype; a dotted line at what the bars allow."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    for model, dtype in dict.fromkeys((row["model"], row["dtype"]) for row in rows):
        points = [row for row in rows if (row["model"], row["dtype"]) == (model, dtype)]
        axes.plot(
            [row["ranks"] for row in points],
            [value(row) for row in points],
            marker="o",
            linestyle="-" if dtype == "bf16" else "--",
            color=COLOURS[models.index(model)],
            label=f"{model}, {dtype}",
        )
    if limit is not None:
        axes.axhline(limit, color="black", linestyle=":", linewidth=1)
    ranks = sorted({row["ranks"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ranks, [f"{count:,}" for count in ranks], rotation=45)
    axes.set_xlabel("ranks")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How fusedshard grows, without the hardware.")
    parser.add_argument("--ranks", type=positive, nargs="+", help="numbers of ranks")
    parser.add_argument("--threads", type=int, default=1, help="as torchrun has it for each rank")
    parser.add_argument("--repeats", type=positive, help="samples that are counted")
    add_run_options(parser)
    args = parser.parse_args()
    args.ranks = args.ranks or ([8, 64] if args.quick else [8, 64, 512, 1024, 4096, 16384])
    args.repeats = args.repeats or (2 if args.quick else 3)
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    gc.freeze()  # or Python would search all of torch for garbage again and again
    console = open_console()
    found = header("scale", args)
    rows = found["results"] = list(measure_all(args))
    console.print(layout_table(rows))
    console.print(time_table(rows))
    judged = max(args.ranks) if args.quick else JUDGED_RANKS
    bars = bars_of(rows, next(iter(models(quick=args.quick))), judged)
    found["bars"] = [bar.as_json() for bar in bars]
    console.print(bars_table(bars, quick=args.quick))
    write(found, folder_of(args), "scale", console)
    draw(found, args, console)


if __name__ == "__main__":
    main()
