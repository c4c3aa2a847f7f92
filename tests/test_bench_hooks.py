"""bench_hooks.py runs, says what it must, and counts rightly. Never a word about timings."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from bench_tools import BENCHMARKS, check_bars, check_spread, load_module, only_reports, run

BARE = "backward alone"
BASE = "DDP + AdamW foreach"
WITHOUT_DDP = {"AdamW foreach, without DDP", "AdamW fused, without DDP"}
DDP = "DDP + AdamW fused"
SHARDED = "fusedshard sharded, ordered"
IN_STEP = "fusedshard sharded, ordered, exchanged in step"
VARIANTS = {
    BARE,
    BASE,
    DDP,
    "DDP, gradient_as_bucket_view + AdamW fused",
    "fusedshard replicated, ordered",
    SHARDED,
    IN_STEP,
}


def rows_by_name(report: dict[str, Any], printed: str) -> dict[str, dict[str, Any]]:
    rows = {row["name"]: row for row in report["results"]}
    for name, row in rows.items():
        assert len(row["samples"]) == report["settings"]["repeats"]
        check_spread(row["step_seconds"])
        assert row["cpu_seconds"] > 0
        assert name in printed
    return rows


def check_overhead(rows: dict[str, dict[str, Any]]) -> None:
    """What a variant takes beyond the bare backward of the same round, and as a share of DDP's."""

    def beyond(name: str) -> list[float]:
        pairs = zip(rows[name]["samples"], rows[BARE]["samples"], strict=True)
        return [sample - bare for sample, bare in pairs]

    assert "overhead_seconds" not in rows[BARE]
    for name in rows.keys() - {BARE}:
        ratios = [own / base for own, base in zip(beyond(name), beyond(BASE), strict=True)]
        for key, values in (
            ("overhead_seconds", beyond(name)),
            ("overhead_against_ddp_foreach", ratios),
        ):
            check_spread(rows[name][key], positive=False)
            assert rows[name][key]["median"] == pytest.approx(statistics.median(values))


def test_hooks(tmp_path: Path) -> None:
    options = ("--parts", "overhead", "--tensors", "30", "--overhead-steps", "3")
    printed = run(tmp_path, str(BENCHMARKS / "bench_hooks.py"), *options)
    reports = only_reports(tmp_path, "hooks_1_rank", "hooks_2_ranks")
    for ranks, report in enumerate(reports, 1):
        settings = report["settings"]
        assert (settings["ranks"], settings["tensors"]) == (ranks, 30)
        assert settings["parameters"] == 30 * 4
        assert settings["steps_of_each"] == 3 * (1 + settings["repeats"])
        rows = rows_by_name(report, printed)
        assert set(rows) == (VARIANTS | WITHOUT_DDP if ranks == 1 else VARIANTS)
        for row in rows.values():
            assert set(row["seconds"]) == {"backward", "step", "zero_grad"}
        check_overhead(rows)
        # One bucket holds them all.
        wanted = {} if ranks == 1 else {"all_to_all": 1, "status": 1, "all_gather": 1}
        assert rows[SHARDED]["collectives"] == rows[IN_STEP]["collectives"] == wanted
        assert report["largest_change"] > 1e-4
        assert report["largest_difference"] < 1e-6, "not all did the same work"
        assert len(report["bars"]) == (1 if ranks == 1 else 0)
        check_bars(report, printed, positive=False)


def test_overlap(tmp_path: Path) -> None:
    options = ("--parts", "overlap", "--steps", "2")
    printed = run(tmp_path, str(BENCHMARKS / "bench_hooks.py"), *options)
    (report,) = only_reports(tmp_path, "overlap_2_ranks")
    rows = rows_by_name(report, printed)
    assert set(rows) == {DDP, SHARDED, IN_STEP}
    assert rows[DDP]["against_ddp"]["median"] == 1
    assert rows[IN_STEP]["against_exchange_in_step"]["median"] == 1
    assert report["largest_loss_difference"] < 1e-4, "not all did the same work"
    assert "hidden_share" not in rows[DDP]
    for name in (SHARDED, IN_STEP):
        row = rows[name]
        assert row["steps"] == len(row["hidden_shares"]) == 2 * report["settings"]["repeats"]
        assert row["buckets"] == row["collectives"]["all_to_all"] > 1
    # Without hooks nothing is sent before the step.
    assert rows[IN_STEP]["hidden_share"]["upper"] == rows[IN_STEP]["steps_begun_early"] == 0
    assert rows[IN_STEP]["first_bucket"]["lower"] > 1
    # The first bucket never has to wait: each backward sends it.
    early = rows[SHARDED]
    check_spread(early["hidden_share"])
    assert early["hidden_share"]["upper"] <= 1
    assert early["steps_begun_early"] == early["steps"]
    assert 1 <= early["early_buckets"]["lower"] <= early["early_buckets"]["upper"]
    assert early["early_buckets"]["upper"] <= early["buckets"]
    assert 0 < early["first_bucket"]["lower"] <= early["first_bucket"]["upper"] < 1
    check_bars(report, printed)
    (bar,) = report["bars"]
    assert bar["met"]


def test_only_exchange_before_the_end_of_backward_is_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    overlap = load_module(monkeypatch, "overlap").Overlap
    # Backward lasts from 0 to 4: of three buckets one is done then, one under way, one not begun.
    exchanges = [(1.0, 2.0), (2.0, 6.0), (5.0, 7.0)]
    found = overlap.of(exchanges, (0.0, 4.0))
    assert found == overlap(hidden=1 + 2, total=1 + 4 + 2, buckets=3, early=2, first=0.25)
    late = overlap.of([(5.0, 7.0)], (3.0, 4.0))
    assert late == overlap(hidden=0, total=2, buckets=1, early=0, first=2)


def test_what_was_hidden_is_of_all_ranks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_module(monkeypatch, "overlap")
    overlap = module.Overlap
    here = overlap(hidden=1.0, total=4.0, buckets=2, early=2, first=0.5)
    there = overlap(hidden=2.0, total=2.0, buckets=2, early=1, first=0.75)
    late = overlap(hidden=0.0, total=3.0, buckets=2, early=0, first=1.5)
    found = module.summary([(here, there), (here, late), (there, there)])
    assert found["hidden_shares"] == [3 / 6, 1 / 7, 1]
    assert found["hidden_share"]["median"] == 0.5
    assert found["first_bucket"]["median"] == 0.75
    assert found["early_buckets"]["median"] == 1
    assert (found["steps"], found["steps_begun_early"]) == (3, 2)
