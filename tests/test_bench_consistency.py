"""consistency.py runs and says what it must, and each of its claims can fail."""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from bench_tools import BENCHMARKS, load_module, only_report, run

from fusedshard.demo.report import OUTLOOK

Report = dict[str, Any]
README = BENCHMARKS.parent / "README.md"
PARTS = ("parameters", "exp_avg", "exp_avg_sq")
SAME = {"differing": 0}
ROUNDING = {"differing": 9, "max_abs": 1e-6, "relative": 1e-6}
FAR = {"differing": 9, "max_abs": 0.3, "relative": 0.3}
STEPS = (1, 400, 401, 2000)  # of the probes


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    yield lambda name: load_module(monkeypatch, name)


@pytest.fixture
def jobs(module: Callable[[str], ModuleType]) -> ModuleType:
    return module("consistency_jobs")


@pytest.fixture
def judge(module: Callable[[str], ModuleType]) -> Callable[[Report], dict[str, Any]]:
    """By name."""
    claims = module("consistency_claims")
    return lambda report: {claim.name: claim for claim in claims.judge(report)}


# -- the whole program ----------------------------------------------------------------------------


def test_all_parts_run_and_every_claim_holds(tmp_path: Path) -> None:
    printed = run(tmp_path, str(BENCHMARKS / "consistency.py"), "--ranks", "3", "--steps", "10")
    report = only_report(tmp_path, "consistency")
    assert set(report["made"]) == {"ranks", "order", "audits"}
    for part in ("ranks", "order"):
        for name, job in report[part].items():
            assert name in printed
            assert len(job["probes"][-1]["held_out"]) == 3
    assert len(report["verdicts"]) == 14
    assert all(verdict["ok"] for verdict in report["verdicts"])
    said = " ".join(printed.split())
    assert all(verdict["text"] in said for verdict in report["verdicts"])
    assert (tmp_path / "consistency.png").stat().st_size > 10_000


@pytest.fixture
def committed() -> Report:
    report: Report = json.loads((BENCHMARKS / "results" / "consistency.json").read_text())
    return report


def test_the_committed_report_holds(committed: Report, judge: Any) -> None:
    report = committed
    assert {made["commit"] for made in report["made"].values()}
    assert report["settings"]["steps"] >= 2000 and not report["settings"]["quick"]
    claims = judge(report)
    assert [claim.text for claim in claims.values()] == [v["text"] for v in report["verdicts"]]
    assert all(claim.ok for claim in claims.values())


def percent(ratio: float, digits: int = 0) -> str:
    return f"{ratio * 100:.{digits}f} %"


def test_words_elsewhere_have_its_numbers(committed: Report, judge: Any) -> None:
    found = {name: claim.measured for name, claim in judge(committed).items()}
    forgotten, lost = found["averaging forgotten"], found["moments lost"]
    loss = found["loss: averaging forgotten"]
    order = found["drift: fp32, the backend's order"]
    weights = percent(forgotten["last"]["parameters"]["relative"])
    ranks = [percent(ratio - 1) for ratio in sorted(loss["of_ddp"])]
    average = percent(loss["average_of_ddp"] - 1)
    drift = percent(order["relative"], 3)
    for words in (
        f"weights {weights} apart and held-out losses {ranks[0]} and {ranks[1]} above DDP's",
        f"one {average} above",
        f"by {drift}",
    ):
        assert words in OUTLOOK
    readme = README.read_text()
    gaps = [
        percent(gap[part]["relative"])
        for gap in (forgotten["first"], forgotten["last"])
        for part in ("exp_avg", "exp_avg_sq", "parameters")
    ]
    bf16 = found["drift: DDP, bf16 on the wire, rank order"]
    for words in (
        "by {} (m), {} (v) and {} (weights) in norm; after step 2,000 by {}, {} and {}".format(
            *gaps
        ),
        f"| {loss['ddp']:.3f} |",
        f"average of the weights: {loss['average_of_ddp'] * loss['ddp']:.3f} |",
        f"{percent(lost['last']['exp_avg_sq']['relative'], 1)} apart after step 2,000",
        f"{forgotten['orders_above_drift']:.1f} orders of magnitude below the mistake",
        f"| {bf16['relative']:.2f} | {bf16['updates']:.0f} | {percent(bf16['loss'], 2)} |",
    ):
        assert words in readme


# -- claims ---------------------------------------------------------------------------------------


