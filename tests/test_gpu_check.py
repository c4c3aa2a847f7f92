"""gpu_check.py without a GPU: how it runs its stages, what it says where there is none, and the
parts of its stages that need none."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
Load = Callable[[str], ModuleType]

PASSING = "save(figures={'answer': 42})\nprint('hello')"
FAILING = "save(figures={'half': 1})\nprint('first')\nsys.exit('it broke')"
HANGING = """
child = subprocess.Popen(["sleep", "100"])
save(figures={"child": child.pid})
print("waiting", flush=True)
time.sleep(100)
"""
SKIPPING = "print('not here')\nsys.exit(77)"
CRASHING = "print('ouch', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)"
SAVE = """
import json, os, signal, subprocess, sys, time
def save(figures):
    with open(os.environ["STAGE_RESULT"], "w") as file:
        json.dump(figures, file)
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Import one of the benchmarks' modules by name, as the programs do."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def run(runner: Any, folder: Path, seconds: float, *stages: Any) -> tuple[Any, list[Any]]:
    """The finished run, and what its report held after each stage."""
    finished, reports = runner.Run(folder, os.environ, seconds), []

    def report() -> None:
        runner.write_json(folder / "report.json", runner.as_json(finished.outcomes))
        reports.append(json.loads((folder / "report.json").read_text()))

    finished.all(stages, after_each=report)
    return finished, reports


def stage(runner: Any, name: str, program: str, limit: float = 30.0, needs: Any = ()) -> Any:
    return runner.Stage(name, (sys.executable, "-c", SAVE + program), limit, needs)


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or only waits for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_no_stage_hides_another(module: Load, tmp_path: Path) -> None:
    runner = module("gpu_runner")
    programs = {
        "passing": PASSING,
        "failing": FAILING,
        "hanging": HANGING,
        "skipping": SKIPPING,
        "crashing": CRASHING,
        "last": PASSING,
    }
    stages = [
        stage(runner, name, program, limit=1.0 if name == "hanging" else 30.0)
        for name, program in programs.items()
    ]
    finished, reports = run(runner, tmp_path, 300.0, *stages)
    assert [len(report) for report in reports] == [1, 2, 3, 4, 5, 6]
    found = {row["name"]: row for row in reports[-1]}
    assert list(found) == list(programs)
    assert {name: (row["status"], row["reason"]) for name, row in found.items()} == {
        "passing": ("passed", ""),
        "failing": ("failed", "exit status 1: it broke"),
        "hanging": ("timeout", "it ran longer than 1 s; last: waiting"),
        "skipping": ("skipped", "not here"),
        "crashing": ("failed", "SIGSEGV: ouch"),
        "last": ("passed", ""),
    }
    assert found["passing"]["figures"] == found["last"]["figures"] == {"answer": 42}
    assert found["passing"]["output"] == ["hello"]
    assert found["failing"]["figures"] == {"half": 1}
    assert found["failing"]["output"] == ["first", "it broke"]
    assert found["skipping"]["figures"] == {}, "those of the stage before"
    assert finished.failed
    end = time.monotonic() + 30
    while not has_ended(found["hanging"]["figures"]["child"]):
        assert time.monotonic() < end, "a child of the hanging stage still runs"
        time.sleep(0.05)


@pytest.mark.parametrize(("program", "failed"), [(PASSING, False), (FAILING, True)])
def test_stages_that_need_others(module: Load, tmp_path: Path, program: str, failed: bool) -> None:
    runner = module("gpu_runner")
    stages = [
        stage(runner, "first", program),
        stage(runner, "second", PASSING, needs=("first", "not run")),
        stage(runner, "third", PASSING, needs=("second",)),
    ]
    finished, _ = run(runner, tmp_path, 300.0, *stages)
    assert finished.failed == failed
    statuses = [(outcome.status, outcome.reason) for outcome in finished.outcomes.values()]
    reason = "exit status 1: it broke"
    skipped = ("skipped", f"first: {reason}")
    assert statuses == ([("failed", reason), skipped, skipped] if failed else [("passed", "")] * 3)


def test_nothing_starts_when_the_time_is_over(module: Load, tmp_path: Path) -> None:
    runner = module("gpu_runner")
    finished, _ = run(runner, tmp_path, 0.0, stage(runner, "late", PASSING))
    (outcome,) = finished.outcomes.values()
    assert (outcome.status, outcome.reason) == ("skipped", "no time was left for it")
    assert not finished.failed


