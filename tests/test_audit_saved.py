"""The audit of files: what jobs saved is judged as it was on the ranks, and each fault is named."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import saved_jobs
import torch
import torch.distributed.checkpoint as dcp
from ranks import RankPool

from fusedshard import AuditReport, cli
from fusedshard.auditing.contents import UnusableFile
from fusedshard.auditing.local import compare
from fusedshard.auditing.report import PartReport
from fusedshard.auditing.saved import read

WEIGHT = "2.weight"  # 17 x 16, of the first linear layer
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]
RANKS = 3


@pytest.fixture(scope="module")
def originals(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    ranks.run(RANKS, saved_jobs.save_all, folder)
    return folder


@pytest.fixture
def saved(originals: Path, tmp_path: Path) -> Path:
    """Copies, to be spoilt."""
    return shutil.copytree(originals, tmp_path / "saved")


def files_of(folder: Path) -> list[Path]:
    return [folder / f"rank{rank}.pt" for rank in range(RANKS)]


def audit(*paths: Path) -> AuditReport:
    return compare(*read(paths))


def change(path: Path, how: Callable[[Any], Any]) -> None:
    content = torch.load(path, weights_only=True)
    how(content)
    torch.save(content, path)


def part_of(report: AuditReport, name: str, part: str) -> PartReport:
    found = next(p for p in report.parameters if p.name == name)
    return next(p for p in found.parts if p.part == part)


def faults(report: AuditReport) -> set[tuple[str, str]]:
    return {(p.name, part.part) for p in report.parameters for part in p.parts if not part.ok}


# -- files of ranks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "kind"),
    [
        ("ddp", "replicated"),
        ("replicated", "replicated"),
        ("zero", "sharded"),
        ("fsdp2", "sharded"),
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


def flip(content: Any) -> None:
    number = NAMES.index(WEIGHT)
    content["optimizer"]["state"][number]["exp_avg"].view(torch.int32)[3, 5] ^= 1


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
    inserted = part_of(stretches(tmp_path, a, b, b.clone(), c), "w", "exp_avg")
    assert [(r.offset, r.size, r.ranks) for r in inserted.overlaps] == [((4,), (4,), (1, 2))]
    assert not inserted.gaps
    too_long = part_of(stretches(tmp_path, a, b, torch.arange(6.0)), "w", "exp_avg")
    assert [(r.offset, r.size, r.ranks) for r in too_long.overlaps] == [((6,), (2,), (1, 2))]


def test_stretches_of_zeros_are_no_copies(tmp_path: Path) -> None:
    assert stretches(tmp_path, *torch.zeros(12).split(4)).kind == "sharded"


def test_state_of_a_parameter_of_one_dimension(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    assert stretches(tmp_path, whole, whole, shape=[12]).kind == "replicated"
    assert stretches(tmp_path, whole[:5], whole[5:], shape=[12]).kind == "sharded"


def test_a_lost_shard_of_a_distributed_tensor(saved: Path) -> None:
    report = audit(*files_of(saved / "fsdp2")[1:])
    assert report.kind == "misowned"
    [gap] = part_of(report, WEIGHT, "exp_avg").gaps
    assert (gap.offset, gap.size, gap.ranks) == ((0, 0), (6, 16), ())  # a third of 17 rows


# -- what is found in files -----------------------------------------------------------------------


def optimizer_dict(**options: Any) -> dict[str, Any]:
    state = {number: {"step": 4, "exp_avg": torch.arange(6.0) + number} for number in range(2)}
    return {"state": state, "param_groups": [{"params": [0, 1], "lr": 0.1, **options}]}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda optimizer: optimizer,
        lambda optimizer: {"optimizer": optimizer, "rng": torch.zeros(8, dtype=torch.uint8)},
        lambda optimizer: {"trainer": {"optimizer_states": [optimizer]}, "epoch": 3},
    ],
)
@pytest.mark.parametrize("in_zip", [True, False])
def test_wherever_it_is_in_the_file(
    tmp_path: Path, wrap: Callable[[Any], Any], in_zip: bool
) -> None:
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for path in paths:
        content = wrap(optimizer_dict())
        torch.save(content, path, _use_new_zipfile_serialization=in_zip)
    report = audit(*paths)
    assert report.kind == "replicated"
    assert [p.name for p in report.parameters] == ["parameter 0", "parameter 1"]
    assert {part.part for part in report.parameters[0].parts} == {"step", "exp_avg"}


def names_in(folder: Path, content: Any) -> list[str]:
    for name in ("a.pt", "b.pt"):
        torch.save(content, folder / name)
    return [p.name for p in audit(folder / "a.pt", folder / "b.pt").parameters]


def test_names_that_the_optimizer_has(tmp_path: Path) -> None:
    named = optimizer_dict(param_names=["module.w", "module.b"])
    assert names_in(tmp_path, named) == ["w", "b"]


def entries(**shapes: Sequence[int]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(*shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("model", "first", "expected"),
    [
        ({"w": [6], "b": [6]}, [0, 1], ["w", "b"]),
        # Statistics cannot be the optimizer's.
        ({"w": [6], "b": [6], "running_mean": [6]}, [0, 1], ["w", "b"]),
        ({"v": [5], "w": [6], "b": [6]}, [0, 1], ["v", "w", "b"]),
        # Any two of the three.
        ({"v": [6], "w": [6], "b": [6]}, [0, 1], ["v", "w", "b", "parameter 0", "parameter 1"]),
        # A group each: which is which?
        ({"w": [6], "b": [6]}, [0], ["w", "b", "parameter 0", "parameter 1"]),
        ({"w": [7], "b": [6]}, [0, 1], ["w", "b", "parameter 0", "parameter 1"]),
    ],
)
def test_names_by_the_models_shapes(
    tmp_path: Path, model: dict[str, Sequence[int]], first: list[int], expected: list[str]
) -> None:
    optimizer = optimizer_dict()
    rest = [number for number in (0, 1) if number not in first]
    groups = [{"params": params} for params in (first, rest) if params]
    optimizer["param_groups"] = groups
    content = {"model": entries(**model), "optimizer": optimizer}
    assert names_in(tmp_path, content) == expected


def test_groups_that_shapes_tell_apart(tmp_path: Path) -> None:
    """Weights that decay and biases that do not, as is usual."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    params = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": params[::2]}, {"params": params[1::2]}])
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for name in ("a.pt", "b.pt"):
        torch.save(content, tmp_path / name)
    report = audit(tmp_path / "a.pt", tmp_path / "b.pt")
    assert [p.name for p in report.parameters] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    for parameter in report.parameters:
        assert {part.shape for part in parameter.parts} == {parameter.shape, ()}


