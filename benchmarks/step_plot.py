"""The chart of a report of bench_step.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charts import COLOURS, draw_bars, new_figure, save_figure, spreads_of
from rich.console import Console
from runner import rank_count
from traffic import sent_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Parts = Mapping[str, Sequence[float]]  # one value a bar, by what they are


def draw(report: Mapping[str, Any], folder: Path, name: str, console: Console) -> None:
    results, settings = report["results"], report["settings"]
    title = f"One step of {settings['model']}, {rank_count(report)} on {settings['device']}"
    figure = new_figure(title, width=16, height=10)
    (times, phases), (memory, wire) = figure.subplots(2, 2)
    draw_bars(times, spreads_of(results, "against_ddp"), "time of a step, DDP + fused = 1", 1.0)
    names = [row["name"] for row in results]
    draw_parts(phases, names, phases_of(results), "ms of a step, first rank", stacked=True)
    draw_parts(memory, names, memory_of(results), "MB of a rank")
    draw_parts(wire, names, wire_of(results), "MB that a rank sends in a step")
    for axes in (phases, wire):
        axes.set_yticklabels([])
    save_figure(figure, report, folder, name, console)


def phases_of(results: Sequence[Mapping[str, Any]]) -> Parts:
    return {
        phase: [row["seconds"][phase] * 1e3 for row in results] for phase in results[0]["seconds"]
    }


def memory_of(results: Sequence[Mapping[str, Any]]) -> Parts:
    found = {"state": [row["state_bytes"] / 1e6 for row in results]}
    if any("peak_bytes" in row for row in results):
        found["peak since before the model"] = [r.get("peak_bytes", 0) / 1e6 for r in results]
    return found


def wire_of(results: Sequence[Mapping[str, Any]]) -> Parts:
    traffic = [row["traffic"] for row in results]
    found = {"of the algorithm": [(sent_bytes(row) or 0) / 1e6 for row in traffic]}
    if all(row["loopback_bytes"] is not None for row in traffic):
        found["measured on the loopback"] = [row["loopback_bytes"] / 1e6 for row in traffic]
    return found


def draw_parts(
    axes: Axes, names: Sequence[str], parts: Parts, label: str, *, stacked: bool = False
) -> None:
    """Horizontal bars of several parts a name, one after another or one below the other."""
    height, ends = 0.8 if stacked else 0.8 / len(parts), [0.0] * len(names)
    for number, (part, values) in enumerate(parts.items()):
        below = 0 if stacked else (number - (len(parts) - 1) / 2) * height
        places = [place + below for place in range(len(names))]
        axes.barh(places, values, height, left=ends, color=COLOURS[number], label=part)
        if stacked:
            ends = [end + value for end, value in zip(ends, values, strict=True)]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    place = {"ncols": len(parts), "bbox_to_anchor": (1, 1)}  # above the axes
    axes.legend(fontsize=8, frameon=False, loc="lower right", **place)
