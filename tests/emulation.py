"""Builds the CUDA kernels for the emulated devices of cuda_emulation/, where no GPU is.

`build` makes the Python module fusedshard_emulated, which has the functions of fusedshard._C.cuda;
`build_driver` a program that compares the kernels of one source with the CPU's.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from cuda_emulation.rewrite import rewritten

ROOT = Path(__file__).resolve().parents[1]
EMULATION = ROOT / "tests/cuda_emulation"
MODULE = "fusedshard_emulated"
SEED = "FUSEDSHARD_EMULATION_SEED"

# A text to replace in a source: file name, old text (which must be there once), new text.
Change = tuple[str, str, str]

KERNELS = ("adam", "mixed", "reduce", "pack", "table", "fingerprint")
CPU_KERNELS = ("dispatch_cpu.cpp", "kernels_cpu.cpp", "pack_cpu.cpp")
DEVICES = ("block.cpp", "fiber.cpp", "runtime.cpp")

ARITHMETIC = ("-ffp-contract=off", "-fno-math-errno")  # as the real build's
OPTIONS = ("-std=c++17", "-O1", "-g", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing")
# No OpenMP thread is ever started, but the CPU kernels call its functions.
CPU_OPTIONS = ("-fopenmp", "-DFUSEDSHARD_ISA=baseline")
ARCHITECTURES = ('-DFUSEDSHARD_CUDA_ARCHITECTURES="90-real"',)
SANITIZE: Mapping[str | None, tuple[str, ...]] = {
    None: (),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}
# fiber.cpp says why it is not instrumented for threads.
DEVICE_OPTIONS = {**SANITIZE, "thread": ("-DEMULATION_TSAN",)}


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "g++")


def _run(command: Sequence[object], cwd: Path) -> None:
    parts = [str(part) for part in command]
    result = subprocess.run(parts, cwd=cwd, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{shlex.join(parts)}\n{result.stdout}{result.stderr}")


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _texts(changes: Sequence[Change]) -> dict[str, str]:
    """What the compiler is given, by file name."""
    patterns = ("csrc/*.[ch]*", "tests/cuda_emulation/*.[ch]*", "tests/cuda_emulation/include/*.h")
    texts = {}
    for path in (path for pattern in patterns for path in ROOT.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        for _, old, new in (change for change in changes if change[0] == path.name):
            if text.count(old) != 1:
                raise ValueError(f"{path.name} has {old!r} {text.count(old)} times, not once")
            text = text.replace(old, new)
        cuda = path.suffix in (".cu", ".cuh")
        texts[path.name] = rewritten(text, path) if cuda else f'#line 1 "{path}"\n{text}'
    if unknown := {change[0] for change in changes} - texts.keys():
        raise ValueError(f"no such source: {unknown}")
    return texts


@dataclass(frozen=True)
class _Compile:
    """A source file, and the options to compile it with beside OPTIONS."""

    source: str
    options: tuple[str, ...]


class _Builder:
    """Compiles and links copies of the sources in a folder, and nothing twice there: objects and
    programs carry a digest of all that went into them in their names."""

    def __init__(self, folder: Path, changes: Sequence[Change]) -> None:
        self.texts = _texts(changes)
        self.folder = folder.resolve()
        self.sources = self.folder / f"sources-{_digest(self.texts)}"
        self.sources.mkdir(parents=True, exist_ok=True)
        for name, text in self.texts.items():
            (self.sources / name).write_text(text, encoding="utf-8")

    def _included(self, name: str) -> dict[str, str]:
        """The text of a source and of all of ours that it includes."""
        found, names = {}, [name]
        while names:
            name = names.pop()
            if name in self.texts and name not in found:
                found[name] = self.texts[name]
                names += re.findall(r'#include ["<]([^">]+)[">]', found[name])
        return found

    def _compile(self, part: _Compile) -> Path:
        command = [*compiler(), *OPTIONS, *ARITHMETIC, *part.options, "-I."]
        included = sorted(self._included(part.source).items())
        target = self.folder / f"{part.source}-{_digest(command, included)}.o"
        if not target.exists():
            made = target.with_suffix(f".{os.getpid()}")
            _run([*command, "-x", "c++", "-c", part.source, "-o", made], self.sources)
            made.replace(target)  # whole or not there, should the compiler be interrupted
        return target

    def link(self, parts: Sequence[_Compile], name: str, *options: str, suffix: str = "") -> Path:
        with ThreadPoolExecutor(2) as compilers:
            objects = list(compilers.map(self._compile, parts))
        target = self.folder / f"{name}-{_digest(objects, options)}{suffix}"
        if not target.exists():
            _run([*compiler(), *options, *objects, "-o", target], self.folder)
        return target


def _devices(sanitizer: str | None) -> list[_Compile]:
    return [_Compile(source, DEVICE_OPTIONS[sanitizer]) for source in DEVICES]


def build(folder: Path, sanitizer: str | None = None, changes: Sequence[Change] = ()) -> Path:
    """The extension module; `preload` says what a process needs to load a sanitized one.

    What a former call left in the folder is used again where it fits.

    Args:
        sanitizer: None, "address" (and undefined behaviour) or "thread".
        changes: replacements in the copied sources.
    """
    import pybind11

    includes = (sysconfig.get_path("include"), pybind11.get_include())
    # Templates without end, of which nothing is looked for in a debugger: half the time.
    python = ("-O0", "-g0", *(f"-I{path}" for path in includes))
    sanitize = SANITIZE[sanitizer]
    parts = [_Compile(source, python) for source in ("module.cpp", "bindings_cuda.cpp")]
    parts += [_Compile(f"{kernel}_cuda.cu", sanitize) for kernel in KERNELS]
    parts += [_Compile("device_cuda.cu", (*sanitize, *ARCHITECTURES))]
    parts += _devices(sanitizer)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return _Builder(folder, changes).link(parts, MODULE, "-shared", *sanitize, suffix=suffix)


def build_driver(
    folder: Path, kernel: str, sanitizer: str | None = None, changes: Sequence[Change] = ()
) -> Path:
    """The program that runs one of KERNELS; otherwise as `build`."""
    sanitize = SANITIZE[sanitizer]
    names = ("drive_main.cpp", f"drive_{kernel}.cpp", f"{kernel}_cuda.cu")
    parts = [_Compile(name, sanitize) for name in names] + _devices(sanitizer)
    parts += [_Compile(source, CPU_OPTIONS) for source in CPU_KERNELS]
    return _Builder(folder, changes).link(parts, f"drive_{kernel}", "-fopenmp", *sanitize)


def _library(name: str) -> str:
    """A library that comes with the compiler."""
    command = [*compiler(), f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(path):
        raise RuntimeError(f"{compiler()[0]} has no {name}")
    return path


def preload(sanitizer: str | None) -> dict[str, str]:
    """Environment variables of a Python process that imports torch and a sanitized module.

    A finding ends it, or with "thread" lets it end with status 66.
    """
    if sanitizer == "address":
        # libstdc++ too: libasan looks for its __cxa_throw when it is loaded, before Python loads
        # any C++. Python and torch leave memory behind when they end.
        libraries = f"{_library('libasan.so')} {_library('libstdc++.so')}"
        return {"LD_PRELOAD": libraries, "ASAN_OPTIONS": "detect_leaks=0"}
    if sanitizer == "thread":
        # It does not see how OpenMP's threads wait for each other, which is not instrumented.
        return {"LD_PRELOAD": _library("libtsan.so"), "OMP_NUM_THREADS": "1"}
    return {}


def prefix(sanitizer: str | None) -> list[str]:
    """What a command that runs a sanitized program has to begin with.

    ThreadSanitizer does not start where the kernel spreads addresses further than it expects.
    """
    if sanitizer != "thread" or shutil.which("setarch") is None:
        return []
    command = ["setarch", "--addr-no-randomize"]
    allowed = subprocess.run([*command, "true"], capture_output=True, check=False)
    return command if allowed.returncode == 0 else []


def run(
    *command: str | Path, sanitizer: str | None, seed: int | None = None, preloaded: bool = False
) -> tuple[int, str]:
    """Status and output of a sanitized program, or with `preloaded` of one that loads a module.

    Args:
        seed: of the order in which the threads of a block run; None for their natural order.
    """
    variables = preload(sanitizer) if preloaded else {"FUSEDSHARD_CPU_ISA": "baseline"}
    result = subprocess.run(
        [*prefix(sanitizer), *map(str, command)],
        env={**os.environ, **variables, SEED: "" if seed is None else str(seed)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return result.returncode, result.stdout


def load(path: Path) -> ModuleType:
    """The module that `build` made."""
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)
    return module
