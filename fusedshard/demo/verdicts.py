"""What must be true of the demo's four variants, each verdict computed from the report alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Report = dict[str, Any]  # see report.summarize
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTERS = "master_weights"
# The kinds that `fusedshard.audit` must find.
AUDITED = {
    "ddp": "replicated",
    "replicated": "replicated",
    "sharded": "sharded",
    "mistake": "diverged",
}
LOSS_TOLERANCES = {"fp32": 0.01, "bf16": 0.01, "8bit": 0.02}  # by the moments' format


@dataclass(frozen=True)
class Verdict:
    """A statement that must hold; `measured` holds the numbers that it was judged by."""

    name: str
    ok: bool
    text: str
    measured: dict[str, Any] = field(default_factory=dict)


def judge(report: Report) -> list[Verdict]:
    return [
        replicated_is_identical(report),
        sharded_owns_each_element_once(report),
        sharded_parameters_are_identical(report),
        sharded_equals_replicated(report),
        replicated_matches_ddp(report),
        mistake_has_diverged(report),
        audits_say_so(report),
        audit_stops_the_mistake(report),
    ]


def formats(settings: Report) -> str:
    """In which numbers a run was computed."""
    return f"parameters {settings['dtype']}, moments {settings['state_dtype']}"


def replicated_is_identical(report: Report) -> Verdict:
    masters = [MASTERS] if MASTERS in report["variants"]["replicated"]["comparisons"][0] else []
    return _ranks_agree(report, "replicated", (*MOMENTS, *masters, "step", "parameters"))


def sharded_parameters_are_identical(report: Report) -> Verdict:
    return _ranks_agree(report, "sharded", ("step", "parameters"))


def _ranks_agree(report: Report, variant: str, names: Sequence[str]) -> Verdict:
    comparisons = report["variants"][variant]["comparisons"]
    broken = {name: _first_difference(comparisons, name) for name in names}
    ok = not any(broken.values())
    if ok:
        text = (
            f"{variant}: {_listed(names)} are identical on all {report['settings']['ranks']} ranks "
            f"after each of the {len(comparisons)} steps that were compared"
        )
    else:
        found = [f"{name} from step {step}" for name, step in broken.items() if step]
        text = f"{variant}: the ranks must be identical and differ in {_listed(found)}"
    return Verdict(f"{variant}_is_identical", ok, text, {"first_different_step": broken})


def sharded_owns_each_element_once(report: Report) -> Verdict:
    """Ranges of all ranks cover every element once, and each rank holds state of its own only."""
    sharded = report["variants"]["sharded"]
    sizes = [parameter["numel"] for parameter in report["parameters"]]
    gaps, overlaps = count_gaps_and_overlaps(sizes, sharded["owned"])
    strangers = [
        rank
        for rank, (held, owned) in enumerate(zip(sharded["held"], sharded["owned"], strict=True))
        if list(held) != _elements_of(owned, len(sizes))
    ]
    shares = [sum(held) for held in sharded["held"]]
    ok = not gaps and not overlaps and not strangers
    text = (
        f"sharded: the moments differ by design: a rank holds {_span(shares)} of {sum(sizes):,} "
        "elements, and each element is owned by exactly one rank"
    )
    if not ok:
        text = (
            f"sharded: each element must be owned exactly once: {gaps:,} elements have no owner, "
            f"{overlaps:,} have several, ranks with other elements than their own: {strangers}"
        )
    measured = {"gaps": gaps, "overlaps": overlaps, "wrong_ranks": strangers, "elements": shares}
    return Verdict("sharded_owns_each_element_once", ok, text, measured)


def sharded_equals_replicated(report: Report) -> Verdict:
    differences = report["sharded_vs_replicated"]
    broken = [name for name, found in differences.items() if not found["identical"]]
    text = f"sharded equals replicated bit for bit in {_listed(differences)}"
    if broken:
        worst = max((differences[name]["max_abs"] for name in broken), key=_nan_last)
        text = f"sharded must equal replicated bit for bit, and differs in {_listed(broken)}"
        text += f", by up to {worst:.1e}"
    return Verdict("sharded_equals_replicated", not broken, text, differences)


def replicated_matches_ddp(report: Report) -> Verdict:
    return _parameters_match(report) if _all_is_fp32(report) else _losses_match(report)


def _all_is_fp32(report: Report) -> bool:
    return {report["settings"][name] for name in ("dtype", "state_dtype")} == {"fp32"}


def _parameters_match(report: Report) -> Verdict:
    """Two roundings of one formula drift apart slowly; one wrong update is lr at once."""
    found = report["variants"]["replicated"]["difference_from_ddp"]
    tolerance = ddp_tolerance(report)
    ok = found["max_abs"] <= tolerance  # False for NaN
    text = (
        f"replicated {'does' if ok else 'must do'} what DDP does: after "
        f"{report['settings']['steps']} steps no parameter {'is' if ok else 'may be'} further away "
        f"than {tolerance:.1e}, a tenth of what one update moves it; the furthest is "
        f"{found['max_abs']:.1e}"
    )
    return Verdict("replicated_matches_ddp", ok, text, {**found, "tolerance": tolerance})


def _losses_match(report: Report) -> Verdict:
    """Where gradients or moments are rounded to fewer bits, in another order than DDP's, each
    parameter goes its own way, and the loss alone tells whether it is as good a one."""
    losses = {name: report["variants"][name]["loss"][-1] for name in ("replicated", "ddp")}
    tolerance = LOSS_TOLERANCES[report["settings"]["state_dtype"]]
    gap = abs(losses["replicated"] / losses["ddp"] - 1)
    ok = gap <= tolerance  # False for NaN
    text = (
        f"replicated {'does' if ok else 'must do'} what DDP does, which has fp32 moments and fp32 "
        f"{'masters' if report['settings']['dtype'] == 'bf16' else 'parameters'}: its last loss "
        f"{'is' if ok else 'must be'} within {tolerance:.0%}; the difference is {gap:.2%}"
    )
    measured = {"last_loss": losses, "relative": gap, "tolerance": tolerance}
    return Verdict("replicated_matches_ddp", ok, text, measured)


def ddp_tolerance(report: Report) -> float:
    """Adam moves an element by about lr an update. Rounding moves the mean of gradients that
    cancel, which Adam then scales up, by a thousandth of that."""
    return 0.1 * float(report["settings"]["lr"])


def mistake_has_diverged(report: Report) -> Verdict:
    """Everything differs between the ranks, and the parameters by more than DDP's tolerance."""
    comparisons = report["variants"]["mistake"]["comparisons"]
    names = ("exp_avg", "exp_avg_sq", "parameters")
    first = {name: _first_difference(comparisons, name) for name in names}
    last = {name: comparisons[-1][name] for name in names}
    gap = last["parameters"]["max_abs"]
    ok = all(not found["identical"] for found in last.values()) and gap > ddp_tolerance(report)
    measured = {"first_different_step": first, "last": last}
    if not ok:
        same = [name for name in names if last[name]["identical"]]
        text = "mistake: ranks that never average must diverge: " + (
            f"{_listed(same)} are identical" if same else f"parameters differ by only {gap:.1e}"
        )
        return Verdict("mistake_has_diverged", ok, text, measured)
    amounts = [f"{n} by {d['relative']:.0%} (up to {d['max_abs']:.1e})" for n, d in last.items()]
    text = (
        f"mistake: the ranks have diverged from step {min(s for s in first.values() if s)} on, in "
        f"{_listed(amounts)}{_orders_above_ddp(report, gap)}"
    )
    return Verdict("mistake_has_diverged", ok, text, measured)


