"""Builds fusedshard._C with CMake. All else about the package is in pyproject.toml.

The environment decides about the CUDA part:

FUSEDSHARD_CUDA       1: build it or fail; 0: leave it out; unset: build it where nvcc is found
CUDACXX, CUDA_HOME    where nvcc is, looked at before PATH and /usr/local/cuda
CUDAARCHS             architectures in CMake's notation, "80-real;90", or
TORCH_CUDA_ARCH_LIST  in torch's, "8.0;9.0+PTX"; neither: DEFAULT_ARCHITECTURES
CUDAHOSTCXX           the C++ compiler that nvcc calls

Programs are checked before CMake starts, since its own messages come late and do not say what to
do. Each error names what was found and the remedy.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

ROOT = Path(__file__).resolve().parent
DEFAULT_CUDA_HOME = "/usr/local/cuda"
# Machine code for Ampere, Hopper and both Blackwells as far as nvcc knows them; PTX of the newest
# of these serves what comes after it.
DEFAULT_ARCHITECTURES = (80, 90, 100, 120)
OLDEST_NVCC = (11, 8)
WITHOUT_CUDA = "set FUSEDSHARD_CUDA=0 to build without CUDA"


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler that was found and asked."""

    path: str
    cuda_home: str
    version: tuple[int, int]
    architectures: tuple[int, ...]  # that it compiles for: 90 stands for compute capability 9.0

    def __str__(self) -> str:
        """As every message about it names it."""
        version = ".".join(map(str, self.version))
        return f"nvcc {version} ({self.path}; CUDA_HOME is {self.cuda_home or 'unset'})"


@dataclass(frozen=True)
class CudaPlan:
    """Which CUDA architectures to build for, or the reason to build for none."""

    nvcc: str = ""
    architectures: tuple[str, ...] = ()  # in CMake's notation
    note: str = ""

    def describe(self) -> str:
        """What the build prints about it."""
        if not self.architectures:
            return f"CUDA part left out: {self.note}"
        return f"CUDA part built by {self.nvcc} for architectures {' '.join(self.architectures)}"

    def cmake_options(self) -> list[str]:
        """The same, said to CMake."""
        if not self.architectures:
            return ["-DFUSEDSHARD_CUDA=OFF", f"-DFUSEDSHARD_CUDA_NOTE={self.note}"]
        return [
            "-DFUSEDSHARD_CUDA=ON",
            f"-DCMAKE_CUDA_COMPILER={self.nvcc}",
            f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(self.architectures)}",
        ]


def find_nvcc(environ: Mapping[str, str]) -> str | None:
    """The nvcc to use, the user's explicit choices first."""
    chosen = environ.get("CUDACXX")
    if chosen:
        found = shutil.which(chosen, path=environ.get("PATH"))
        if found is None:
            raise SetupError(f"CUDACXX: got {chosen!r}, wanted an nvcc program; {WITHOUT_CUDA}")
        return found
    cuda_home = environ.get("CUDA_HOME")
    places = [
        f"{cuda_home}/bin" if cuda_home else "",
        environ.get("PATH", ""),
        f"{DEFAULT_CUDA_HOME}/bin",
    ]
    return shutil.which("nvcc", path=os.pathsep.join(filter(None, places)))


def ask(*command: str) -> str:
    """What a program prints; empty where it fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def read_nvcc(path: str, environ: Mapping[str, str]) -> Nvcc:
    """Asks nvcc for its version and architectures."""
    release = re.search(r"release (\d+)\.(\d+)", ask(path, "--version"))
    if release is None:
        raise SetupError(f"{path} --version: got no 'release X.Y', wanted nvcc's; {WITHOUT_CUDA}")
    listed = re.findall(r"compute_(\d+)\b", ask(path, "--list-gpu-arch"))
    nvcc = Nvcc(
        path,
        environ.get("CUDA_HOME", ""),
        version=(int(release[1]), int(release[2])),
        architectures=tuple(sorted({int(architecture) for architecture in listed})),
    )
    if nvcc.version < OLDEST_NVCC or not listed:
        oldest = ".".join(map(str, OLDEST_NVCC))
        raise SetupError(
            f"got {nvcc}, wanted {oldest} or newer: set CUDA_HOME to a newer "
            f"toolkit, or {WITHOUT_CUDA}"
        )
    return nvcc


def requested_architectures(environ: Mapping[str, str]) -> tuple[str, ...]:
    """CUDAARCHS or TORCH_CUDA_ARCH_LIST in CMake's notation; empty where neither says anything."""
    cmake_list = environ.get("CUDAARCHS", "").replace(";", " ").split()
    for entry in cmake_list:
        if not re.fullmatch(r"\d+[af]?(-real|-virtual)?|all|all-major|native", entry):
            raise SetupError(f"CUDAARCHS: got {entry!r}, wanted for example 90 or 90-real")
    if cmake_list:
        return tuple(cmake_list)
    architectures = []
    for entry in environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split():
        match = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", entry)
        if match is None:
            raise SetupError(
                f"TORCH_CUDA_ARCH_LIST: got {entry!r}, wanted for example 9.0 or 9.0+PTX"
            )
        architectures.append(f"{match[1]}{match[2]}" + ("" if match[3] else "-real"))
    return tuple(architectures)


