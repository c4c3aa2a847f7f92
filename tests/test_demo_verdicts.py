"""The demo's verdicts: each planted fault fails its own verdict, and no other."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusedshard import cli
from fusedshard.demo import command as demo
from fusedshard.demo import report as demo_report
from fusedshard.demo.train import VARIANTS, Settings
from fusedshard.demo.verdicts import MOMENTS, count_gaps_and_overlaps

NUMEL = [parameter["numel"] for parameter in demo_report.describe_parameters(Settings())]
SAME = {"identical": True, "max_abs": 0.0, "relative": 0.0}
ONE_BIT = {"identical": False, "max_abs": 1e-9, "relative": 1e-9}
SOUND = {"kind": "replicated", "ok": True, "headline": "as it must be"}
FAR = {"identical": False, "max_abs": 0.1, "relative": 0.5}


def rank_report(rank: int) -> dict[str, Any]:
    """What one of two ranks would send if all is as it must be: each owns half of a parameter."""
    halves = [
        (index, (0, size // 2)[rank], (size // 2, size)[rank]) for index, size in enumerate(NUMEL)
    ]
    variants = {variant: variant_report(rank == 1 and variant == "mistake") for variant in VARIANTS}
    for probe in variants["sharded"]["probes"]:
        for moment in MOMENTS:
            del probe["from_rank_0"][moment]
    variants["sharded"] |= {"owned": halves, "held": [stop - start for _, start, stop in halves]}
    variants["replicated"]["difference_from_ddp"] = {**ONE_BIT, "max_abs": 1e-7}
    variants["sharded"]["audit"] = {**SOUND, "kind": "sharded"}
    variants["mistake"]["audit"] = {**SOUND, "kind": "diverged", "ok": False}
    names = (*MOMENTS, "parameters", "step")
    return {
        "variants": variants,
        "sharded_vs_replicated": dict.fromkeys(names, SAME),
        "caught": {"step": 2, "part": "grad", "message": "audit at step 2"},
    }


def variant_report(diverged: bool) -> dict[str, Any]:
    differences = dict.fromkeys((*MOMENTS, "parameters"), FAR if diverged else SAME)
    return {
        "losses": [5.5, 4.5],
        "seconds": {phase: [0.2, 0.1] for phase in demo_report.PHASES},
        "wire_bytes": 1,
        "moment_bytes": 8,
        "master_bytes": 0,
        "probes": [{"step": step, "from_rank_0": {**differences, "step": SAME}} for step in (1, 2)],
        "difference_from_ddp": SAME,
        "held": NUMEL,
        "owned": [],
        "buckets": [[(index, 0, size) for index, size in enumerate(NUMEL)]],
        "audit": SOUND,
    }


def summarize(ranks: list[dict[str, Any]], **formats: Any) -> dict[str, Any]:
    settings = Settings(ranks=2, steps=2, **formats)
    return demo_report.summarize(settings, ranks, threads=1, seconds=1.0)


def probe(ranks: list[dict[str, Any]], variant: str, index: int) -> dict[str, Any]:
    """The differences of rank 1 at a probe."""
    found: dict[str, Any] = ranks[1]["variants"][variant]["probes"][index]["from_rank_0"]
    return found


def differ_in(variant: str, name: str) -> Callable[[list[dict[str, Any]]], None]:
    return lambda ranks: probe(ranks, variant, 0).update({name: ONE_BIT})


def own(rank: int, parameter: int, start: int, stop: int) -> Callable[..., None]:
    """The rank owns another range of a parameter, and holds as many elements."""

    def change(ranks: list[dict[str, Any]]) -> None:
        sharded = ranks[rank]["variants"]["sharded"]
        sharded["owned"][parameter] = (parameter, start, stop)
        sharded["held"][parameter] = stop - start

    return change


def hold_everything(ranks: list[dict[str, Any]]) -> None:
    ranks[0]["variants"]["sharded"]["held"] = NUMEL


def differ_from_replicated(name: str) -> Callable[[list[dict[str, Any]]], None]:
    return lambda ranks: ranks[1]["sharded_vs_replicated"].update({name: ONE_BIT})


def differ_from_ddp(max_abs: float) -> Callable[[list[dict[str, Any]]], None]:
    found = {"identical": False, "max_abs": max_abs, "relative": 0.1}
    return lambda ranks: ranks[0]["variants"]["replicated"].update(difference_from_ddp=found)


def agree_at_the_end(name: str, found: dict[str, Any]) -> Callable[[list[dict[str, Any]]], None]:
    return lambda ranks: probe(ranks, "mistake", -1).update({name: found})


def audit_says(variant: str, kind: str) -> Callable[[list[dict[str, Any]]], None]:
    audit = {"kind": kind, "ok": True, "headline": f"all is {kind}"}
    return lambda ranks: ranks[0]["variants"][variant].update(audit=audit)


def not_stopped(ranks: list[dict[str, Any]]) -> None:
    ranks[1]["caught"] = None


def stopped_late(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        rank["caught"] = {**rank["caught"], "step": 4}


FAULTS = [
    (differ_in("replicated", "exp_avg"), "replicated_is_identical", "exp_avg from step 1"),
    (differ_in("replicated", "exp_avg_sq"), "replicated_is_identical", "exp_avg_sq from step 1"),
    (differ_in("replicated", "step"), "replicated_is_identical", "step from step 1"),
    (differ_in("replicated", "parameters"), "replicated_is_identical", "parameters from step 1"),
    (differ_in("sharded", "parameters"), "sharded_is_identical", "parameters from step 1"),
    (own(0, 0, 0, NUMEL[0] // 2 + 1), "sharded_owns_each_element_once", "1 have several"),
    (own(0, 0, 0, NUMEL[0] // 2 - 1), "sharded_owns_each_element_once", "1 elements have no owner"),
    (own(1, 2, NUMEL[2] // 2, NUMEL[2] + 9), "sharded_owns_each_element_once", "9 elements have"),
    (hold_everything, "sharded_owns_each_element_once", "other elements than their own: [0]"),
    (differ_from_replicated("exp_avg_sq"), "sharded_equals_replicated", "differs in exp_avg_sq"),
    (differ_from_replicated("parameters"), "sharded_equals_replicated", "by up to 1.0e-09"),
    (differ_from_ddp(4e-5), "replicated_matches_ddp", "the furthest is 4.0e-05"),
    (differ_from_ddp(math.nan), "replicated_matches_ddp", "the furthest is nan"),
    (agree_at_the_end("exp_avg", SAME), "mistake_has_diverged", "exp_avg are identical"),
    (agree_at_the_end("exp_avg_sq", SAME), "mistake_has_diverged", "exp_avg_sq are identical"),
    (agree_at_the_end("parameters", ONE_BIT), "mistake_has_diverged", "by only 1.0e-09"),
    (agree_at_the_end("parameters", FAR | {"max_abs": math.nan}), "mistake_has_diverged", "nan"),
    (audit_says("ddp", "diverged"), "audits_say_so", 'ddp: "all is diverged"'),
    (audit_says("sharded", "replicated"), "audits_say_so", "must not say so of sharded:"),
    (audit_says("mistake", "replicated"), "audits_say_so", "must not say so of mistake:"),
    (not_stopped, "audit_stops_the_mistake", "must stop at step 2, not [2, None]"),
    (stopped_late, "audit_stops_the_mistake", "must stop at step 2, not [4, 4]"),
]


@pytest.mark.parametrize(("plant", "name", "text"), FAULTS)
def test_a_planted_fault_fails_its_verdict(
    plant: Callable[[list[dict[str, Any]]], None], name: str, text: str
) -> None:
    ranks = [copy.deepcopy(rank_report(rank)) for rank in range(2)]
    assert summarize(ranks)["ok"]
    plant(ranks)
    report = summarize(ranks)
    failed = [verdict for verdict in report["verdicts"] if not verdict["ok"]]
    assert [verdict["name"] for verdict in failed] == [name]
    assert text in failed[0]["text"]
    assert not report["ok"]


@pytest.mark.parametrize(
    ("formats", "last_loss", "ok"),
    [
        ({"dtype": "bf16"}, 4.5 * 1.009, True),
        ({"dtype": "bf16"}, 4.5 * 1.011, False),
        ({"dtype": "bf16"}, 4.5 * 0.989, False),
        ({"state_dtype": "bf16"}, 4.5 * 1.011, False),
        ({"state_dtype": "8bit"}, 4.5 * 1.019, True),
        ({"dtype": "bf16", "state_dtype": "8bit"}, 4.5 * 1.021, False),
        ({"dtype": "bf16"}, math.nan, False),
    ],
)
def test_fewer_bits_are_judged_by_the_loss(
    formats: dict[str, str], last_loss: float, ok: bool
) -> None:
    ranks = [copy.deepcopy(rank_report(rank)) for rank in range(2)]
    for rank in ranks:
        rank["variants"]["replicated"]["losses"] = [5.5, last_loss]
    differ_from_ddp(1.0)(ranks)  # which all-fp32 training must not
    report = summarize(ranks, **formats)
    failed = [verdict["name"] for verdict in report["verdicts"] if not verdict["ok"]]
    assert failed == ([] if ok else ["replicated_matches_ddp"])


def test_masters_that_differ_between_ranks() -> None:
    ranks = [copy.deepcopy(rank_report(rank)) for rank in range(2)]
    for index in (0, 1):
        for rank, found in enumerate((SAME, ONE_BIT)):
            probes = ranks[rank]["variants"]["replicated"]["probes"]
            probes[index]["from_rank_0"]["master_weights"] = found
    report = summarize(ranks, dtype="bf16")
    (failed,) = [verdict for verdict in report["verdicts"] if not verdict["ok"]]
    assert failed["name"] == "replicated_is_identical"
    assert "master_weights from step 1" in failed["text"]


def test_a_failed_verdict_is_exit_status_1_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [copy.deepcopy(rank_report(rank)) for rank in range(2)]
    differ_from_ddp(math.nan)(ranks)
    monkeypatch.setattr(demo, "run_ranks", lambda *_: ranks)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 1
    assert "Not what it must be: replicated_matches_ddp" in capsys.readouterr().out
    found = json.loads((tmp_path / "report.json").read_text())["variants"]["replicated"]
    assert found["difference_from_ddp"]["max_abs"] is None


RANGES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 6)), max_size=4)


@given(st.lists(RANGES, min_size=1, max_size=3))
def test_gaps_and_overlaps_are_those_of_counting(owned: list[list[tuple[int, int, int]]]) -> None:
    owned = [[(p, min(a, b), max(a, b)) for p, a, b in ranges] for ranges in owned]
    owners = {(parameter, element): 0 for parameter in range(3) for element in range(6)}
    for parameter, start, stop in (one for ranges in owned for one in ranges):
        for element in range(start, stop):
            owners[parameter, element] += 1
    gaps, overlaps = count_gaps_and_overlaps([6, 6, 6], owned)
    assert gaps == sum(count == 0 for count in owners.values())
    assert (overlaps > 0) == any(count > 1 for count in owners.values())
