"""What consistency.py claims, each claim judged from the report alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from consistency_jobs import (
    AGAIN,
    AUDIT_EVERY,
    BACKEND,
    DDP,
    LOST,
    NEVER,
    OTHER_BATCHES,
    REPLICATED,
    SHARDED,
    STEP_FIRST,
    WIRE_BF16,
    WIRE_BF16_ORDERED,
)

from fusedshard.demo.verdicts import Verdict

Found = Mapping[str, Any]
PARTS = ("parameters", "exp_avg", "exp_avg_sq")
WORDS = {"parameters": "weights", "exp_avg": "m", "exp_avg_sq": "v"}
# Shorter runs show when the ranks part, and not what it costs.
LONG = 1000
# Of a lost m 0.9^k is missing after k steps: in so many it is as it was, or within that of it.
HEALS_IN = 300
HEALED = 1e-6
# Relative: what does not count as another loss, of which two seeds differ by about half.
SAME_LOSS = 0.01


def judge(report: Found) -> list[Verdict]:
    settings = report["settings"]
    claims = [
        ranks_agree(report, "ranks", [DDP], PARTS),
        ranks_agree(report, "ranks", [REPLICATED], PARTS),
        ranks_agree(report, "ranks", [SHARDED], PARTS[:1]),
        each_element_is_owned_once(report),
        same_bits(report, "ranks", SHARDED),
        same_bits(report, "ranks", STEP_FIRST),
        forgetting_parts_everything(report),
        losing_parts_the_weights(report),
        ranks_agree(report, "order", list(report["order"]), PARTS),
        same_bits(report, "order", AGAIN),
    ]
    claims += [is_caught(report, name) for name in report["audits"]]
    if settings["ranks"] == 2:
        claims += [same_bits(report, "ranks", name) for name in (BACKEND, WIRE_BF16_ORDERED)]
    if settings["steps"] >= LONG:
        claims += [
            forgetting_costs_loss(report),
            losing_costs_less(report),
            order_in_fp32_is_noise(report),
            order_in_bf16_is_another_run(report),
            bf16_is_another_run(report),
        ]
    return claims


def ranks_agree(report: Found, group: str, names: Sequence[str], parts: Sequence[str]) -> Verdict:
    """No element differs between the ranks, at any probe."""
    probes = [probe for name in names for probe in report[group][name]["probes"]]
    differing = {
        part: max(probe["between_ranks"][part]["differing"] for probe in probes) for part in parts
    }
    what = names[0] if len(names) == 1 else f"each of {len(names)} runs"
    listed = ", ".join(WORDS[part] for part in parts)
    ranks = len(probes[0]["train_loss"])
    text = (
        f"{what}: {listed} identical on all {ranks} ranks after each of {len(probes)} compared "
        f"steps of up to {report['settings']['steps']}: {max(differing.values()):,} elements differ"
    )
    return Verdict(
        f"identical on {ranks} ranks: {what}", not any(differing.values()), text, differing
    )


def each_element_is_owned_once(report: Found) -> Verdict:
    found = report["ranks"][SHARDED]["ownership"]
    held = ", ".join(f"{elements:,}" for elements in found["held"])
    text = (
        f"{SHARDED}: the ranks hold {held} of {found['elements']:,} elements of m and v; "
        f"{found['gaps']:,} are owned by none, {found['overlaps']:,} by several"
    )
    once = not found["gaps"] and not found["overlaps"]
    ok = once and sum(found["held"]) == found["elements"]
    return Verdict("owned once", ok, text, dict(found))


def same_bits(report: Found, group: str, name: str) -> Verdict:
    """A run is another run, on every rank and at each probe."""
    job = report[group][name]
    differing = {
        part: max(probe["from_reference"][part]["differing"] for probe in job["probes"])
        for part in PARTS
    }
    ranks = len(job["probes"][0]["train_loss"])
    text = (
        f"{name} = {job['reference']} to the bit on {ranks} ranks, in m, v and weights after each "
        f"of {len(job['probes'])} compared steps: {max(differing.values()):,} elements differ"
    )
    return Verdict(
        f"the same on {ranks} ranks: {name}", not any(differing.values()), text, differing
    )


def forgetting_parts_everything(report: Found) -> Verdict:
    """From the first step on, and by far more than any order of summation does."""
    probes = report["ranks"][NEVER]["probes"]
    first, last = probes[0]["between_ranks"], probes[-1]["between_ranks"]
    begun = {part: first_difference(probes, part) for part in PARTS}
    drift = report["order"][BACKEND]["probes"][-1]["from_reference"]["parameters"]
    orders = decades(last["parameters"], drift)
    text = (
        f"{NEVER}: m, v and weights differ from step {_listed(set(begun.values()))} on, in norm by "
        f"{gaps_text(first)}; after step {probes[-1]['step']} by {gaps_text(last)}, at most by "
        f"{gaps_text(last, 'max_abs')}; the weights by {orders:.1f} orders of magnitude more than "
        "summing in another order parts two runs"
    )
    ok = set(begun.values()) == {1} and orders > 1
    measured = {"first_step": begun, "first": first, "last": last, "orders_above_drift": orders}
    return Verdict("averaging forgotten", ok, text, measured)


def losing_parts_the_weights(report: Found) -> Verdict:
    """Though gradients are averaged all along: m and v come together again, weights do not."""
    probes = report["ranks"][LOST]["probes"]
    lost_at = report["settings"]["lost_after"] + 1
    begun = {part: first_difference(probes, part) for part in PARTS}
    (first,) = (probe["between_ranks"] for probe in probes if probe["step"] == lost_at)
    last = probes[-1]["between_ranks"]
    healed = {part: first_agreement(probes, part, HEALED) for part in PARTS}
    text = (
        f"{LOST} before step {lost_at}: all differ from that step on, by {gaps_text(first)}; "
        f"gradients are averaged all along, and after step {probes[-1]['step']} they differ by "
        f"{gaps_text(last)}"
        + "".join(
            f"; {WORDS[part]} within {HEALED:.0e} from step {step} on"
            for part, step in healed.items()
            if step
        )
    )
    ok = set(begun.values()) == {lost_at} and healed["parameters"] is None
    if probes[-1]["step"] >= lost_at + HEALS_IN:
        ok = ok and healed["exp_avg"] is not None
    measured = {"first_step": begun, "first": first, "last": last, "healed": healed}
    return Verdict("moments lost", ok, text, measured)


def is_caught(report: Found, name: str) -> Verdict:
    """At the first audit after it, on every rank, with the same words."""
    due = AUDIT_EVERY * (2 if name == LOST else 1)
    by_rank = report["audits"][name]
    told = by_rank[0] or {}
    text = f"{name}, audit_every={AUDIT_EVERY}: must be stopped at step {due}, and was not"
    ok = told.get("step") == due and all(caught == told for caught in by_rank)
    if ok:
        text = f"{name}, audit_every={AUDIT_EVERY}: every rank is stopped at step {due}, for its "
        text += f"{told['part']}"
    return Verdict(f"caught: {name}", ok, text, {"due": due, "by_rank": by_rank})


def forgetting_costs_loss(report: Found) -> Verdict:
    """Each rank has trained alone on its share of the text, and the average of such models is worse
    than any of them."""
    text, losses = losses_of_mistake(report, NEVER)
    ok = min(losses["of_ddp"]) > 1 + SAME_LOSS and losses["average_of_ddp"] > min(losses["of_ddp"])
    return Verdict(f"loss: {NEVER}", ok, text, losses)


def losing_costs_less(report: Found) -> Verdict:
    text, losses = losses_of_mistake(report, LOST)
    _, of_forgetting = losses_of_mistake(report, NEVER)
    ok = all(loss < min(of_forgetting["of_ddp"]) for loss in losses["of_ddp"])
    return Verdict(f"loss: {LOST}", ok, text, losses)


def losses_of_mistake(report: Found, name: str) -> tuple[str, dict[str, Any]]:
    """In words and numbers, beside DDP's."""
    mistaken, right = (report["ranks"][job]["probes"][-1] for job in (name, DDP))
    base = right["held_out"][0]
    own = [loss / base for loss in mistaken["held_out"]]
    taught = [loss / statistics.fmean(right["train_loss"]) for loss in mistaken["train_loss"]]
    average = mistaken["held_out_of_average"] / base
    text = (
        f"{name}: after step {right['step']} the ranks' held-out losses are {_ratios(own)} of "
        f"DDP's, which is {base:.3f}, that of the average of their weights {average:.3f}; on their "
        f"own batches {_ratios(taught)}"
    )
    return text, {"ddp": base, "of_ddp": own, "average_of_ddp": average, "taught_of_ddp": taught}


