"""The PNG that each benchmark leaves beside its JSON, drawn from the report alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness import Spread
from rich.console import Console

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart with any kind of colour vision.
OURS = "#009E73"
OTHERS = "#56B4E9"
REFERENCE = "#999999"
COLOURS = (OURS, "#0072B2", "#E69F00", "#D55E00", "#CC79A7", OTHERS, "#F0E442", "#000000")


def new_figure(title: str, width: float = 12, height: float = 6) -> Figure:
    """Of 80 pixels a unit of width and height, for `save_figure`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13)
    return figure


def save_figure(
    figure: Figure, report: Mapping[str, Any], folder: Path, name: str, console: Console
) -> None:
    """Write NAME.png, which says below what it was made from, and say where."""
    machine, quick = report["machine"], report["settings"]["quick"]
    source = f"{report['date'][:10]}, commit {(report['commit'] or 'unknown')[:10]}"
    doubt = "; a --quick run, whose figures mean nothing" if quick else ""
    figure.supxlabel(f"{source}, {machine['cores']} cores of {machine['cpu']}{doubt}", fontsize=8)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path)
    console.print(f"written: {path}", soft_wrap=True)


def colour_of(name: str) -> str:
    """Ours stand out."""
    if name in ("roofline", "read floor"):
        return REFERENCE
    return OURS if "fusedshard" in name or name.startswith("fingerprint") else OTHERS


def draw_bars(
    axes: Axes, spreads: Mapping[str, Spread], label: str, reference: float | None = None
) -> None:
    """One horizontal bar a name, from the top, with whiskers from quartile to quartile.

    Args:
        label: of the axis of values, with the unit.
        reference: where a dotted line marks what values are relative to.
    """
    names, found = list(spreads), list(spreads.values())
    medians = [spread.median for spread in found]
    whiskers = [
        [max(0.0, spread.median - spread.lower) for spread in found],
        [max(0.0, spread.upper - spread.median) for spread in found],
    ]
    places = range(len(names))
    axes.barh(places, medians, xerr=whiskers, color=[colour_of(n) for n in names], capsize=2)
    for place, median in zip(places, medians, strict=True):
        axes.annotate(
            f"{median:.3g}",
            (min(0.0, median), place),
            xytext=(3, 0),
            textcoords="offset points",
            verticalalignment="center",
            fontsize=8,
            bbox={"boxstyle": "square,pad=0.1", "color": "white", "alpha": 0.7},
            zorder=3,
        )
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(label if reference is None else f"{label} (dotted: {reference:g})")
    if reference is not None:
        axes.axvline(reference, color="black", linestyle=":", linewidth=1)


class Panel(NamedTuple):
    """One set of bars, as `draw_bars` takes them."""

    title: str
    spreads: Mapping[str, Spread]
    label: str
    reference: float | None = None


def save_bars(
    report: Mapping[str, Any],
    folder: Path,
    name: str,
    title: str,
    panels: Sequence[Panel],
    console: Console,
) -> None:
    """Write NAME.png: one panel below the other, each as high as its bars need."""
    bars = [len(panel.spreads) + 2 for panel in panels]
    figure = new_figure(title, height=0.8 + 0.3 * sum(bars) + 0.5 * len(panels))
    columns = figure.subplots(len(panels), 1, squeeze=False, height_ratios=bars)
    for axes, panel in zip(columns[:, 0], panels, strict=True):
        draw_bars(axes, panel.spreads, panel.label, panel.reference)
        axes.set_title(panel.title, fontsize=10)
    save_figure(figure, report, folder, name, console)


def spreads_of(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, Spread]:
    """From the rows of a report, by name; rows without the figure are left out."""
    return {row["name"]: Spread(**row[key]) for row in rows if row.get(key)}
