"""The command line: its options, its errors, and what it must not import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fusedshard
from fusedshard import cli
from fusedshard.demo import command as demo


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"fusedshard {fusedshard.__version__} (")


def test_runs_as_a_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fusedshard.cli", "--version"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    build = fusedshard._C.cuda_build()
    assert result.stdout.startswith(f"fusedshard {fusedshard.__version__} (")
    assert (build["architectures"] or build["note"]) in result.stdout.replace("\n", " ")


def test_a_reader_that_has_gone_is_no_error(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "fusedshard.cli", "plan", "--params", "1M", "--ranks", "2"]
    result = subprocess.run(
        [*command, "--json"], cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (result.returncode, result.stderr) == (1, "")


def test_wants_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "required: COMMAND" in error_of(capsys)
    assert "invalid choice: 'dmeo'" in error_of(capsys, "dmeo")


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("--ranks", "1", "an integer, at least 2"),
        ("--ranks", "two", "an integer, at least 2"),
        ("--steps", "1", "an integer, at least 2"),
        ("--seed", "-1", "an integer, at least 0"),
        ("--out", "file/out", "a folder that can be written to: Not a directory"),
        ("--out", "file", "a folder that can be written to: File exists"),
    ],
)
def test_demo_refuses_before_a_rank_starts(
    option: str,
    value: str,
    wanted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    monkeypatch.setattr(demo, "run_ranks", lambda *_: pytest.fail("ranks were started"))
    error = error_of(capsys, "demo", option, value)
    assert f"argument {option}: got '{value}', wanted {wanted}" in error


@pytest.mark.parametrize(
    ("package", "arguments"), [("rich", ["demo"]), ("matplotlib", ["demo", "--out", "report"])]
)
def test_demo_names_the_extra_that_is_missing(
    package: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(demo, "run_ranks", lambda *_: pytest.fail("ranks were started"))
    assert cli.main(arguments) == 1
    error = capsys.readouterr().err
    assert f"needs {package}: pip install 'fusedshard[demo]'" in error


def test_importing_needs_neither_rich_nor_matplotlib(tmp_path: Path) -> None:
    code = "import sys, fusedshard.cli; print({'rich', 'matplotlib'} & sys.modules.keys())"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"
