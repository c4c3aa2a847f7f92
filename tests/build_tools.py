"""What the BLD cases build and install with, and what they share: a pytest plugin.

An environment sees the torch of the running one and nothing else of it.

PYTEST_DONT_REWRITE: the cases import it before pytest takes it for a plugin.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Would steer a build or its imports.
STEERING = {"CUDACXX", "CUDA_HOME", "CUDAARCHS", "TORCH_CUDA_ARCH_LIST", "CUDAHOSTCXX"}
STEERING |= {"FUSEDSHARD_CUDA", "FUSEDSHARD_CPU_ISA", "PYTHONPATH"}

Variables = Mapping[str, str | Path]
NO_VARIABLES: Variables = {}


def run(
    *command: str | Path, cwd: Path, variables: Variables = NO_VARIABLES, fails: bool = False
) -> str:
    """Output and errors of a program, which must end with status 0, or fail if `fails`.

    It sees the running environment's variables without STEERING, and `variables`.
    """
    kept = {name: value for name, value in os.environ.items() if name not in STEERING}
    chosen = {name: str(value) for name, value in variables.items()}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, "PYTHONNOUSERSITE": "1", **chosen},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    # A negative status is a crash, never an expected failure.
    assert result.returncode > 0 if fails else result.returncode == 0, result.stdout
    return result.stdout


@dataclass(frozen=True)
class Environment:
    """A virtual environment."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    @property
    def site(self) -> Path:
        (site,) = self.folder.glob("lib/python*/site-packages")
        return site

    @property
    def extension(self) -> Path:
        (path,) = self.site.glob("fusedshard/_C*.so")
        return path

    @property
    def dynamic_section(self) -> str:
        return run("readelf", "--dynamic", self.extension, cwd=self.folder)

    def install(
        self, *arguments: str | Path, variables: Variables = NO_VARIABLES, fails: bool = False
    ) -> str:
        """`pip install -v`, by the running environment's pip for this one, which has none."""
        pip = (sys.executable, "-m", "pip", "--python", self.python, "install", "-v")
        return run(*pip, *arguments, cwd=self.folder, variables=variables, fails=fails)

    def execute(self, code: str, variables: Variables = NO_VARIABLES, fails: bool = False) -> str:
        """Runs Python code where the current folder is not the source tree."""
        command = (self.python, "-c", code)
        return run(*command, cwd=self.folder, variables=variables, fails=fails)

    def show(self, packages: Path) -> None:
        """Makes a folder of packages importable, behind what is installed here."""
        (self.site / "shown.pth").write_text(f"{packages}\n", encoding="utf-8")


def make_environment(folder: Path, packages: Path | None = None) -> Environment:
    """A new virtual environment without pip, from which `packages` can be imported."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=ROOT)
    environment = Environment(folder)
    if packages is not None:
        environment.show(packages)
    return environment


def link_torch(folder: Path) -> Path:
    """Fills a folder with links to torch and what it requires, and to nothing else that the
    running environment has installed."""
    names, done = ["torch", "numpy"], set()
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in done:
            continue
        done.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform, or an extra
        record = (distribution.read_text("RECORD") or "").splitlines()
        for top in {re.split("[/,]", line)[0] for line in record} - {"..", "__pycache__"}:
            (folder / top).symlink_to(str(distribution.locate_file(top)))
        names += [re.split(r"[^\w.-]", required)[0] for required in distribution.requires or ()]
    return folder


def copy_tree(target: Path) -> Path:
    """The source tree as a fresh checkout has it."""
    made = ("build", "dist", "*.egg-info", "__pycache__", "*.so", "demo-report")
    hidden = (".git", ".venv*", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*made, *hidden))
    return target


def path_without(folder: Path, *names: str) -> Path:
    """A folder of links to every program on PATH but the named ones."""
    folder.mkdir()
    places = [Path(place) for place in os.environ["PATH"].split(os.pathsep)]
    for place in filter(Path.is_dir, places):
        for program in place.iterdir():
            link = folder / program.name
            if program.name not in names and not link.is_symlink():
                link.symlink_to(program)
    return folder


def stand_in_nvcc(cuda_home: Path, answers: Mapping[str, str], otherwise: str) -> Path:
    """A CUDA_HOME with an nvcc that prints an answer to each of some command lines and runs the
    shell command `otherwise` for all else."""
    nvcc = cuda_home / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    cases = "".join(f"  {line}) echo '{answer}' ;;\n" for line, answer in answers.items())
    nvcc.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}  *) {otherwise} ;;\nesac\n')
    nvcc.chmod(0o755)
    return cuda_home


@dataclass(frozen=True)
class Build:
    """A wheel, and what its build printed and left."""

    wheel: Path
    log: str
    cmake: Path


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds torch and what it requires."""
    return link_torch(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="session")
def cpu_build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Built by pip, isolated, on a machine without nvcc as far as the build can see."""
    folder = tmp_path_factory.mktemp("cpu")
    source = copy_tree(folder / "source")
    text = (source / "setup.py").read_text()
    assert '"/usr/local/cuda"' in text
    (source / "setup.py").write_text(text.replace('"/usr/local/cuda"', '"/nonexistent"'))
    command = (sys.executable, "-m", "pip", "-v", "wheel", "--no-deps", "-w", folder, source)
    log = run(*command, cwd=folder, variables={"PATH": path_without(folder / "bin", "nvcc")})
    (wheel,) = folder.glob("*.whl")
    (cmake,) = source.glob("build/temp*")
    return Build(wheel, log, cmake)


@pytest.fixture(scope="session")
def installed(
    tmp_path_factory: pytest.TempPathFactory, cpu_build: Build, packages: Path
) -> Environment:
    """That build in an environment, for cases that leave it as it is."""
    environment = make_environment(tmp_path_factory.mktemp("installed") / "env", packages)
    environment.install("--no-deps", cpu_build.wheel)
    return environment


@pytest.fixture
def broken(tmp_path: Path, cpu_build: Build, packages: Path) -> Environment:
    """That build in an environment, with an empty file for the extension."""
    environment = make_environment(tmp_path / "env", packages)
    environment.install("--no-deps", cpu_build.wheel)
    environment.extension.write_bytes(b"")
    return environment


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked in a folder that is no git checkout."""
    folder = tmp_path_factory.mktemp("sdist")
    source = copy_tree(folder / "source")
    command = (sys.executable, "-m", "build", "--sdist", "--outdir", folder, source)
    run(*command, cwd=folder)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="session")
def setup_py() -> ModuleType:
    """setup.py's functions; setup() itself does not run."""
    spec = importlib.util.spec_from_file_location("setup_py", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
