"""Whole training steps, in README.md's section on performance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from report_tables import (
    MissingReport,
    Report,
    Reports,
    median,
    megabytes,
    paragraph,
    plural,
    rows_of,
    table,
)

DDP = "DDP + AdamW fused"
OURS = "fusedshard sharded, ordered"
SHOWN = "gpt17m"
MODELS = {
    "gpt17m": "a GPT of 17 M parameters",
    "gpt124m": "GPT-2, 124 M",
    "resnet50": "ResNet-50, 26 M",
    "small_tensors": "1,000 small tensors",
}
# Beside which the table of models shows ours, as its columns call them.
RIVALS = {
    DDP: "DDP",
    "DDP, gradient_as_bucket_view + AdamW fused": "DDP, bucket view",
    "DDP + ZeroRedundancyOptimizer fused": "ZeRO",
    "DDP + ZeroRedundancyOptimizer fused, parameters_as_bucket_view": "ZeRO, bucket view",
    "FSDP2 + AdamW fused": "FSDP2",
    "FSDP2, parameters kept after forward + AdamW fused": "FSDP2, kept",
}

ByRanks = Mapping[int, Report]


def step(reports: Reports) -> str:
    shown = by_ranks(reports, SHOWN)
    parts = [
        paragraph(
            f"A whole training step (`bench_step.py`) of {MODELS[SHOWN]} on a batch so small that",
            f"communication and update decide, relative to {DDP}. State, peak (what it took at",
            "most since before the model was built), the bytes that a rank sent over the loopback",
            f"and the collectives of a step are those of {plural(_middle(shown), 'rank')}.",
        ),
        variants(shown),
        f"![Time, phases, memory and traffic](benchmarks/results/step_{SHOWN}_2_ranks.png)",
        paragraph(
            "The default, `fusedshard.AdamW(...)`, beside what torch has: its time over theirs,",
            "where a value below 1 is faster. (ZeRO is DDP + ZeroRedundancyOptimizer; all have the",
            "fused AdamW; *kept* is `reshard_after_forward=False`.)",
        ),
        models(reports),
    ]
    return "\n\n".join(parts)


def by_ranks(reports: Reports, model: str) -> ByRanks:
    """The reports of a model by their number of ranks."""
    found = [report for report in reports.values() if report["settings"].get("model") == model]
    if not found:
        raise MissingReport(f"step_{model}_2_ranks")
    return {r["settings"]["ranks"]: r for r in sorted(found, key=lambda r: r["settings"]["ranks"])}


def _middle(shown: ByRanks) -> int:
    return list(shown)[len(shown) // 2]


def variants(shown: ByRanks) -> str:
    """All ways to train one model."""
    rows = {ranks: rows_of(report) for ranks, report in shown.items()}
    costs = rows[_middle(shown)]
    columns = ["", "state MB", "peak MB", "sent MB", "collectives"]
    cells = [
        [
            f"**{name}**" if name == OURS else name,
            megabytes(row["state_bytes"]),
            _megabytes(row.get("peak_bytes")),
            _megabytes(row["traffic"]["loopback_bytes"]),
            calls(row["traffic"]["collectives"]),
            *(median(found.get(name), "against_ddp") for found in rows.values()),
        ]
        for name, row in costs.items()
    ]
    return table([*columns, *(plural(ranks, "rank") for ranks in rows)], cells)


def _megabytes(nbytes: float | None) -> str:
    return "" if nbytes is None else megabytes(nbytes)


def calls(collectives: Mapping[str, float]) -> str:
    return f"{sum(collectives.values()):g}"


def models(reports: Reports) -> str:
    cells = [
        [f"{name}, {plural(ranks, 'rank')}", *compared(report["comparisons"])]
        for model, name in MODELS.items()
        for ranks, report in by_ranks(reports, model).items()
    ]
    return table(["time over that of:", *RIVALS.values()], cells)


def compared(comparisons: Sequence[Mapping[str, Any]]) -> list[str]:
    known = {found["name"]: found for found in comparisons}
    return [median(known.get(f"{OURS} / {rival}"), "time") for rival in RIVALS]
