"""report.png of the demo: four panels, drawn from the report alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusedshard.demo.verdicts import Report, formats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours: told apart with any kind of colour vision.
VARIANT_COLOURS = {
    "ddp": "#000000",
    "replicated": "#56B4E9",
    "sharded": "#009E73",
    "mistake": "#D55E00",
}
RANK_COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#999999",
)
MOST_LABELLED = 4  # ranks, beyond which bars are too narrow for their numbers
# Three variants lie on one another: the first is drawn broad, those on it narrower and dashed.
LOSS_STYLES: dict[str, dict[str, Any]] = {
    "ddp": {"linewidth": 5, "alpha": 0.25},
    "replicated": {"linewidth": 2.5},
    "sharded": {"linewidth": 1.5, "linestyle": (0, (3, 3))},
    "mistake": {"linewidth": 1.5},
}
DIVERGENCE_STYLES = {
    "parameters": ("-", "o"),
    "exp_avg": ("--", "s"),
    "exp_avg_sq": (":", "^"),
}


def plot(report: Report, path: Path) -> None:
    """Write the figure, 1600 by 1000 pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 10), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    numel = sum(parameter["numel"] for parameter in report["parameters"])
    settings = report["settings"]
    figure.suptitle(
        f"fusedshard demo: a GPT of {numel / 1e6:.2f} M parameters on {settings['ranks']} ranks, "
        f"{settings['steps']} steps, four ways, {formats(settings)}",
        fontsize=15,
    )
    axes = figure.subplots(2, 2)
    draw_loss(axes[0, 0], report)
    draw_divergence(axes[0, 1], report)
    draw_state_bytes(axes[1, 0], report)
    draw_owners(axes[1, 1], report)
    figure.savefig(path)


def draw_loss(axes: Axes, report: Report) -> None:
    for variant, found in report["variants"].items():
        steps = range(1, len(found["loss"]) + 1)
        colour = VARIANT_COLOURS[variant]
        axes.plot(steps, found["loss"], color=colour, label=variant, **LOSS_STYLES[variant])
    axes.set(title="Loss", ylabel="cross-entropy, mean of the ranks (nats a byte)")
    name_steps(axes)
    axes.grid(alpha=0.3)
    axes.legend()


def draw_divergence(axes: Axes, report: Report) -> None:
    """Relative differences on a log scale, with a line for exact zeros below it."""
    identical: dict[str, list[str]] = {}
    different = []
    for variant, found in report["variants"].items():
        for name in [name for name in DIVERGENCE_STYLES if name in found["comparisons"][0]]:
            values = [comparison[name]["relative"] for comparison in found["comparisons"]]
            if any(values):
                different += [value for value in values if math.isfinite(value)]
                draw_difference(axes, variant, name, found["comparisons"])
            else:
                identical.setdefault(variant, []).append(name)
    top = max(different, default=1.0)
    floor = min((value for value in different if value > 0), default=1e-3) / 30
    axes.set_yscale("symlog", linthresh=floor, linscale=0.5)
    axes.set_ylim(-floor / 2, top * 30)  # room for the legend
    axes.axhline(0, color="black", linewidth=3, alpha=0.5)
    axes.text(
        0.5, floor / 8, describe_identical(identical), fontsize=9, va="bottom", ha="center",
        transform=axes.get_yaxis_transform(), bbox={"color": "white", "pad": 1},
    )  # fmt: skip
    axes.set(
        title="Difference between the ranks",
        ylabel=r"$\|x_{rank} - x_0\|\ /\ \|x_0\|$, of the rank furthest from rank 0",
    )
    name_steps(axes)
    axes.grid(alpha=0.3)
    if different:
        axes.legend(loc="upper center", ncols=3)


