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


def test_every_test_in_the_table_of_traps_exists() -> None:
    tests = ROOT / "tests"
    named = re.findall(r"`(\w+)::(\w+)`", (tests / "TRAPS.md").read_text())
    assert len(named) > 100
    for module, name in named:
        source = (tests / f"test_{module}.py").read_text()
        assert f"def test_{name}(" in source, f"TRAPS.md names {module}::{name}"