def gpu_check(folder: Path, *options: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """The program as it is, on a machine without a GPU; ``path``: put first on PYTHONPATH."""
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--out", str(folder), *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("with_rich", [True, False], ids=["rich", "no rich"])
def test_without_a_gpu_it_says_so_once(tmp_path: Path, with_rich: bool) -> None:
    """And leaves an earlier report as it is."""
    (tmp_path / "rich.py").write_text("raise ImportError('no rich here')")
    earlier = tmp_path / "out" / "gpu_check.json"
    earlier.parent.mkdir()
    earlier.write_text("{}")
    done = gpu_check(earlier.parent, path="" if with_rich else str(tmp_path))
    assert done.returncode == 1, done.stderr
    reasons = [line for line in done.stdout.splitlines() if "no CUDA device" in line]
    assert reasons[-1].startswith("device: failed after") and len(reasons) <= 2
    assert "built without CUDA" in done.stdout or "nvidia-smi" in done.stdout
    assert earlier.read_text() == "{}"


def test_every_file_with_tests_for_a_gpu_is_a_stage(module: Load) -> None:
    names = {path.name for path in module("gpu_check").gpu_tests()}
    kinds = ("kernels", "mixed", "streams", "optimizer", "ranks", "fingerprints")
    assert {f"test_gpu_{kind}.py" for kind in kinds} <= names
    assert Path(__file__).name not in names


TESTS = """
    import pytest
    gpu = getattr(pytest.mark, "gpu")
    @gpu
    def test_passes(): pass
    @gpu
    def test_fails(): assert 1 == 2
    @gpu
    def test_skips(): pytest.skip("no second card")
    def test_elsewhere(): assert False
"""


@pytest.mark.parametrize(("chosen", "code"), [("passes", 0), ("fails", 1), ("skips", 1)])
def test_the_stage_of_tests(tmp_path: Path, chosen: str, code: int) -> None:
    (tmp_path / "test_it.py").write_text(textwrap.dedent(TESTS))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers = gpu\naddopts = -k {chosen}\n")
    command = [sys.executable, str(BENCHMARKS / "gpu_stages.py"), "tests"]
    command += ["--file", str(tmp_path / "test_it.py")]
    environment = {**os.environ, "STAGE_RESULT": str(tmp_path / "result.json")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    figures = json.loads((tmp_path / "result.json").read_text())
    name = f"test_it.py::test_{chosen}"
    assert figures == {
        "passed": int(chosen == "passes"),
        "failed": [name] if chosen == "fails" else [],
        "skipped": {name: "Skipped: no second card"} if chosen == "skips" else {},
        "running": "",
    }
    assert chosen != "skips" or "no test ran: Skipped: no second card" in done.stderr


@pytest.mark.parametrize(
    ("printed", "status", "code"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0, 0),
        ("========= ERROR SUMMARY: 3 errors", 9, 9),
        ("========= Error: Device not supported. Please refer to the guide", 1, 77),
    ],
)
def test_the_stage_of_compute_sanitizer(
    module: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    printed: str,
    status: int,
    code: int,
) -> None:
    program, result = tmp_path / "compute-sanitizer", tmp_path / "result.json"
    program.write_text(f"#!/bin/sh\necho '{printed}'\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("STAGE_RESULT", str(result))
    with pytest.raises(SystemExit) as ended:
        module("gpu_stages").sanitize("memcheck")
    assert ended.value.code == code
    summary = [printed.strip("= ")] if "SUMMARY" in printed else []
    assert json.loads(result.read_text()) == {"summary": summary}


def test_all_contenders_make_the_same_update(module: Load) -> None:
    update = module("gpu_update")
    results = []
    for name in (update.KERNEL, update.TORCH_KERNEL, update.STEP, update.TORCH_STEP):
        torch.manual_seed(0)
        works = update.contenders(5000, "cpu")
        state = works[update.KERNEL].args[0]
        before = state.param.clone()
        works[name]()
        assert not torch.equal(state.param, before), name
        results.append(state)
    for state in results[1:]:
        torch.testing.assert_close(state, results[0], rtol=0, atol=1e-6)


def test_shares_and_bars_of_a_size(module: Load) -> None:
    update, spread = module("gpu_update"), module("harness").Spread
    samples = {
        update.COPY: [8.0, 16.0],
        update.KERNEL: [28.0, 56.0],
        update.TORCH_KERNEL: [35.0, 70.0],
        update.STEP: [56.0, 112.0],
        update.TORCH_STEP: [56.0, 112.0],
    }
    shares = {name: update.share_of_copy(samples, name) for name in samples}
    assert shares[update.COPY] == shares[update.KERNEL] == spread(1.0, 1.0, 1.0)
    assert shares[update.STEP].median == 0.5
    assert update.bars(samples, 10**6) == []
    bars = [bar.as_json() for bar in update.bars(samples, 10**9)]
    assert [bar["met"] for bar in bars] == [True, True, False, False]
    assert [bar["wanted"] for bar in bars] == [">= 0.93", ">= 1.05"] * 2
    assert [bar["measured"]["median"] for bar in bars] == [1.0, 1.25, 0.5, 1.0]
    rows = {row["name"]: row for row in update.rows(samples, 10**9)}
    assert rows[update.COPY]["gigabytes_per_second"] == pytest.approx(8 / 12)
    assert rows[update.KERNEL]["gigabytes_per_second"] == pytest.approx(28 / 42)


def test_updates_in_mixed_precision(module: Load) -> None:
    mixed = module("gpu_mixed")
    for configuration in mixed.CONFIGURATIONS:
        state, update = mixed.update_of(configuration, 5000, "cpu")
        before = state.param.clone()
        update()
        assert not torch.equal(state.param, before), configuration.name


def test_row_of_an_update_in_mixed_precision(module: Load) -> None:
    """20 bytes in the time in which the copy moves as many."""
    mixed = module("gpu_mixed")
    (configuration,) = (c for c in mixed.CONFIGURATIONS if c.update_bytes == 20 and c.master)
    samples = {mixed.COPY: [8.0, 16.0], configuration.name: [20.0, 40.0]}
    row = mixed.row_of(samples, configuration, 10**9)
    assert row["share_of_copy"] == {"median": 1.0, "lower": 1.0, "upper": 1.0}
    assert row["gigabytes_per_second"] == pytest.approx(1 / 1.5)


def test_fingerprints_beside_a_sum(module: Load) -> None:
    fingerprint = module("gpu_fingerprint")
    assert fingerprint.same_as_on_the_host(5000, "cpu")
    works = fingerprint.contenders(5000, "cpu")
    for work in works.values():
        work()
    assert set(works) == {fingerprint.OURS, fingerprint.SHIFTED, fingerprint.SUM}
    hashes = [works[name].args[0].item() for name in (fingerprint.OURS, fingerprint.SHIFTED)]
    assert hashes[0] != hashes[1]


def test_the_program_for_compute_sanitizer_runs_every_kernel(module: Load) -> None:
    module("gpu_kernels_once").run_all("cpu")
