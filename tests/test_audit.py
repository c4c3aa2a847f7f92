"""The audit of live jobs: what is sound is called so, and each fault is named."""

from __future__ import annotations

from typing import Any

import audited
import pytest
import torch
from audited import param_of
from ranks import Rank, RankPool

from fusedshard import AuditReport
from fusedshard.auditing.report import PartReport

FSDP2 = pytest.param(audited.fsdp2, marks=audited.needs_fsdp_on_cpus)
WEIGHT = "2.weight"  # 17 x 16, of the first linear layer


def one_report(reports: list[AuditReport]) -> AuditReport:
    """The ranks' report, which must be the same on all."""
    texts = {report.to_json() for report in reports}
    assert len(texts) == 1
    return reports[0]


def part_of(report: AuditReport, name: str, part: str) -> PartReport:
    found = next(p for p in report.parameters if p.name == name)
    return next(p for p in found.parts if p.part == part)


def others_are_sound(report: AuditReport, name: str, part: str) -> bool:
    return all(
        p.ok
        for parameter in report.parameters
        for p in parameter.parts
        if (parameter.name, p.part) != (name, part)
    )


@pytest.mark.parametrize("world_size", [1, 3])
def test_ddp_is_replicated(ranks: RankPool, world_size: int) -> None:
    report = one_report(ranks.run(world_size, audited.audited, audited.ddp))
    assert report.ok
    assert report.kind == ("single" if world_size == 1 else "replicated")
    assert world_size == 1 or str(report) == "replicated, identical"
    assert {p.part for p in report.parameters[0].parts} == {
        "param",
        "exp_avg",
        "exp_avg_sq",
        "step",
    }


def _flip_one_bit(rank: Rank, model: Any, optimizer: Any) -> None:
    if rank.rank == 2:
        moment = optimizer.state[param_of(model, WEIGHT)]["exp_avg"]
        moment.view(torch.int32)[3, 5] ^= 1


def test_one_bit_of_one_moment(ranks: RankPool) -> None:
    report = one_report(ranks.run(3, audited.audited, audited.ddp, _flip_one_bit))
    assert not report.ok and report.kind == "diverged"
    part = part_of(report, WEIGHT, "exp_avg")
    assert part.verdict == "different" and part.differing_ranks == (2,)
    assert others_are_sound(report, WEIGHT, "exp_avg")
    [found] = part.differences
    assert (found.reference, found.has_majority, found.elements) == (0, True, 1)
    assert found.first_index == (3, 5)
    # Printed so that they can be read back.
    here, there = torch.tensor([float(found.here), float(found.there)]).double().tolist()
    assert 0 < found.max_abs == abs(here - there) < 1e-6
    assert found.max_rel == found.max_abs / abs(there)
    for word in (WEIGHT, "exp_avg", "rank 2", "(3, 5)"):
        assert word in report.headline


@pytest.mark.parametrize("job", [audited.zero, FSDP2, audited.ours])
def test_shards_are_owned_once(ranks: RankPool, job: Any) -> None:
    report = one_report(ranks.run(3, audited.audited, job))
    assert (report.ok, report.kind) == (True, "sharded"), report.headline
    assert str(report) == "sharded, each element owned once"
    moment = part_of(report, WEIGHT, "exp_avg")
    assert moment.verdict == "owned once" and moment.copies == 1


def _drop(rank: Rank, model: Any, optimizer: Any) -> None:
    """The state of a parameter, on rank 1 or on the one that has all of it."""
    state = getattr(optimizer, "optim", optimizer).state
    if rank.rank == 1 or hasattr(optimizer, "optim"):
        state.pop(param_of(model, WEIGHT), None)


@pytest.mark.parametrize("job", [audited.zero, FSDP2, audited.ours])
def test_a_dropped_shard_is_a_gap(ranks: RankPool, job: Any) -> None:
    sound = one_report(ranks.run(3, audited.audited, job))
    report = one_report(ranks.run(3, audited.audited, job, _drop))
    assert not report.ok and report.kind == "misowned"
    part = part_of(report, WEIGHT, "exp_avg_sq")
    assert part.verdict == "misowned" and not part.overlaps
    lost = [
        (share.offset, share.size)
        for share in part_of(sound, WEIGHT, "exp_avg_sq").shares
        if job is audited.zero or share.ranks == (1,)
    ]
    assert [(gap.offset, gap.size) for gap in part.gaps] == lost
    assert all(gap.ranks == () for gap in part.gaps)
    assert part.gap_elements == sum(torch.Size(size).numel() for _, size in lost) > 0
    assert f"of {WEIGHT}: [" in report.headline and "held by nobody" in report.headline


def _double(rank: Rank, model: Any, optimizer: Any) -> None:
    """Rank 1 has rank 0's part of a parameter's state, too."""
    param = param_of(model, WEIGHT)
    if is_dtensor(param):
        from torch.distributed.tensor import DTensor, Replicate

        moment = optimizer.state[param]["exp_avg"]
        whole = moment.full_tensor()  # on all ranks, and kept on one
        if rank.rank == 1:
            copy = DTensor.from_local(whole, moment.device_mesh, [Replicate()], run_check=False)
            optimizer.state[param]["exp_avg"] = copy
    elif hasattr(optimizer, "optim"):
        values = {"step": torch.tensor(3.0)}
        values |= {name: torch.zeros(param.shape) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.optim.state[param] = values
    elif rank.rank == 1:
        state = optimizer.state[param]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.cat([state[name], state[name]])


def is_dtensor(param: torch.Tensor) -> bool:
    return hasattr(param, "placements")


@pytest.mark.parametrize("job", [audited.zero, FSDP2, audited.ours])
def test_a_doubled_shard_is_an_overlap(ranks: RankPool, job: Any) -> None:
    report = one_report(ranks.run(3, audited.audited, job, _double))
    assert not report.ok and report.kind == "misowned"
    part = part_of(report, WEIGHT, "exp_avg")
    assert part.verdict == "misowned" and not part.gaps
    assert part.overlap_elements > 0
    assert all(len(region.ranks) > 1 for region in part.overlaps)
    if job is audited.zero:
        assert [region.ranks for region in part.overlaps] == [(0, 1, 2)]
        assert part.overlap_elements == 17 * 16
