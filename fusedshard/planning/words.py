"""A plan in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fusedshard.planning.plan import FORMULAS, LEGEND, Question, Row
from fusedshard.planning.sizes import binary_unit, decimal_unit, rate_text, time_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 80


def show(question: Question, rows: Sequence[Row], notes: Sequence[str], console: Console) -> None:
    """Print it."""
    model = question.model
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in model.dtypes)
    tensors, ranks = _plural(len(model.parameters), "tensor"), _plural(question.ranks, "rank")
    said = [
        f"{model.numel:,} parameters in {tensors} ({dtypes}) on {ranks}, {question.backend}",
        model.origin,
    ]
    _print(console, *said)
    for table in (_memory_table(question, rows), _step_table(question, rows)):
        console.print()
        console.print(table)
    console.print()
    _print(console, *notes, *LEGEND, *FORMULAS)


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _print(console: Console, *paragraphs: str) -> None:
    for paragraph in paragraphs:
        console.print(paragraph, markup=False, width=min(WIDTH, console.width))


def _memory_table(question: Question, rows: Sequence[Row]) -> Table:
    unit, scale = binary_unit(max(row.usage.total for row in rows))
    table = _table(f"memory of a rank, {unit}")
    for heading in ("param", "grad", "master", "m, v", "buffer", "total"):
        table.add_column(heading, justify="right")
    if question.gpu_memory is not None:
        table.add_column("fewest", justify="right")

    def cells(row: Row) -> list[str]:
        usage = row.usage
        moments = usage.exp_avg + usage.exp_avg_sq
        others = usage.total - usage.parameters - usage.gradients - usage.masters - moments
        held = (usage.parameters, usage.gradients, usage.masters, moments, others, usage.total)
        numbers = [f"{nbytes / scale:.2f}" if nbytes else "" for nbytes in held]
        return numbers + ([] if question.gpu_memory is None else [_fit(question, row)])

    return _fill(table, rows, cells)


def _fit(question: Question, row: Row) -> str:
    assert question.gpu_memory is not None
    mark = "✓" if row.usage.total <= question.gpu_memory else "✗"
    return f"{f'{row.least_ranks:,}' if row.least_ranks else 'none'} {mark}"


def _step_table(question: Question, rows: Sequence[Row]) -> Table:
    unit, scale = decimal_unit(max(row.usage.moved for row in rows))
    table = _table(f"a step of a rank, {unit}")
    for heading in ("sent", "moved"):
        table.add_column(heading, justify="right")
    rates = {"wire": question.bandwidth, "update": question.memory_bandwidth}
    known = {name: rate for name, rate in rates.items() if rate is not None}
    for name, rate in known.items():
        table.add_column(f"{name}, {rate_text(rate)}", justify="right")

    def cells(row: Row) -> list[str]:
        numbers = [f"{n / scale:.2f}" for n in (row.usage.total_sent, row.usage.moved)]
        return numbers + [time_text(row.seconds[name]) for name in known]

    return _fill(table, rows, cells)


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column(title, no_wrap=True)
    return table


def _fill(table: Table, rows: Sequence[Row], cells: Callable[[Row], list[str]]) -> Table:
    library = "torch"
    for row in rows:
        if row.way.library != library:
            library = row.way.library
            table.add_section()
        table.add_row(row.way.name, *cells(row))
    return table