def _orders_above_ddp(report: Report, gap: float) -> str:
    rounding = report["variants"]["replicated"]["difference_from_ddp"]["max_abs"]
    if not (_all_is_fp32(report) and rounding > 0):
        return ""
    orders = math.log10(gap / rounding)
    return f": {orders:.1f} orders of magnitude more than replicated differs from DDP"


def audits_say_so(report: Report) -> Verdict:
    """`fusedshard.audit`, which knows nothing of the variants, finds of each what it must be."""
    found = {variant: of_job["audit"] for variant, of_job in report["variants"].items()}
    broken = [variant for variant, audit in found.items() if audit["kind"] != AUDITED[variant]]
    said = "; ".join(f'{variant}: "{audit["headline"]}"' for variant, audit in found.items())
    text = f"fusedshard.audit says of {said}"
    if broken:
        text = f"fusedshard.audit must not say so of {_listed(broken)}: {said}"
    return Verdict("audits_say_so", not broken, text, found)


def audit_stops_the_mistake(report: Report) -> Verdict:
    """At the first audit, on every rank."""
    caught = report["caught"]
    every, by_rank = caught["audit_every"], caught["by_rank"]
    steps = [told["step"] if told else None for told in by_rank]
    ok = steps == [every] * len(by_rank)
    text = f"mistake with audit_every={every}: every rank must stop at step {every}, not {steps}"
    if ok:
        text = f"mistake with audit_every={every}: every rank stops: {by_rank[0]['message']}"
    return Verdict("audit_stops_the_mistake", ok, text, caught)


def count_gaps_and_overlaps(
    sizes: Sequence[int], owned: Iterable[Iterable[Sequence[int]]]
) -> tuple[int, int]:
    """Elements that no rank owns (or that do not exist), and that more than one owns.

    `sizes` are elements by parameter; `owned` holds, by rank, (parameter, start, stop).
    """
    ranges: list[list[tuple[int, int]]] = [[] for _ in sizes]
    for parameter, start, stop in (one for of_rank in owned for one in of_rank):
        ranges[parameter].append((start, stop))
    gaps = overlaps = 0
    for size, found in zip(sizes, ranges, strict=True):
        reached = 0
        for start, stop in sorted(found):
            gaps += max(0, start - reached)
            overlaps += max(0, min(reached, stop) - start)
            reached = max(reached, stop)
        gaps += abs(size - reached)
    return gaps, overlaps


def _elements_of(owned: Iterable[Sequence[int]], parameters: int) -> list[int]:
    elements = [0] * parameters
    for parameter, start, stop in owned:
        elements[parameter] += stop - start
    return elements


def _first_difference(comparisons: Sequence[Report], name: str) -> int | None:
    steps = [c["after_step"] for c in comparisons if not c[name]["identical"]]
    return steps[0] if steps else None


def _nan_last(value: float) -> tuple[bool, float]:
    return math.isnan(value), value


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
