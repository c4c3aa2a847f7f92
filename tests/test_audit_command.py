"""fusedshard audit: what it prints, writes and refuses."""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_jobs import (
    NAMES,
    WEIGHT,
    audit,
    change,
    entries,
    files_of,
    flip,
    optimizer_dict,
)

from fusedshard import cli
from fusedshard.auditing.files.contents import UnusableFile

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


def cut_file_of_old(folder: Path) -> list[Path]:
    torch.save(optimizer_dict(), folder / "x.pt", _use_new_zipfile_serialization=False)
    os.truncate(folder / "x.pt", 300)
    return [folder / "x.pt"]


def odd_groups(folder: Path) -> list[Path]:
    torch.save({**optimizer_dict(), "param_groups": 3}, folder / "x.pt")
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
        (cut_file_of_old, "cannot be read as a file of torch.save"),
        (odd_groups, "cannot make sense of what it holds: TypeError"),
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
