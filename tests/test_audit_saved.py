"""The audit of ranks' files: judged as on the ranks, and each fault is named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from audited import needs_fsdp_on_cpus
from saved_jobs import (
    NAMES,
    RANKS,
    WEIGHT,
    audit,
    change,
    faults,
    files_of,
    flip,
    part_of,
)

from fusedshard import AuditReport


@pytest.mark.parametrize(
    ("job", "kind"),
    [
        ("ddp", "replicated"),
        ("replicated", "replicated"),
        ("zero", "sharded"),
        pytest.param("fsdp2", "sharded", marks=needs_fsdp_on_cpus),
        ("ours", "sharded"),
    ],
)
def test_a_sound_job(originals: Path, job: str, kind: str) -> None:
    report = audit(*files_of(originals / job))
    assert (report.ok, report.kind) == (True, kind), report.headline
    assert report.ranks == ("rank0.pt", "rank1.pt", "rank2.pt")
    assert [p.name for p in report.parameters] == NAMES
    expected = {"param", "step", "exp_avg", "exp_avg_sq"}
    expected |= {"master_weights"} if job == "replicated" else set()
    for parameter in report.parameters:
        parts = {part.part: part for part in parameter.parts}
        assert parts.keys() == expected
        assert parts["exp_avg"].copies == (RANKS if kind == "replicated" else 1)


def test_one_bit(saved: Path) -> None:
    change(saved / "ddp" / "rank2.pt", flip)
    report = audit(*files_of(saved / "ddp"))
    assert report.kind == "diverged" and faults(report) == {(WEIGHT, "exp_avg")}
    part = part_of(report, WEIGHT, "exp_avg")
    [found] = part.differences
    assert (found.rank, found.has_majority, found.elements) == (2, True, 1)
    assert found.first_index == (3, 5)
    gap = abs(float(found.here) - float(found.there))
    assert 0 < found.max_abs == pytest.approx(gap, rel=1e-2)


def test_a_lost_copy(saved: Path) -> None:
    change(saved / "ddp" / "rank1.pt", lambda content: content["optimizer"]["state"].pop(2))
    report = audit(*files_of(saved / "ddp"))
    assert report.kind == "diverged"
    assert faults(report) == {(WEIGHT, part) for part in ("step", "exp_avg", "exp_avg_sq")}
    assert {share.ranks for share in part_of(report, WEIGHT, "exp_avg").shares} == {(0, 2)}


def test_whole_parameters_lost_and_doubled(saved: Path) -> None:
    files = files_of(saved / "zero")
    owners = [torch.load(path, weights_only=True)["optimizer"]["state"].keys() for path in files]
    lost = next(iter(owners[1]))
    change(files[1], lambda content: content["optimizer"]["state"].pop(lost))
    report = audit(*files)
    name = lost.removeprefix("module.")
    assert report.kind == "misowned" and {name for name, _ in faults(report)} == {name}
    part = part_of(report, name, "exp_avg")
    assert part.gap_elements == torch.Size(part.shape).numel() > 0 == part.overlap_elements

    doubled = next(iter(owners[2]))
    state = torch.load(files[2], weights_only=True)["optimizer"]["state"][doubled]
    change(files[1], lambda content: content["optimizer"]["state"].update({doubled: state}))
    part = part_of(audit(*files), doubled.removeprefix("module."), "exp_avg")
    assert [region.ranks for region in part.overlaps] == [(1, 2)]


@pytest.mark.parametrize("dropped", range(RANKS))
def test_a_lost_stretch_is_a_gap_at_the_end(saved: Path, dropped: int) -> None:
    """Also where no other file has any of the array."""
    files = files_of(saved / "ours")
    lost = torch.load(files.pop(dropped), weights_only=True)["optimizer"]["state"]
    report = audit(*files)
    assert report.kind == "misowned"
    for name in NAMES:
        part = part_of(report, name, "exp_avg")
        count = len(lost[name]["exp_avg"])
        assert part.gap_elements == count and part.overlap_elements == 0
        expected = [((part.shape[0] - count,), (count,))] if count else []
        assert [(gap.offset, gap.size) for gap in part.gaps] == expected


def stretches(folder: Path, *pieces: torch.Tensor, shape: Sequence[int] = (4, 3)) -> AuditReport:
    """Audit a parameter whose first moment is in the pieces."""
    paths = []
    for number, piece in enumerate(pieces):
        content: dict[str, Any] = {"optimizer": {"state": {"w": {"exp_avg": piece}}}}
        content["model"] = {"w": torch.zeros(*shape)}
        paths.append(folder / f"{number}.pt")
        torch.save(content, paths[-1])
    return audit(*paths)


def test_stretches_that_overlap(tmp_path: Path) -> None:
    a, b, c = torch.arange(12.0).split(4)
    assert stretches(tmp_path, a, b, c).kind == "sharded"
    replaced = part_of(stretches(tmp_path, a, a.clone(), c), "w", "exp_avg")
    assert [(r.offset, r.size, r.ranks) for r in replaced.overlaps] == [((0,), (4,), (0, 1))]
    assert [(r.offset, r.size) for r in replaced.gaps] == [((4,), (4,))]
    inserted = part_of(stretches(tmp_path, a, a.clone(), b, c), "w", "exp_avg")
    assert [(r.offset, r.size, r.ranks) for r in inserted.overlaps] == [((0,), (4,), (0, 1))]
    assert not inserted.gaps
    too_long = part_of(stretches(tmp_path, a, b, torch.arange(6.0)), "w", "exp_avg")
    assert [(r.offset, r.size, r.ranks) for r in too_long.overlaps] == [((6,), (2,), (1, 2))]


def test_stretches_of_zeros_are_no_copies(tmp_path: Path) -> None:
    assert stretches(tmp_path, *torch.zeros(12).split(4)).kind == "sharded"


def test_state_of_a_parameter_of_one_dimension(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    assert stretches(tmp_path, whole, whole, shape=[12]).kind == "replicated"
    assert stretches(tmp_path, whole[:5], whole[5:], shape=[12]).kind == "sharded"


@needs_fsdp_on_cpus
def test_a_lost_shard_of_a_distributed_tensor(saved: Path) -> None:
    report = audit(*files_of(saved / "fsdp2")[1:])
    assert report.kind == "misowned"
    [gap] = part_of(report, WEIGHT, "exp_avg").gaps
    assert (gap.offset, gap.size, gap.ranks) == ((0, 0), (6, 16), ())  # a third of 17 rows