def test_two_models_and_two_optimizers(tmp_path: Path) -> None:
    content = {
        "generator": entries(w=[6], b=[6]),
        "critic": entries(w=[5], v=[6], b=[6], c=[6]),
        "generator_opt": optimizer_dict(),
        "critic_opt": optimizer_dict(),
    }
    names = names_in(tmp_path, content)
    assert names[:6] == [
        "generator.w",
        "generator.b",
        "critic.w",
        "critic.v",
        "critic.b",
        "critic.c",
    ]
    # Both fit the generator.
    assert names[6:] == [
        f"{optimizer}: parameter {number}"
        for optimizer in ("generator_opt", "critic_opt")
        for number in (0, 1)
    ]


# -- folders of torch.distributed.checkpoint ------------------------------------------------------


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


# -- what is refused ------------------------------------------------------------------------------


class Evil:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def text_file(folder: Path) -> list[Path]:
    (folder / "x.pt").write_text("no pickle")
    return [folder / "x.pt"]


def empty_file(folder: Path) -> list[Path]:
    (folder / "x.pt").touch()
    return [folder / "x.pt"]


def cut_file(folder: Path) -> list[Path]:
    torch.save(optimizer_dict(), folder / "x.pt")
    os.truncate(folder / "x.pt", 700)
    return [folder / "x.pt"]


def no_state(folder: Path) -> list[Path]:
    torch.save({"epoch": 3, "rng": torch.zeros(4, dtype=torch.uint8)}, folder / "x.pt")
    return [folder / "x.pt"]


def evil_file(folder: Path) -> list[Path]:
    torch.save({**optimizer_dict(), "extra": Evil(folder / "ran")}, folder / "x.pt")
    return [folder / "x.pt"]


def evil_index(folder: Path) -> list[Path]:
    (folder / "x.pt").mkdir()
    (folder / "x.pt" / ".metadata").write_bytes(pickle.dumps(Evil(folder / "ran")))
    return [folder / "x.pt"]


def bare_folder(folder: Path) -> list[Path]:
    (folder / "x.pt").mkdir()
    return [folder / "x.pt"]