def default_architectures(nvcc: Nvcc) -> tuple[str, ...]:
    """DEFAULT_ARCHITECTURES that this nvcc knows, with PTX of the last."""
    known = [number for number in DEFAULT_ARCHITECTURES if number in nvcc.architectures]
    *older, newest = known or nvcc.architectures[-1:]
    return (*(f"{number}-real" for number in older), str(newest))


def check_architectures(nvcc: Nvcc, architectures: tuple[str, ...]) -> None:
    """Refuses an architecture that nvcc does not know: too new for it, or dropped by it."""
    for architecture in architectures:
        number = re.match(r"\d+", architecture)
        if number and int(number[0]) not in nvcc.architectures:
            known = ", ".join(map(str, nvcc.architectures))
            raise SetupError(
                f"CUDA architecture: got {architecture!r}, wanted one that "
                f"{nvcc} knows: {known}. Set CUDA_HOME to a toolkit that knows "
                f"{number[0]}, or change CUDAARCHS or TORCH_CUDA_ARCH_LIST, or {WITHOUT_CUDA}"
            )


def check_host_compiler(nvcc: Nvcc, environ: Mapping[str, str]) -> None:
    """Compiles an empty program, since which host compilers an nvcc takes only it knows."""
    chosen = environ.get("CUDAHOSTCXX")
    host = chosen or environ.get("NVCC_CCBIN") or "g++"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.cu")
        source.write_text("int main() { return 0; }\n")
        command = [nvcc.path, "-std=c++17", "-c", str(source), "-o", f"{folder}/empty.o"]
        command += ["-ccbin", chosen] if chosen else []
        result = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    if result.returncode != 0:
        version = (ask(host, "--version").splitlines() or ["no answer to --version"])[0]
        raise SetupError(
            f"{nvcc} does not work with the host compiler {host} "
            f"({version}). Set CUDAHOSTCXX to a C++ compiler that it takes, or CUDA_HOME to a "
            f"newer toolkit, or {WITHOUT_CUDA}. It printed:\n{result.stdout}"
        )


def plan_cuda(environ: Mapping[str, str]) -> CudaPlan:
    """Decides about the CUDA part, and checks all that it needs."""
    wanted = environ.get("FUSEDSHARD_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SetupError(f"FUSEDSHARD_CUDA: got {wanted!r}, wanted 0 or 1")
    if wanted == "0":
        return CudaPlan(note="FUSEDSHARD_CUDA=0 was set")
    path = find_nvcc(environ)
    if path is None:
        missing = f"no nvcc was found by CUDA_HOME, on PATH or in {DEFAULT_CUDA_HOME}"
        if wanted == "1":
            raise SetupError(f"FUSEDSHARD_CUDA=1, but {missing}: set CUDA_HOME to a CUDA toolkit")
        return CudaPlan(note=missing)
    nvcc = read_nvcc(path, environ)
    architectures = requested_architectures(environ) or default_architectures(nvcc)
    check_architectures(nvcc, architectures)
    check_host_compiler(nvcc, environ)
    return CudaPlan(path, architectures)


def find_program(name: str) -> str | None:
    """A program on PATH, or beside a Python whose environment was not activated."""
    return shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))


def choose_generator() -> list[str]:
    """CMake's options for Ninja, or else for make."""
    for name, generator in (("ninja", "Ninja"), ("make", "Unix Makefiles")):
        program = find_program(name)
        if program:
            return ["-G", generator, f"-DCMAKE_MAKE_PROGRAM={program}"]
    raise SetupError("neither ninja nor make was found: pip install ninja")


def pybind11_folder() -> str:
    """Where pybind11 keeps its CMake package."""
    try:
        import pybind11
    except ImportError:
        raise SetupError("pybind11 was not found: pip install pybind11") from None
    return str(pybind11.get_cmake_dir())


def run(*command: str) -> None:
    """Runs a program that says itself what went wrong."""
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        raise SetupError(f"exit status {status} of {shlex.join(command)}: see its messages above")


class CMakeBuild(build_ext):
    """Lets CMake put the module where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        cmake = find_program("cmake")
        if cmake is None:
            raise SetupError("cmake was not found: pip install cmake")
        plan = plan_cuda(os.environ)
        print(f"fusedshard: {plan.describe()}", flush=True)
        build = Path(self.build_temp).resolve()
        # A cache from before names programs of an isolated build environment that is gone.
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        options = [
            *choose_generator(),
            *plan.cmake_options(),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11_folder()}",
        ]
        run(cmake, "-S", str(ROOT), "-B", str(build), *options)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(len(os.sched_getaffinity(0)))
        run(cmake, "--build", str(build), "--parallel", jobs)


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("fusedshard._C", sources=[])],
        cmdclass={"build_ext": CMakeBuild},
    )
