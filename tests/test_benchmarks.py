"""The benchmarks run, say what they must, and leave it in JSON. Never a word about timings."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_tools import BENCHMARKS, check_bars, check_spread, load_module, only_report, run

from fusedshard import _C

MIXED_VARIANTS = {
    "fusedshard",
    "fusedshard, bf16 moments",
    "fusedshard, 8-bit moments",
    "fusedshard, 8-bit moments, no masters, no clipping",
    "torch, fp32 masters",
}
TORCHAO = "torchao AdamW8bit, no clipping"


def test_mixed(tmp_path: Path) -> None:
    options = ("--elements", "140000", "--threads", "1", "--repeats", "2")
    printed = run(tmp_path, str(BENCHMARKS / "bench_mixed.py"), *options)
    report = only_report(tmp_path, "mixed")
    rows = {row["name"]: row for row in report["results"]}
    assert MIXED_VARIANTS <= set(rows) <= MIXED_VARIANTS | {TORCHAO}
    for name, row in rows.items():
        assert len(row["samples"]) == report["settings"]["repeats"] == 2
        check_spread(row["seconds"])
        assert name in printed
    assert rows["torch, fp32 masters"]["speed_against_torch"]["median"] == 1
    differences = report["largest_difference_from_fp64"]
    assert set(differences) == set(rows)
    # Parameters up to 1 moved by 0.03, and were rounded to bf16 at the end.
    for name in ("fusedshard", "torch, fp32 masters"):
        assert 0 < differences[name] < 2**-7, "not all did the same work"
    assert len(report["bars"]) == (2 if TORCHAO in rows else 1)
    assert ("torchao is not installed" in printed) == (TORCHAO not in rows)
    check_bars(report, printed)


SMALL_ROWS = {
    "fingerprints, one call",
    "fingerprints, one call, with its checks",
    "torch.sum of each",
}


def test_fingerprint(tmp_path: Path) -> None:
    options = ("--elements", "50000", "--repeats", "2", "--fuzz", "12000", "--seed", "5")
    printed = run(tmp_path, str(BENCHMARKS / "bench_fingerprint.py"), *options)
    report = only_report(tmp_path, "fingerprint")
    for result, count in zip(report["results"], (1, 2), strict=True):
        assert result["threads"] == count
        rows = {row["name"]: row for row in result["rows"]}
        variants = {f"fingerprint {isa}" for isa in _C.cpu_variants()}
        assert set(rows) == {*variants, "torch.sum", "read floor"}
        assert {row["name"] for row in result["small_tensors"]} == SMALL_ROWS
        for row in (*rows.values(), *result["small_tensors"]):
            check_spread(row["seconds"])
            assert len(row["samples"]) == 2 and row["name"] in printed
        assert rows["torch.sum"]["time_against_base"]["median"] == 1
        bandwidth = 4 * 50_000 / rows["read floor"]["seconds"]["median"] / 1e9
        assert rows["read floor"]["gigabytes_per_second"] == pytest.approx(bandwidth)
    assert len(report["bars"]) == 2
    check_bars(report, printed)
    assert {row["dtype"] for row in report["fuzz"]} == {"float32", "bfloat16", "uint8"}
    assert sum(row["flips"] + row["exchanges"] for row in report["fuzz"]) >= 12_000
    assert all(row["flips"] and row["exchanges"] for row in report["fuzz"])
    assert not any(row["wrong"] for row in report["fuzz"])


class Deaf:
    """A table whose fingerprints tell the first byte of each tensor alone."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    def fingerprints(self) -> torch.Tensor:
        return torch.stack([tensor.view(torch.uint8)[0] for tensor in self._tensors])