def probes(ranks: int, held_out: float, reference: dict[str, Any] | None = None) -> dict[str, Any]:
    """A job whose ranks agree."""
    found = [
        {
            "step": step,
            "between_ranks": dict.fromkeys(PARTS, SAME),
            "update": {"differing": 9, "max_abs": 1e-3, "relative": 3e-3},
            "train_loss": [2.0] * ranks,
            "held_out": [held_out] * ranks,
        }
        for step in STEPS
    ]
    for probe in found if reference else ():
        probe["from_reference"] = dict.fromkeys(PARTS, reference)
    return {"reference": "another", "probes": copy.deepcopy(found)}


def parted(job: dict[str, Any], since: int, held_out: list[float], average: float) -> None:
    for probe in job["probes"]:
        if probe["step"] >= since:
            probe["between_ranks"] = {part: dict(FAR) for part in PARTS}
            probe |= {"held_out": held_out, "held_out_of_average": average}


@pytest.fixture
def sound(jobs: ModuleType) -> Report:
    """A report of which every claim holds."""
    ranks = {name: probes(2, 2.0, SAME) for name in [*jobs.RANK_JOBS, *jobs.TWO_RANK_JOBS]}
    ranks[jobs.SHARDED]["ownership"] = {"gaps": 0, "overlaps": 0, "elements": 9, "held": [5, 4]}
    parted(ranks[jobs.NEVER], 1, [2.1, 2.2], 2.3)
    parted(ranks[jobs.LOST], 401, [2.011, 2.005], 2.0)
    ranks[jobs.LOST]["probes"][-1]["between_ranks"]["exp_avg"] = SAME
    order = {name: probes(3, 2.0, SAME) for name in jobs.ORDER_JOBS}
    order[jobs.BACKEND] = probes(3, 2.0001, ROUNDING)
    order[jobs.OTHER_BATCHES] = probes(3, 2.01, FAR)
    for name in (jobs.WIRE_BF16, jobs.WIRE_BF16_ORDERED):
        order[name] = probes(3, 2.001, FAR)
    for name, job in order.items():
        job["reference"] = jobs.ORDER_JOBS[name].reference
    told = {"step": 10, "part": "grad", "ranks": [1], "message": "as it is"}
    audits = {name: [dict(told), dict(told)] for name in jobs.AUDITED_JOBS}
    audits[jobs.LOST] = [told | {"step": 20}] * 2
    settings = {"ranks": 2, "order_ranks": 3, "steps": 2000, "lost_after": 400}
    return {"settings": settings, "ranks": ranks, "order": order, "audits": audits}


Plant = Callable[[Report, ModuleType], object]