def order_in_fp32_is_noise(report: Found) -> Verdict:
    """Far less than one update moves, and nothing that a loss shows."""
    text, found = drift(report, BACKEND)
    ok = found["updates"] < 0.1 and abs(found["loss"]) < 0.1 * SAME_LOSS
    return Verdict(f"drift: {BACKEND}", ok, text, found)


def order_in_bf16_is_another_run(report: Found) -> Verdict:
    """Many updates apart, orders of magnitude more than in fp32, and as good."""
    return another_run(report, WIRE_BF16_ORDERED)


def bf16_is_another_run(report: Found) -> Verdict:
    return another_run(report, WIRE_BF16)


def another_run(report: Found, name: str) -> Verdict:
    text, found = drift(report, name)
    fp32 = drift(report, BACKEND)[1]
    ok = found["relative"] > 10 * fp32["relative"] and abs(found["loss"]) < SAME_LOSS
    return Verdict(f"drift: {name}", ok, text, found)


def drift(report: Found, name: str) -> tuple[str, dict[str, Any]]:
    """In words and numbers, how far apart a run and its reference are at their end."""
    order = report["order"]
    job, other = order[name], order[OTHER_BATCHES]
    last = job["probes"][-1]
    gap, update = last["from_reference"]["parameters"], last["update"]
    updates = gap["relative"] / update["relative"]
    base = order[job["reference"]]["probes"][-1]["held_out"][0]
    loss = last["held_out"][0] / base - 1
    others = other["probes"][-1]
    far = others["from_reference"]["parameters"]["relative"]
    others_loss = others["held_out"][0] / order[other["reference"]]["probes"][-1]["held_out"][0] - 1
    text = (
        f"{name}, against {job['reference']}: after step {last['step']} the weights are "
        f"{gap['relative']:.1e} apart, at most {gap['max_abs']:.1e}, which is {updates:.2g} times "
        f"what one update moves; the held-out loss differs by {loss:+.2%} (other batches: weights "
        f"{far:.1e}, loss {others_loss:+.2%})"
    )
    return text, {**gap, "updates": updates, "loss": loss, "loss_of_other_batches": others_loss}


def first_difference(probes: Iterable[Found], part: str) -> int | None:
    return next((p["step"] for p in probes if p["between_ranks"][part]["differing"]), None)


def first_agreement(probes: Sequence[Found], part: str, limit: float) -> int | None:
    """From which probe on, to the last, a part that has differed is within `limit` again."""
    agreed = None
    for probe in probes[[p["step"] for p in probes].index(first_difference(probes, part)) :]:
        close = probe["between_ranks"][part].get("relative", 0.0) <= limit
        agreed = (agreed or probe["step"]) if close else None
    return agreed


def decades(gap: Found, other: Found) -> float:
    """By how many orders of magnitude one gap's norm is larger than another's."""
    return math.log10(gap["relative"] / other["relative"])


def gaps_text(gaps: Found, measure: str = "relative") -> str:
    return ", ".join(f"{WORDS[part]} {gap.get(measure, 0):.1e}" for part, gap in gaps.items())


def _ratios(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
