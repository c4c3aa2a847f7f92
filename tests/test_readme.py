"""The READMEs say what is there, and the example runs as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import MAX_RANKS, Rank, RankPool
from training import assert_same_bits, gradient

import fusedshard

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def example(name: str) -> str:
    match = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", README, re.DOTALL)
    assert match is not None
    return match.group(1)


def test_the_example_trains_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(example("train.py"))
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


@pytest.mark.parametrize("where", ["file", "folder"])
def test_the_examples_save_and_resume(ranks: RankPool, tmp_path: Path, where: str) -> None:
    for (params, state), resumed in ranks.run(MAX_RANKS, _save_and_resume, where, tmp_path):
        assert_same_bits(resumed[0], params)
        assert_same_bits(resumed[1]["state"], state["state"])
        assert_same_bits(resumed[1]["param_groups"], state["param_groups"])


def _save_and_resume(rank: Rank, where: str, folder: Path) -> Any:
    known: dict[str, Any] = {"os": os, "torch": torch, "dist": dist, "step": 100}
    before = Path.cwd()
    os.chdir(folder)
    try:
        trained = known | _job(rank, seed=0, steps=3)
        exec(example(f"save a {where}"), trained)
        dist.barrier()
        # Where the job begins anew, what was imported and defined is there.
        resumed = trained | _job(rank, seed=1, steps=0)
        exec(example(f"resume from a {where}"), resumed)
    finally:
        os.chdir(before)
    return _whole(trained), _whole(resumed)


def _job(rank: Rank, seed: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    optimizer = fusedshard.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        for index, param in enumerate(model.parameters()):
            param.grad = gradient(param, step, index, rank.rank)
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def _whole(job: dict[str, Any]) -> Any:
    return [p.detach() for p in job["model"].parameters()], job["optimizer"].full_state_dict()


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
