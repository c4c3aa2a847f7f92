"""The stages of gpu_check.py, each as ``python gpu_stages.py NAME``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from gpu_stage import git_commit, machine, save, skip, versions

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FOLDERS_BUILT_FROM = ("csrc", "fusedshard")
FILES_BUILT_FROM = ("CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "setup.py")
# Printed by the fusedshard that was built.
DESCRIBE = """
import json, fusedshard
from fusedshard import _C
print(json.dumps({"fusedshard": fusedshard.__version__, "cuda_build": _C.cuda_build()}))
"""


def check_device() -> None:
    """Report the machine, or fail where it has no GPU."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            sys.exit(f"no CUDA device: torch {torch.__version__} is built without CUDA")
        sys.exit("no CUDA device: see nvidia-smi and CUDA_VISIBLE_DEVICES")
    properties = torch.cuda.get_device_properties(0)
    gpu = {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "gpu_memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver": answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }
    tools = {"torch_cuda": torch.version.cuda, "nccl": nccl_version(), "nvcc": nvcc_version()}
    save({"commit": git_commit(), "machine": machine() | gpu, "versions": versions() | tools})
    print(f"{gpu['gpu']}, compute capability {gpu['capability']}, driver {gpu['driver']}")
    torch.ones(3, device="cuda").sum().item()  # raises where the device refuses work


def nccl_version() -> str | None:
    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def nvcc_version() -> str | None:
    found = re.search(r"release (\S+),", answer(find_tool("nvcc") or "nvcc", "--version") or "")
    return found[1] if found else None


def find_tool(name: str) -> str | None:
    """A program of the CUDA toolkit, looked for where setup.py looks."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    folders = [f"{home}/bin" for home in homes if home]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))


def answer(*command: str) -> str | None:
    """What a program prints; None where it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def build(site: Path) -> None:
    """Install into a folder, for the architecture of this card alone."""
    major, minor = torch.cuda.get_device_capability(0)
    environment = {**os.environ, "FUSEDSHARD_CUDA": "1", "CUDAARCHS": f"{major}{minor}-real"}
    with tempfile.TemporaryDirectory() as folder:
        source = copy_sources(Path(folder) / "source")
        command = [sys.executable, "-m", "pip", "install", "--verbose", "--no-build-isolation"]
        command += ["--no-deps", "--no-index", "--disable-pip-version-check"]
        command += ["--target", str(site), str(source)]
        code = subprocess.run(command, env=environment).returncode
    if code != 0:
        sys.exit(f"pip ended with {code}")
    built = subprocess.run([sys.executable, "-c", DESCRIBE], capture_output=True, text=True)
    if built.returncode != 0:
        sys.exit(f"the build cannot be imported: {built.stderr}")
    save(json.loads(built.stdout))


def copy_sources(folder: Path) -> Path:
    """A copy of what a build needs, so that nothing is left in the checkout or taken from it."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in FOLDERS_BUILT_FROM:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in FILES_BUILT_FROM:
        shutil.copy(ROOT / name, folder)
    return folder


class Outcomes:
    """A plugin of pytest that reports the outcome of each test as it is known."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []
        self.skipped: dict[str, str] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._save(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.skipped:
            self.skipped[report.nodeid] = str(report.longrepr[-1])
        elif report.when == "call":
            self.passed += 1

    def pytest_sessionfinish(self) -> None:
        self._save("")

    def _save(self, running: str) -> None:
        counts = {"passed": self.passed, "failed": self.failed, "skipped": self.skipped}
        save({**counts, "running": running})


def run_tests(file: Path) -> None:
    pytest = importlib.import_module("pytest")  # only here it must be installed
    outcomes = Outcomes()
    options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
    code = pytest.main([*options, str(file)], plugins=[outcomes])
    if code == 0 and outcomes.passed == 0:
        sys.exit(f"no test ran: {'; '.join({*outcomes.skipped.values()}) or 'there is none'}")
    # The last line of output is pytest's own summary.
    sys.exit(int(code))


def sanitize(tool: str) -> None:
    """Every kernel once, on small arrays, watched by a tool of compute-sanitizer."""
    program = find_tool("compute-sanitizer")
    if program is None:
        skip("compute-sanitizer is not installed")
    command = [program, "--tool", tool, "--error-exitcode", "9"]
    command += [sys.executable, str(HERE / "gpu_kernels_once.py")]
    # Without torch's cache each array is an allocation of its own, with borders to step over.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    lines = []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip(" =\n"))
    save({"summary": [line for line in lines if "SUMMARY" in line]})
    refused = [line for line in lines if "device not supported" in line.lower()]
    if refused:
        skip(refused[0])
    sys.exit(process.returncode)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--site", type=Path, help="folder of the build")
    parser.add_argument("--file", type=Path, help="tests to run")
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.name == "device":
        check_device()
    elif args.name == "build":
        build(args.site)
    elif args.name == "tests":
        run_tests(args.file)
    elif args.name in ("memcheck", "racecheck"):
        sanitize(args.name)
    else:  # what needs fusedshard to be imported at all
        importlib.import_module(f"gpu_{args.name}").main(quick=args.quick)


if __name__ == "__main__":
    main()