def name_steps(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_difference(
    axes: Axes, variant: str, name: str, comparisons: Sequence[dict[str, Any]]
) -> None:
    line, marker = DIVERGENCE_STYLES[name]
    axes.plot(
        [comparison["after_step"] for comparison in comparisons],
        [comparison[name]["relative"] for comparison in comparisons],
        color=VARIANT_COLOURS[variant], linestyle=line, marker=marker, markersize=4,
        label=f"{variant}: {name}",
    )  # fmt: skip


def describe_identical(identical: dict[str, list[str]]) -> str:
    lines = [f"{variant}: {', '.join(sorted(names))}" for variant, names in identical.items()]
    return "\n".join(["exactly 0 at every compared step:", *lines]) if lines else ""


def draw_state_bytes(axes: Axes, report: Report) -> None:
    """A bar for each rank and variant: moments, and hatched on top of them masters."""
    ranks = report["settings"]["ranks"]
    width = 0.8 / ranks
    variants = report["variants"].values()
    for rank in range(ranks):
        moments = [found["moment_bytes"][rank] / 1e6 for found in variants]
        masters = [found["master_bytes"][rank] / 1e6 for found in variants]
        places = [place + (rank - (ranks - 1) / 2) * width for place in range(len(moments))]
        look: dict[str, Any] = {"width": width * 0.95, "color": rank_colour(rank)}
        axes.bar(places, moments, label=f"rank {rank}", **look)
        top = axes.bar(places, masters, bottom=moments, hatch="//", edgecolor="white", **look)
        if ranks <= MOST_LABELLED:
            totals = [f"{sum(both):.1f}" for both in zip(moments, masters, strict=True)]
            axes.bar_label(top, labels=totals, fontsize=8)
    axes.set_xticks(range(len(report["variants"])), list(report["variants"]))
    axes.set(
        title="Optimizer state per rank",
        ylabel="exp_avg and exp_avg_sq; hatched: master weights ($10^6$ bytes)",
    )
    axes.margins(y=0.45)  # for labels and legend
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    if ranks <= MOST_LABELLED:
        axes.legend(ncols=ranks, loc="upper right")
    else:
        axes.set_xlabel("bars: ranks in order")


def draw_owners(axes: Axes, report: Report) -> None:
    """A row a rank: the elements whose moments it holds, in the order of the flat buffers."""
    sharded = report["variants"]["sharded"]
    ranks = report["settings"]["ranks"]
    everything = [one for bucket in sharded["buckets"] for one in bucket]
    edges = [0, *accumulate(_elements(bucket) for bucket in sharded["buckets"])]
    for rank, owned in enumerate(sharded["owned"]):
        row = (rank - 0.4, 0.8)
        axes.broken_barh(spans(owned, everything), row, facecolor=rank_colour(rank))
    axes.broken_barh(
        spans(everything, everything), (ranks - 0.4, 0.8), facecolor=("#BBBBBB", "#DDDDDD")
    )
    for index, (start, stop) in enumerate(pairwise(edges)):
        axes.axvline(stop, color="black", linewidth=1, linestyle="--")
        axes.text((start + stop) / 2, -0.5, f"bucket {index}", ha="center", va="bottom")
    rows = [*(f"sharded,\nrank {rank}" for rank in range(ranks)), "replicated,\neach rank"]
    axes.set_yticks(range(ranks + 1), rows)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}")
    axes.set(
        title="Who owns the optimizer state of which element",
        xlabel="element in the flat buffers (millions); dashed: a bucket ends; grey: parameters",
        xlim=(0, edges[-1]),
        ylim=(ranks + 0.6, -0.5 - 0.1 * (ranks + 1)),  # the first rank on top
    )


def spans(
    ranges: Iterable[Sequence[int]], everything: Iterable[Sequence[int]]
) -> list[tuple[int, int]]:
    """(start, length) of ranges (parameter, start, stop) where `everything` is in a row."""
    wanted = list(ranges)
    found = []
    place = 0
    for parameter, start, stop in everything:
        for other, low, high in wanted:
            begin, end = max(start, low), min(stop, high)
            if other == parameter and begin < end:
                found.append((place + begin - start, end - begin))
        place += stop - start
    return found


def _elements(ranges: Iterable[Sequence[int]]) -> int:
    return sum(stop - start for _, start, stop in ranges)


def rank_colour(rank: int) -> str:
    return RANK_COLOURS[rank % len(RANK_COLOURS)]
