"""The chart of bench_kernel.py: bandwidth over size, configurations of formats, small tensors; one
row of them a number of threads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charts import COLOURS, REFERENCE, draw_bars, new_figure, save_figure, spreads_of
from rich.console import Console

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Results = Sequence[dict[str, Any]]


def size_text(elements: int) -> str:
    for power, unit in ((30, " Gi"), (20, " Mi"), (10, " Ki")):
        if elements % (1 << power) == 0:
            return f"{elements >> power}{unit}"
    return f"{elements:,}"


def grouped(results: Results) -> dict[int, list[dict[str, Any]]]:
    """By number of threads, in the order of the report."""
    found: dict[int, list[dict[str, Any]]] = {}
    for result in results:
        found.setdefault(result["threads"], []).append(result)
    return found


def lines(results: Results) -> dict[str, tuple[list[int], list[dict[str, Any]]]]:
    """Sizes and rows of what works on fp32 alone, by name."""
    found: dict[str, tuple[list[int], list[dict[str, Any]]]] = {}
    for result in results:
        for row in result["rows"]:
            if ": " not in row["name"]:  # between a contender and a configuration
                sizes, rows = found.setdefault(row["name"], ([], []))
                sizes.append(result["elements"])
                rows.append(row)
    return found


def draw_sizes(axes: Axes, results: Results) -> None:
    colours = iter(COLOURS * len(COLOURS))
    for name, (sizes, rows) in lines(results).items():
        reference = name in ("roofline", "read floor")
        colour = REFERENCE if reference else next(colours)
        style = {"roofline": "--", "read floor": ":"}.get(name, "-")
        moved = rows[0]["bytes_an_element"]

        def speeds(key: str, rows: Results = rows, moved: int = moved) -> list[float]:
            pairs = ((row, result["elements"]) for row, result in zip(rows, results, strict=True))
            return [moved * elements / row["seconds"][key] / 1e9 for row, elements in pairs]

        axes.plot(sizes, speeds("median"), style, color=colour, marker=".", label=name)
        axes.fill_between(sizes, speeds("upper"), speeds("lower"), color=colour, alpha=0.2)
    axes.set_xscale("log", base=2)
    sizes = [result["elements"] for result in results]
    axes.set_xticks(sizes, [size_text(size) for size in sizes], fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("fp32 elements")
    axes.set_ylabel("GB/s of the bytes that must be moved")
    axes.legend(fontsize=7)


def draw(report: dict[str, Any], folder: Path, console: Console) -> None:
    """Write kernel.png."""
    by_threads = grouped(report["results"])
    title = f"The update alone, {report['device_name']}"
    figure = new_figure(title, 20, 1 + 5 * len(by_threads))
    axes = figure.subplots(len(by_threads), 3, squeeze=False)
    pairs = zip(axes, by_threads.items(), report["small_tensors"], strict=True)
    for (over_size, formats, small), (count, results), tensors in pairs:
        draw_sizes(over_size, results)
        over_size.set_title(f"threads: {count}")
        last = results[-1]
        rows = [row for row in last["rows"] if row["name"] != "read floor"]
        draw_bars(formats, spreads_of(rows, "share_of_roofline"), "share of the roofline's GB/s", 1)
        formats.set_title(f"{size_text(last['elements'])} elements, threads: {count}")
        speeds = spreads_of(tensors["rows"], "speed_against_torch_foreach")
        draw_bars(small, speeds, "speed against torch foreach", 1)
        small.set_title(f"step of {tensors['tensors']:,} small tensors, threads: {count}")
    save_figure(figure, report, folder, "kernel", console)