def test_what_fingerprints_miss_is_counted(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzzing = module("fingerprint_fuzz")
    monkeypatch.setattr(fuzzing, "FingerprintTable", Deaf)
    tally = fuzzing.fuzz(fuzzing.Case(torch.uint8, "ones and zeros", 16), 1000, 10, 0)
    assert 0 < tally.unseen_flips < tally.flips
    assert 0 < tally.unseen_exchanges < tally.exchanges
    assert tally.false_alarms == 0 and tally.wrong == tally.unseen_flips + tally.unseen_exchanges


def test_comm(tmp_path: Path) -> None:
    printed = run(tmp_path, str(BENCHMARKS / "bench_comm.py"))
    report = only_report(tmp_path, "comm_2_ranks")
    (result,) = report["results"]
    rows = {row["name"]: row for row in result["rows"]}
    assert sum(name.startswith("exchange: ") for name in rows) == 4
    assert sum(name.startswith("gather: ") for name in rows) == 4
    assert rows["all_reduce"]["against_all_reduce"]["median"] == 1
    for name, row in rows.items():
        check_spread(row["seconds"])
        assert name in printed


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    return partial(load_module, monkeypatch)


def test_interleaving_gives_every_variant_every_place(module: Any) -> None:
    harness = module("harness")
    calls: list[str] = []
    rounds: list[int] = []

    def variant(name: str) -> Callable[[], float]:
        def call() -> float:
            calls.append(name)
            return float(len(calls))

        return call

    timing = harness.interleave(
        {name: variant(name) for name in "abc"},
        repeats=3,
        before_round=lambda: rounds.append(len(calls)),
        progress=False,
    )
    assert "".join(calls) == "abcbcacabcba"
    assert rounds == [0, 3, 6, 9]
    # The first round is not counted; the numbers say when each was called.
    assert timing.samples == {"a": [6, 8, 12], "b": [4, 9, 11], "c": [5, 7, 10]}
    assert len(timing.rounds) == 3


@pytest.mark.parametrize("count", [1, 2, 5, 6, 12])
def test_every_variant_follows_every_other_one_equally_often(module: Any, count: int) -> None:
    names = [str(number) for number in range(count)]
    turns = count if count % 2 == 0 else 2 * count
    orders = [module("harness").order_of(names, turn) for turn in range(turns)]
    for place in zip(*orders, strict=True):
        assert sorted(place) == sorted(names * (turns // count))
    pairs = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert set(pairs) == set(itertools.permutations(names, 2))
    assert len(set(pairs.values())) <= 1


def test_ratios_are_taken_round_by_round(module: Any) -> None:
    harness = module("harness")
    # A machine that gets ten times slower half-way: the ratio of medians would say 10 or 0.2.
    samples = {"x": [1.0, 1.0, 10.0], "base": [2.0, 2.0, 20.0]}
    assert harness.ratio(samples, "x", "base") == harness.Spread(0.5, 0.5, 0.5)
    assert harness.Spread.of([4.0, 1.0, 2.0, 3.0, 5.0]) == harness.Spread(3.0, 2.0, 4.0)
    assert harness.Spread.of([7.0]) == harness.Spread(7.0, 7.0, 7.0)
    assert harness.Spread(0.5, 0.25, 1.0).text(scale=1e3, digits=0) == "500 (250-1000)"


def test_load_of_others_leaves_out_the_ranks(module: Any) -> None:
    load = module("load")

    def stretch(own: float) -> Any:
        start = load.CpuUse(wall=10.0, everybody=100.0, own=1.0, stolen=3.0)
        return start, load.CpuUse(wall=14.0, everybody=107.0, own=1.0 + own, stolen=3.5)

    # In 4 s all processes took 7 s, two ranks 2 s and 3 s of it, other machines half a second.
    assert load.other_cores([stretch(2.0), stretch(3.0)]) == pytest.approx(2.5 / 4)
    assert load.other_cores([stretch(9.0)]) == 0
    rounds = [[stretch(2.0), stretch(3.0), stretch(7.5)]]
    assert load.median_other_cores(rounds) == pytest.approx(4.5 / 4)


def test_waiting_for_an_idle_machine_ends(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    load = module("load")
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(load.time, "sleep", sleep)
    monkeypatch.setattr(load.time, "monotonic", lambda: now[0])
    for busy, sleeps in ((1.0, 5), (0.0, 1)):
        now[0], slept[:] = 0.0, []
        monkeypatch.setattr(
            load.CpuUse, "now", lambda busy=busy: load.CpuUse(now[0], busy * now[0], 0.0, 0.0)
        )
        load.wait_for_idle(limit=0.5, period=0.1)
        assert len(slept) == sleeps
    load.wait_for_idle(limit=0.0)
    assert len(slept) == 1
