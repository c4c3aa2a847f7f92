"""consistency.png: four panels, drawn from the report alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consistency_jobs import (
    AGAIN,
    BACKEND,
    DDP,
    LOST,
    NEVER,
    ORDERED,
    OTHER_BATCHES,
    WIRE_BF16,
    WIRE_BF16_ORDERED,
)
from consistency_train import PARTS

from fusedshard.demo.plot import DIVERGENCE_STYLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Found = Mapping[str, Any]
# Okabe and Ito's colours: told apart with any kind of colour vision.
MISTAKES = {NEVER: "#D55E00", LOST: "#0072B2"}
RUNS = {
    OTHER_BATCHES: ("#999999", "other batches"),
    WIRE_BF16: ("#CC79A7", "bf16 on the wire, against fp32"),
    WIRE_BF16_ORDERED: ("#E69F00", "bf16 on the wire: order alone"),
    BACKEND: ("#009E73", "fp32: order alone"),
}


def plot(report: Found, path: Path) -> None:
    """Write the figure, 1120 by 720 pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 9), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    settings = report["settings"]
    figure.suptitle(
        f"The same GPT, {settings['steps']} steps, trained in many ways: Adam's moments and the "
        "weights",
        fontsize=14,
    )
    axes = figure.subplots(2, 2)
    draw_ranks(axes[0, 0], report, "relative", r"$\|x_{rank} - x_0\|\ /\ \|x_0\|$")
    draw_ranks(axes[0, 1], report, "max_abs", "largest absolute difference")
    draw_runs(axes[1, 0], report)
    draw_losses(axes[1, 1], report)
    figure.savefig(path)


def draw_ranks(axes: Axes, report: Found, measure: str, label: str) -> None:
    for name, colour in MISTAKES.items():
        for part in PARTS:
            line, marker = DIVERGENCE_STYLES[part]
            draw(
                axes, report["ranks"][name], ("between_ranks", part), measure,
                color=colour, linestyle=line, marker=marker, label=f"{name}: {part}",
            )  # fmt: skip
    title = f"Between {report['settings']['ranks']} ranks (DDP and fusedshard: exactly 0)"
    finish(axes, title, label)


def draw_runs(axes: Axes, report: Found) -> None:
    order = report["order"]
    for name, (colour, label) in RUNS.items():
        draw(
            axes, order[name], ("from_reference", "parameters"), "relative",
            color=colour, marker="o", label=label,
        )  # fmt: skip
    draw(
        axes, order[ORDERED], ("update",), "relative",
        color="black", linestyle="--", label="what one update moves",
    )  # fmt: skip
    title = (
        f"Between runs, whose {report['settings']['order_ranks']} ranks are all identical "
        f"({AGAIN}: exactly 0)"
    )
    finish(axes, title, "weights: norm of the difference / norm")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(0, 0.4))


def draw(axes: Axes, job: Found, keys: Sequence[str], measure: str, **style: Any) -> None:
    """A gap at each probe where there is one: log scales have no place for zero."""
    points = [(probe["step"], reduce(getitem, keys, probe)) for probe in job["probes"]]
    shown = [(step, gap[measure]) for step, gap in points if gap["differing"]]
    axes.plot([step for step, _ in shown], [value for _, value in shown], markersize=4, **style)


def draw_losses(axes: Axes, report: Found) -> None:
    """What each job's models cost on text that no rank has seen, beside DDP's at the same step."""
    ranks = report["ranks"]
    base = {probe["step"]: probe["held_out"][0] for probe in ranks[DDP]["probes"]}
    for name, colour in MISTAKES.items():
        probes = ranks[name]["probes"]
        parted = [probe for probe in probes if "held_out_of_average" in probe]
        worst = [(p["step"], max(p["held_out"])) for p in probes]
        average = [(p["step"], p["held_out_of_average"]) for p in parted]
        for points, line, of in ((worst, "-", "worse rank"), (average, ":", "average of weights")):
            axes.plot(
                [step for step, _ in points], [loss - base[step] for step, loss in points],
                color=colour, linestyle=line, marker="o", markersize=4, label=f"{name}: {of}",
            )  # fmt: skip
    axes.axhline(0, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set(title="Held-out loss above DDP's", ylabel="nats a byte")
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def finish(axes: Axes, title: str, label: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(title=title, xlabel="step", ylabel=label)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=8)
