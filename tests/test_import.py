"""What importing the package does, and what it leaves alone; each in a process of its own."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fusedshard

SOURCE = Path(__file__).resolve().parents[1] / "fusedshard"


def run_python(code: str, cwd: Path, fails: bool = False) -> list[str]:
    """Printed lines of a program, or the lines of its error."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == int(fails), done.stdout + done.stderr
    return (done.stderr if fails else done.stdout).splitlines()


# Reads a denormal number, so that a flag that flushes them is seen in the thread that asks.
FLOATING_POINT_MODE = """
import math, sys, threading
from concurrent.futures import ThreadPoolExecutor

def half_of_the_smallest():
    return sys.float_info.min / 2

assert half_of_the_smallest() > 0
import fusedshard, torch
from fusedshard import kernels
assert half_of_the_smallest() > 0
torch.set_num_threads(4)
count = 4 << 15
denormal = torch.finfo(torch.float32).tiny / 4
p = torch.nn.Parameter(torch.full((count,), denormal))
optimizer = fusedshard.AdamW([p], lr=0.0)
p.grad = torch.full((count,), denormal)
p.grad[0], p.grad[count - 1] = math.nan, math.inf
assert kernels.square_sum(p.grad).isnan()
assert kernels.square_sum(p.grad[1:]) == math.inf
optimizer.step()
assert torch.equal(p[1:-1], torch.full((count - 2,), denormal)), "denormals were flushed"
exp_avg = optimizer.state[p]["exp_avg"]
assert exp_avg[0].isnan() and exp_avg[-1] == math.inf and (exp_avg[1:-1] > 0).all()
assert half_of_the_smallest() > 0
with ThreadPoolExecutor(1) as pool:
    assert pool.submit(half_of_the_smallest).result() > 0
import numpy
assert 0 < float(numpy.finfo(numpy.float32).smallest_subnormal) < denormal
print("kept")
"""


def test_num_11_floating_point_mode_is_left_alone(tmp_path: Path) -> None:
    assert run_python(FLOATING_POINT_MODE, tmp_path) == ["kept"]


@pytest.mark.parametrize(
    "statement",
    [
        "import fusedshard, torch",
        "from fusedshard.layout import build_layout; import torch",
    ],
)
def test_import_before_torch(statement: str, tmp_path: Path) -> None:
    use = "import fusedshard; p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3)"
    step = "fusedshard.Adam([p], lr=0.5).step(); print(p.sum().item())"
    (printed,) = run_python(f"{statement}; {use}; {step}", tmp_path)
    assert float(printed) == pytest.approx(1.5)


def test_import_loads_nothing_beside_torch_and_starts_nothing(tmp_path: Path) -> None:
    """Nothing that torch's own Adam would not load, so neither rich nor matplotlib."""
    code = """
import os, sys, torch
torch.optim.Adam([torch.nn.Parameter(torch.ones(3))])
before, threads = set(sys.modules), len(os.listdir("/proc/self/task"))
import fusedshard
assert len(os.listdir("/proc/self/task")) == threads
assert not torch.distributed.is_initialized()
assert not any(os.scandir())
assert "fusedshard.demo" not in sys.modules
print(*{name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)
"""
    assert run_python(code, tmp_path) == ["fusedshard"]


def test_public_names() -> None:
    assert sorted(fusedshard.__all__) == [
        "Adam",
        "AdamW",
        "AuditReport",
        "DivergenceError",
        "GradScaler",
        "ShardedState",
        "audit",
    ]
    assert fusedshard.__version__.count(".") == 2


def copy_package(folder: Path) -> Path:
    """The package's Python files, without the extension."""
    package = folder / "fusedshard"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return package


def test_source_tree_without_the_extension_says_what_to_do(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    (tmp_path / "setup.py").touch()
    *_, last = run_python("import fusedshard", tmp_path, fails=True)
    assert last == (
        f"ImportError: fusedshard was imported from its source tree ({package}), which holds no "
        "built extension: run from another directory after `pip install .` (and tests by "
        "`pytest`, not `python -m pytest`), or build in place with `pip install -e .`"
    )


def test_missing_extension_elsewhere_says_what_to_do(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    *_, last = run_python("import fusedshard", tmp_path, fails=True)
    assert last.startswith("ImportError: fusedshard's extension cannot be loaded: ")
    assert f"no _C*.so in {package}" in last and "pip install --force-reinstall" in last


def test_dst_13_an_older_torch_is_refused_at_install() -> None:
    """Of the releases before 2.6 none is tested; pip names the version that is wanted."""
    assert "torch>=2.6" in (importlib.metadata.requires("fusedshard") or [])