def last(report: Report, group: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = report[group][name]["probes"][-1]
    return found


def differ(group: str, name: str, part: str, gap: dict[str, Any] = ROUNDING) -> Plant:
    """Ranks differ in a part, at the last probe."""
    return lambda report, jobs: last(report, group, getattr(jobs, name))["between_ranks"].update(
        {part: gap}
    )


def other_bits(group: str, name: str, part: str, gap: dict[str, Any] = ROUNDING) -> Plant:
    """A run differs from its reference, at the last probe."""
    return lambda report, jobs: last(report, group, getattr(jobs, name))["from_reference"].update(
        {part: gap}
    )


def own(**found: Any) -> Plant:
    return lambda report, jobs: report["ranks"][jobs.SHARDED]["ownership"].update(found)


def lose(group: str, name: str, **losses: Any) -> Plant:
    return lambda report, jobs: last(report, group, getattr(jobs, name)).update(losses)


def agree_at_first(report: Report, jobs: ModuleType) -> None:
    report["ranks"][jobs.NEVER]["probes"][0]["between_ranks"]["exp_avg"] = SAME


def part_before_the_loss(report: Report, jobs: ModuleType) -> None:
    report["ranks"][jobs.LOST]["probes"][1]["between_ranks"]["exp_avg_sq"] = FAR


def weights_agree_again(report: Report, jobs: ModuleType) -> None:
    last(report, "ranks", jobs.LOST)["between_ranks"]["parameters"] = SAME


def drift_as_far_as_mistakes(report: Report, jobs: ModuleType) -> None:
    last(report, "ranks", jobs.NEVER)["between_ranks"]["parameters"] = {**ROUNDING}


def told(name: str, rank: int, found: dict[str, Any] | None) -> Plant:
    return lambda report, jobs: report["audits"][getattr(jobs, name)].__setitem__(rank, found)


LATE = {"step": 20, "part": "grad", "ranks": [1], "message": "as it is"}
FAULTS = {
    "identical on 2 ranks: DDP + torch AdamW": differ("ranks", "DDP", "exp_avg"),
    "identical on 2 ranks: fusedshard replicated": differ("ranks", "REPLICATED", "exp_avg_sq"),
    "identical on 2 ranks: fusedshard sharded": differ("ranks", "SHARDED", "parameters"),
    "identical on 3 ranks: each of 7 runs": differ("order", "WIRE_BF16", "exp_avg"),
    "owned once": own(gaps=1),
    "owned once ": own(overlaps=1),
    "owned once  ": own(held=[5, 5]),
    "the same on 2 ranks: fusedshard sharded": other_bits("ranks", "SHARDED", "exp_avg"),
    "the same on 2 ranks: step before averaging": other_bits("ranks", "STEP_FIRST", "parameters"),
    "the same on 2 ranks: fp32, the backend's order": other_bits("ranks", "BACKEND", "exp_avg_sq"),
    "the same on 2 ranks: DDP, bf16 on the wire, rank order": other_bits(
        "ranks", "WIRE_BF16_ORDERED", "exp_avg"
    ),
    "the same on 3 ranks: fp32, rank order, again": other_bits("order", "AGAIN", "parameters"),
    "averaging forgotten": agree_at_first,
    "averaging forgotten ": drift_as_far_as_mistakes,
    "moments lost": part_before_the_loss,
    "moments lost ": weights_agree_again,
    "moments lost  ": differ("ranks", "LOST", "exp_avg", FAR),
    "caught: averaging forgotten": told("NEVER", 0, None),
    "caught: averaging forgotten, sharded": told("NEVER_SHARDED", 1, LATE),
    "caught: one rank's moments lost": told("LOST", 1, {**LATE, "step": 10}),
    "loss: averaging forgotten": lose("ranks", "NEVER", held_out=[2.015, 2.2]),
    "loss: averaging forgotten ": lose("ranks", "NEVER", held_out_of_average=2.05),
    "loss: one rank's moments lost": lose("ranks", "LOST", held_out=[2.0, 2.15]),
    "loss: one rank's moments lost ": lose("ranks", "LOST", held_out=[2.0, math.nan]),
    "drift: fp32, the backend's order": lose("order", "BACKEND", held_out=[2.003] * 3),
    "drift: fp32, the backend's order ": other_bits(
        "order", "BACKEND", "parameters", {**ROUNDING, "relative": 1e-3}
    ),
    "drift: DDP, bf16 on the wire, rank order": lose(
        "order", "WIRE_BF16_ORDERED", held_out=[1.97] * 3
    ),
    "drift: DDP, bf16 on the wire, the backend's order": other_bits(
        "order", "WIRE_BF16", "parameters"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_its_claim(
    name: str, sound: Report, judge: Any, jobs: ModuleType
) -> None:
    assert [claim.name for claim in judge(sound).values() if not claim.ok] == []
    FAULTS[name](sound, jobs)
    assert [claim.name for claim in judge(sound).values() if not claim.ok] == [name.strip()]


def test_every_claim_is_planted_against(sound: Report, judge: Any) -> None:
    untested = judge(sound).keys() - {name.strip() for name in FAULTS}
    assert untested == {"caught: step before averaging"}  # as averaging forgotten


def test_short_runs_claim_nothing_of_losses(sound: Report, judge: Any) -> None:
    sound["settings"]["steps"] = 999
    assert not [name for name in judge(sound) if name.startswith(("loss", "drift"))]


# -- what is measured -----------------------------------------------------------------------------


def test_gaps_compare_bits_and_keep_nan(module: Any) -> None:
    gap = module("consistency_train").Gap
    found = gap.between(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([1.0, -0.0, 4.0]))
    assert (found.differing, found.max_abs) == (2, 1.0)
    assert found.relative == pytest.approx(1 / math.sqrt(17))
    widest = gap.widest([gap(1, 5.0, 0.1), gap(3, math.nan, 0.2), gap(2, 1.0, 0.0)])
    assert (widest.differing, widest.relative) == (3, 0.2)
    assert math.isnan(widest.max_abs)


def test_ranks_are_compared_from_both_beginnings_on(module: Any) -> None:
    train = module("consistency_train")
    assert train.mark_steps(60) == [1, 2, 5, 10, 20, 50, 60]
    args = argparse.Namespace(steps=40, lost_after=8)
    assert train.probe_steps(args) == [1, 2, 5, 8, 9, 10, 13, 18, 20, 28, 40]


def test_nobody_trains_on_what_is_held_out(module: Any) -> None:
    taught, held_out = module("consistency_train").split(bytes(range(160)))
    assert taught + held_out == bytes(range(160))
    assert len(held_out) == 10
