"""bench_checkpoint.py runs, says what it must, and counts rightly. Never a word about timings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
from audited import needs_fsdp_on_cpus
from bench_tools import BENCHMARKS, check_bars, check_spread, load_module, only_report, run

JOBS = (
    "fusedshard sharded, ordered",
    "fusedshard sharded, 8-bit",
    "FSDP2 + AdamW fused",
)
WAYS = {f"{job}: {kind}" for job in JOBS for kind in ("DCP", "one file")}
PARAMETERS = 116_032
NUMBERS = (2, 3, 2)  # of each parameter that a job saves: moments, and masters


@needs_fsdp_on_cpus
def test_quick_form(tmp_path: Path) -> None:
    printed = run(tmp_path, str(BENCHMARKS / "bench_checkpoint.py"))
    report = only_report(tmp_path, "checkpoint_2_ranks")
    assert report["settings"]["parameters"] == PARAMETERS
    rows = {row["name"]: row for row in report["results"]}
    assert set(rows) == WAYS | {f"{JOBS[1]}: DCP, many files"}
    for name, row in rows.items():
        (numbers,) = (n for job, n in zip(JOBS, NUMBERS, strict=True) if name.startswith(job))
        # Beside them steps, hyperparameters, and where everything lies.
        assert 1 < row["file_bytes"] / (4 * numbers * PARAMETERS) < 1.35
        for act in ("save", "load"):
            assert len(row[f"{act}_samples"]) == 1
            check_spread(row[f"{act}_seconds"])
            check_spread(row[f"{act}_against_fsdp"])
            check_spread(row[f"{act}_peak_bytes"], positive=False)
    for kind in ("DCP", "one file"):
        assert rows[f"{JOBS[2]}: {kind}"]["save_against_fsdp"]["median"] == 1
    for job, numbers, row in zip(JOBS, NUMBERS, report["full_state_dict"], strict=True):
        assert row["name"] == job and job in printed
        arrays = row["result_bytes"] - 4 * numbers * PARAMETERS
        assert 0 < arrays < 1000  # step counts
        check_spread(row["beyond_result_bytes"], positive=False)
        check_spread(row["other_ranks_bytes"], positive=False)
    assert len(report["bars"]) == 6
    check_bars(report, printed, positive=False)
    assert (tmp_path / "checkpoint_2_ranks.png").read_bytes()[1:4] == b"PNG"


def test_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was allocated for a while counts, and what is kept; not what was there before."""
    peak = load_module(monkeypatch, "peak")
    size, slack = 64 << 20, 8 << 20
    peak.return_freed_memory()
    before = numpy.ones(size, numpy.uint8)

    def use(times: int) -> Any:
        return [numpy.ones(size, numpy.uint8) for _ in range(times)][-1]

    for times in (1, 2):
        found, kept = peak.peak_of(lambda times=times: use(times))
        assert abs(found - times * size) < slack
        assert kept.all() and before.all()
        del kept
    assert peak.peak_of(lambda: None)[0] < slack


def test_the_worst_rank_and_what_is_beyond_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_module(monkeypatch, "bench_checkpoint")
    states = [
        {name: [{"peak": 110, "result": 100}, {"peak": 120, "result": 100}] for name in bench.JOBS},
        {name: [{"peak": 7, "result": 0}, {"peak": 5, "result": 0}] for name in bench.JOBS},
        {name: [{"peak": 6, "result": 0}, {"peak": 9, "result": 0}] for name in bench.JOBS},
    ]
    for row in bench.full_rows(states):
        assert row["result_bytes"] == 100
        assert row["beyond_result_bytes"]["median"] == 15  # of 10 and 20
        assert row["other_ranks_bytes"]["median"] == 8  # of 7 and 9
    acts = [f"{act}, {name}" for name in bench.WAYS for act in ("save", "load")]
    samples = {act: [2.0 if "FSDP2" in act else 3.0] for act in acts}
    peaks = [{act: list(both) for act in acts} for both in ((1, 8), (4, 2))]
    for row in bench.rows(samples, peaks, dict.fromkeys(bench.WAYS, 5)):
        assert row["save_peak_bytes"]["median"] == row["load_peak_bytes"]["median"] == 6
        assert row["load_against_fsdp"]["median"] == (1.0 if "FSDP2" in row["name"] else 1.5)
