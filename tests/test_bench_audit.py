"""bench_audit.py runs, says what it must, and counts rightly. Never a word about timings."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_tools import BENCHMARKS, check_bars, check_spread, load_module, only_reports, run

SHARDED, REPLICATED = "fusedshard sharded, ordered", "fusedshard replicated, ordered"
WATCHED = {name: f"{name}, audited in each step" for name in (SHARDED, REPLICATED)}


def test_quick_form(tmp_path: Path) -> None:
    printed = run(tmp_path, str(BENCHMARKS / "bench_audit.py"), "--steps", "1")
    reports = only_reports(tmp_path, "audit_gpt_2_ranks", "audit_tiny_2_ranks")
    for report in reports:
        rows = {row["name"]: row for row in report["results"]}
        assert set(rows) == {"DDP + AdamW fused", *WATCHED, *WATCHED.values()}
        assert set(report["shares"]) == set(WATCHED)
        for name, watched in WATCHED.items():
            assert "fingerprints" not in rows[name]["collectives"]
            assert rows[watched]["collectives"]["fingerprints"] == 1
            assert name in printed and watched in printed
            check_spread(report["shares"][name], positive=False)
        for spread in report["one_audit"].values():
            check_spread(spread)
        check_bars(report, printed, positive=False)
    # 8 bytes to the one other rank for each parameter and for all step counts, and where state is
    # replicated for both moments.
    tiny = {row["name"]: row["sent_bytes"] for row in reports[1]["results"] if "sent_bytes" in row}
    assert tiny[WATCHED[SHARDED]]["fingerprints"] == 8 * (30 + 1)
    assert tiny[WATCHED[REPLICATED]]["fingerprints"] == 8 * (3 * 30 + 1)


def test_share(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_module(monkeypatch, "bench_audit")
    samples = {"a": [1.0, 2.0, 4.0], bench.audited("a"): [2.0, 5.0, 20.0]}
    found = bench.share(samples, "a")
    assert (found.median, bench.EVERY) == (1.5 / 100, 100)
