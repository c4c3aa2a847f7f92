"""The READMEs say what is there, and the example runs as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_trains_on_two_ranks(tmp_path: Path) -> None:
    match = re.search(r"<!-- example: train.py -->\n```python\n(.*?)```", README, re.DOTALL)
    assert match is not None
    (tmp_path / "train.py").write_text(match.group(1))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loss = re.search(r"loss ([\d.]+)", done.stdout)
    assert loss is not None and float(loss.group(1)) < 16  # 32 before the first step
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    params = list(saved["model"].values())
    state = saved["optimizer"]["state"]
    assert [state[i]["exp_avg"].shape for i in range(4)] == [p.shape for p in params]
    assert all(state[i]["step"] == 100 for i in range(4))


def test_every_file_it_names_exists() -> None:
    table = README[README.index("## Where things are") : README.index("## Build options")]
    names = re.findall(r"`([\w./*]+)`", table)
    folder = Path()
    for name in names:
        if not name.endswith((".h", ".cpp", ".cu", ".py", "/")):
            continue
        path = Path(name)
        folder = path.parent if "/" in name else folder
        found = list(ROOT.glob(str(folder / path.name)))
        assert found, f"README.md names {name}, which does not exist"


def test_every_module_is_in_it() -> None:
    table = README[README.index("## Where things are") : README.index("## Build options")]
    for path in (*ROOT.glob("fusedshard/*.py"), *ROOT.glob("csrc/*.cpp"), *ROOT.glob("csrc/*.cu")):
        if path.name != "__init__.py":
            assert path.name in table, f"{path.name} is not in README.md"


def named_in(text: str) -> list[tuple[str, str]]:
    """Modules and names of tests, each of which exists."""
    named: list[tuple[str, str]] = re.findall(r"`(\w+)::(\w+)`", text)
    for module, name in named:
        source = (ROOT / f"tests/test_{module}.py").read_text()
        assert f"def test_{name}(" in source, f"{module}::{name} is named, but does not exist"
    return named


def test_every_test_in_the_table_of_traps_exists() -> None:
    assert len(named_in((ROOT / "tests/TRAPS.md").read_text())) > 100


def test_every_guarantee_has_its_test_and_every_test_its_guarantee() -> None:
    section = README[README.index("## Determinism") : README.index("## Memory")]
    _, _, *rows = re.findall(r"^\|.*\|$", section, re.MULTILINE)
    assert len(rows) > 10
    for row in rows:
        what, _, tests = row.strip("|").split("|")
        assert named_in(tests), f"no test is named for {what.strip()}"
    named = {name for module, name in named_in(section) if module == "guarantees"}
    source = (ROOT / "tests/test_guarantees.py").read_text()
    assert named == set(re.findall(r"^def test_(\w+)", source, re.MULTILINE))