def twice(folder: Path) -> list[Path]:
    torch.save(optimizer_dict(), folder / "x.pt")
    return [folder / "x.pt", folder / "." / "x.pt"]


def another_model(folder: Path) -> list[Path]:
    torch.save(entries(w=[3], b=[2]), folder / "first.pt")
    torch.save(entries(w=[3], b=[4]), folder / "x.pt")
    return [folder / "first.pt", folder / "x.pt"]


def another_count(folder: Path) -> list[Path]:
    torch.save(optimizer_dict(), folder / "first.pt")
    torch.save(optimizer_dict(params=[0]), folder / "x.pt")
    return [folder / "first.pt", folder / "x.pt"]


def quantized(folder: Path) -> list[Path]:
    content = optimizer_dict()
    content["state"][0]["exp_avg"] = torch.quantize_per_tensor(torch.ones(6), 0.1, 0, torch.qint8)
    torch.save(content, folder / "x.pt")
    return [folder / "x.pt"]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage")
@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda folder: [folder / "x.pt"], "no such file or folder"),
        (text_file, "cannot be read as a file of torch.save"),
        (empty_file, "cannot be read as a file of torch.save"),
        (cut_file, "cannot be read as a file of torch.save"),
        (no_state, "got no state dict, wanted a model's or an optimizer's"),
        (evil_file, "got a pickle with posix.mkdir, which only running code"),
        (evil_index, "got posix.mkdir, wanted what an index is made of"),
        (bare_folder, "got a folder without .metadata"),
        (twice, "got it twice, wanted a file for each rank"),
        (another_model, "model: got b (4,), wanted b (2,), as in"),
        (another_count, "optimizer: got parameters in groups [1], wanted parameters in groups [2]"),
        (quantized, "exp_avg of parameter 0: got a"),
    ],
)
def test_what_cannot_be_audited(
    make: Callable[[Path], list[Path]],
    wanted: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["audit", *map(str, make(tmp_path))]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fusedshard audit: error: ")
    assert str(tmp_path / "x.pt") in error and wanted in error
    assert not (tmp_path / "ran").exists()


def test_numbers_of_ranks_own_optimizers(originals: Path) -> None:
    """ZeroRedundancyOptimizer's ranks number their parameters each on its own."""
    with pytest.raises(UnusableFile, match="number its parameters alike"):
        audit(*files_of(originals / "zero_numbered"))


# -- the command ----------------------------------------------------------------------------------


def test_the_command_says_what_it_found(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(path) for path in files_of(saved / "ddp")]
    assert cli.main(["audit", *files]) == 0
    printed = capsys.readouterr().out
    assert "replicated, identical" in printed and "0.weight … 4.bias (6)" in printed
    assert cli.main(["audit", "--all", *files]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in NAMES)

    change(saved / "ddp" / "rank2.pt", flip)
    assert cli.main(["audit", *files]) == 1
    printed = capsys.readouterr().out
    for word in ("diverged", WEIGHT, "exp_avg", "rank2.pt differs from most others", "(3, 5)"):
        assert word in printed


def test_the_command_writes_what_it_found(
    originals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(path) for path in files_of(originals / "ours")]
    outputs = [str(tmp_path / name) for name in ("found.json", "found.png")]
    assert cli.main(["audit", *files, "--json", outputs[0], "--plot", outputs[1]]) == 0
    found = json.loads(Path(outputs[0]).read_text())
    assert found["ok"] and found["kind"] == "sharded"
    assert [parameter["name"] for parameter in found["parameters"]] == NAMES
    assert struct.unpack(">II", Path(outputs[1]).read_bytes()[16:24]) == (1600, 1000)

    with pytest.raises(SystemExit) as ended:
        cli.main(["audit", *files, "--plot", "found.pdf"])
    assert ended.value.code == 2
    assert "got 'found.pdf', wanted a name that ends in .png" in capsys.readouterr().err
    assert cli.main(["audit", *files, "--json", str(tmp_path / "none" / "found.json")]) == 2


@pytest.mark.parametrize(
    ("package", "arguments"), [("rich", []), ("matplotlib", ["--plot", "found.png"])]
)
def test_the_command_names_the_extra_that_is_missing(
    originals: Path,
    package: str,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    files = [str(path) for path in files_of(originals / "ddp")]
    assert cli.main(["audit", *files, *arguments]) == 2
    error = capsys.readouterr().err
    assert f"needs {package}: pip install 'fusedshard[demo]'" in error
