"""Conversions between floats and narrower numbers for every float there is, checks for every
difference, and the known answers of the random numbers: `numbers_cases.cpp`, also with faults
planted in what it checks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from emulation import ARITHMETIC, ROOT, compiler

HEADERS = ("numbers.h", "random.h")
# As fast as this machine allows: a check goes through 2^32 floats.
OPTIONS = ("-std=c++17", "-O3", "-march=native", "-fno-trapping-math", *ARITHMETIC, "-fopenmp")
CHECKS = ("bfloat16", "stochastic", "master", "half", "widen", "weights", "philox")
FAULTS = [
    ("bfloat16", "0x7fffu + (bits >> 16 & 1u)", "0x8000u"),
    ("bfloat16", "kInfinity ? 0x7fc0u : rounded", "kInfinity ? 0x7f80u : rounded"),
    ("stochastic", "(bits + random) >> 16", "(bits + random + 1u) >> 16"),
    ("master", "(bits + 0x8000u) >> 16", "(bits + 0x7fffu) >> 16"),
    ("master", "is_nan ? 0x7fc0u : (bits", "is_nan ? bits >> 16 : (bits"),
    ("half", "0xfffu + (magnitude >> 13 & 1u)", "0x1000u"),
    ("half", "magnitude < (113u << 23)", "magnitude < (112u << 23)"),
    ("half", "magnitude >= (143u << 23)", "magnitude >= (144u << 23)"),
    ("widen", "magnitude < 0x0400u", "magnitude < 0x03ffu"),
    ("widen", "magnitude >= 0x7c00u", "magnitude > 0x7c00u"),
    ("weights", "(place + 1u)", "(place / 2u + 1u)"),
    ("weights", "(weight ^ weight >> 13) | 1u", "weight << 17 | 1u"),
    ("weights", "(weight ^ weight >> 13) | 1u", "weight << 17"),
    ("philox", "kPhiloxRounds = 10", "kPhiloxRounds = 9"),
    ("philox", "k1 += 0xbb67ae85u", "k1 += 0x9e3779b9u"),
]


def build(folder: Path, old: str = "", new: str = "") -> Path:
    """The program, in a folder of its own; `old`: what to replace once in the headers."""
    texts = {name: (ROOT / "csrc" / name).read_text() for name in HEADERS}
    assert not old or sum(text.count(old) for text in texts.values()) == 1
    for name, text in texts.items():
        (folder / name).write_text(text.replace(old, new) if old else text)
    source = shutil.copy(ROOT / "tests/numbers_cases.cpp", folder)
    program = folder / "numbers_cases"
    command = [*compiler(), *OPTIONS, str(source), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return program


def check(program: Path, name: str) -> tuple[int, str]:
    """Its status, and what it printed."""
    done = subprocess.run([str(program), name], capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("numbers"))


@pytest.mark.parametrize("name", CHECKS)
def test_every_number(program: Path, name: str) -> None:
    assert check(program, name) == (0, "")


@pytest.mark.parametrize(("name", "old", "new"), FAULTS)
def test_a_planted_fault_is_found(tmp_path: Path, name: str, old: str, new: str) -> None:
    status, printed = check(build(tmp_path, old, new), name)
    assert status == 1 and ("it does not hold for 0x" in printed or "wanted" in printed)
