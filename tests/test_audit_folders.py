"""The audit of folders that torch.distributed.checkpoint wrote."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from audited import needs_fsdp_on_cpus
from saved_jobs import (
    NAMES,
    WEIGHT,
    audit,
    change,
    faults,
    files_of,
    flip,
    part_of,
)

from fusedshard import cli
from fusedshard.auditing.files.contents import UnusableFile

pytestmark = needs_fsdp_on_cpus  # which make the folder


def test_a_sound_folder(originals: Path) -> None:
    report = audit(originals / "folder")
    assert (report.ok, report.kind) == (True, "sharded"), report.headline
    assert report.ranks == ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp")
    # Besides the model's: a tensor of nobody's.
    assert [p.name for p in report.parameters] == [*NAMES, "noise"]
    part = part_of(report, WEIGHT, "exp_avg")
    assert [share.size for share in part.shares] == [(6, 16), (6, 16), (5, 16)]


def test_a_file_that_is_missing(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (saved / "folder" / "__1_0.distcp").unlink()
    report = audit(saved / "folder")
    assert report.kind == "misowned"
    assert report.ranks[1] == "__1_0.distcp (missing)"
    [gap] = part_of(report, WEIGHT, "exp_avg").gaps
    assert (gap.offset, gap.size) == ((6, 0), (6, 16))
    # What was in no other file is not overlooked: a step count is in one.
    lost = set(lost_with(saved / "folder", "__1_0.distcp"))
    assert ("4.weight", "step") in lost and faults(report) == lost
    assert part_of(report, "4.weight", "step").gap_elements == 1
    assert cli.main(["audit", str(saved / "folder")]) == 1
    printed = capsys.readouterr().out
    assert "files: __0_0.distcp, __1_0.distcp (missing), __2_0.distcp" in printed


def lost_with(folder: Path, file: str) -> Iterator[tuple[str, str]]:
    """Parameters and parts of which a file has any."""
    reader = dcp.FileSystemReader(folder)  # type: ignore[attr-defined]
    for place, info in reader.read_metadata().storage_data.items():
        kind, _, name = place.fqn.partition(".")
        if info.relative_path == file and place.offset is not None:
            _, number, part = name.split(".") if kind == "optimizer" else ("", "", "param")
            yield NAMES[int(number)] if number else name or kind, part


def stored(folder: Path, name: str) -> Any:
    """Where the index says the second of a tensor's chunks is."""
    reader = dcp.FileSystemReader(folder)  # type: ignore[attr-defined]
    index = reader.read_metadata()
    return next(
        info
        for place, info in index.storage_data.items()
        if place.fqn == name and place.offset[0] == 6
    )


def test_a_file_that_ends_early(saved: Path) -> None:
    info = stored(saved / "folder", "optimizer.state.2.exp_avg")
    path = saved / "folder" / info.relative_path
    size = path.stat().st_size
    os.truncate(path, info.offset + info.length - 1)
    report = audit(saved / "folder")
    assert report.ranks[1] == f"__1_0.distcp ({info.offset + info.length - 1} of {size} bytes)"
    assert (WEIGHT, "exp_avg") in faults(report) and (WEIGHT, "param") not in faults(report)


def test_a_chunk_that_is_damaged(saved: Path) -> None:
    info = stored(saved / "folder", "optimizer.state.2.exp_avg")
    with (saved / "folder" / info.relative_path).open("r+b") as file:
        file.seek(info.offset)
        file.write(bytes(info.length))
    report = audit(saved / "folder")
    assert report.ranks[1] == "__1_0.distcp (damaged)"
    assert faults(report) == {(WEIGHT, "exp_avg")}


def test_chunks_that_overlap(saved: Path) -> None:
    """As an index would say that was written by ranks of different opinions."""
    place = saved / "folder" / ".metadata"
    index = pickle.loads(place.read_bytes())
    name = "optimizer.state.2.exp_avg"
    chunk = index.state_dict_metadata[name].chunks[1]
    info = stored(saved / "folder", name)
    chunk.offsets = torch.Size([4, 0])
    index.storage_data[type(next(iter(index.storage_data)))(name, chunk.offsets)] = info
    place.write_bytes(pickle.dumps(index))
    report = audit(saved / "folder")
    assert faults(report) == {(WEIGHT, "exp_avg")}
    part = part_of(report, WEIGHT, "exp_avg")
    assert [(r.offset, r.size, r.ranks) for r in part.overlaps] == [((4, 0), (2, 16), (0, 1))]
    assert [(r.offset, r.size) for r in part.gaps] == [((10, 0), (2, 16))]


def test_folders_are_compared_as_wholes(saved: Path) -> None:
    """With each other, and with a file of whole tensors."""
    folder = saved / "folder"
    shutil.copytree(folder, saved / "again")
    report = audit(folder, saved / "again")
    assert (report.kind, report.ranks) == ("replicated", ("folder", "again"))

    pieces = [torch.load(path, weights_only=True) for path in files_of(saved / "fsdp2")]
    whole = {
        "model": {name: joined(pieces, "model", name) for name in NAMES},
        "optimizer": {
            "state": {
                number: {
                    part: joined(pieces, "optimizer", "state", number, part)
                    for part in ("step", "exp_avg", "exp_avg_sq")
                }
                for number in range(6)
            },
            "param_groups": pieces[0]["optimizer"]["param_groups"],
        },
    }
    torch.save(whole, saved / "whole.pt")
    report = audit(folder, saved / "whole.pt")
    assert report.kind == "replicated", report.headline
    change(saved / "whole.pt", flip)
    report = audit(folder, saved / "whole.pt")
    assert faults(report) == {(WEIGHT, "exp_avg")}
    [found] = part_of(report, WEIGHT, "exp_avg").differences
    assert (found.first_index, found.elements, found.has_majority) == ((3, 5), 1, False)


def joined(pieces: Sequence[Any], *path: Any) -> torch.Tensor:
    found = list(pieces)
    for key in path:
        found = [content[key] for content in found]
    if not hasattr(found[0], "_local_tensor"):
        return found[0]
    return torch.cat([tensor._local_tensor for tensor in found])


def test_a_folder_with_a_gap_is_not_compared(saved: Path) -> None:
    shutil.copytree(saved / "folder", saved / "again")
    (saved / "again" / "__1_0.distcp").unlink()
    with pytest.raises(UnusableFile, match=r"again: .*wanted a folder that is whole"):
        audit(saved / "folder", saved / "again")
