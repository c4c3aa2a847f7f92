"""The GPU machine code that a build gives.

Compiles csrc/*_cuda.cu with the options that CMakeLists.txt gives, taken from a configured build,
and reads ptxas' report, the machine code (SASS) and the PTX. Needs no GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from build_tools import ROOT, run

CSRC = ROOT / "csrc"
THREADS = 256  # of a block: kThreads of launch.cuh
KIB = 1024

# A kernel as the tools name it: mangled, and for 90 if for compute capability 9.0.
Key = tuple[str, int]
Opcodes = Mapping[str, int]


@dataclass(frozen=True)
class Multiprocessor:
    """What one holds at most."""

    threads: int
    blocks: int
    shared: int  # bytes


MULTIPROCESSORS = {
    80: Multiprocessor(2048, 32, 164 * KIB),
    90: Multiprocessor(2048, 32, 228 * KIB),
    100: Multiprocessor(2048, 32, 228 * KIB),
    120: Multiprocessor(1536, 24, 100 * KIB),
}

# What `true` for a kernel's template argument means.
FLAGS = {"adam": "max", "adam_mixed": "max", "partial_sums": "square"}


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of a kernel: registers of a thread, and bytes."""

    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class Kernel:
    name: str
    architecture: int
    resources: Resources
    sass: Opcodes = field(repr=False)
    ptx: Opcodes = field(repr=False)

    @property
    def loads(self) -> int:
        """Instructions that load 16 bytes or more from global memory."""
        return self.accesses("LD", "128|256")

    @property
    def stores(self) -> int:
        return self.accesses("ST", "128|256")

    def accesses(self, kind: str, bits: str) -> int:
        return count(self.sass, rf"{kind}G?\.(\w+\.)*({bits})(\.\w+)*")

    @property
    def occupancy(self) -> float:
        return occupancy(self.architecture, self.resources.registers, self.resources.shared)


def count(opcodes: Opcodes, pattern: str) -> int:
    return sum(number for opcode, number in opcodes.items() if re.fullmatch(pattern, opcode))


def occupancy(architecture: int, registers: int, shared: int) -> float:
    """Share of a multiprocessor's threads that can be resident at once.

    A warp takes registers by 256, and its multiprocessor's four parts hold 16 K each. A block
    takes shared memory by 128 bytes, after 1 KiB for the system.
    """
    limits = MULTIPROCESSORS[architecture]
    of_warp = -(-registers * 32 // 256) * 256
    warps = 4 * (16 * KIB // of_warp)
    of_block = KIB + -(-shared // 128) * 128
    fit = (warps * 32 // THREADS, limits.shared // of_block, limits.threads // THREADS)
    return min(*fit, limits.blocks) * THREADS / limits.threads


# What the tools print.


def read_report(text: str) -> dict[Key, Resources]:
    """Of ptxas -v."""
    pattern = re.compile(
        r"Compiling entry function '(\w+)' for 'sm_(\d+)\w*'.*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers([^\n]*)",
        re.DOTALL,
    )
    found = {}
    for mangled, architecture, stack, stores, loads, registers, rest in pattern.findall(text):
        smem = re.search(r"(\d+) bytes smem", rest)
        shared = int(smem[1]) if smem else 0
        numbers = (int(registers), shared, int(stack), int(stores), int(loads))
        found[mangled, int(architecture)] = Resources(*numbers)
    return found


def by_kernel(text: str, head: str, opcode: re.Pattern[str]) -> dict[Key, Opcodes]:
    """Opcodes of each kernel in what cuobjdump prints; `head` matches the start of one.

    What stands before the first kernel of an architecture are functions that any of them may call:
    it counts for all.
    """
    found: dict[Key, Opcodes] = {}
    for section in re.split(r"^Fatbin ", text, flags=re.MULTILINE):
        architecture = re.search(r"^arch = sm_(\d+)", section, re.MULTILINE)
        if architecture is None:
            continue
        common, *parts = re.split(head, section)
        for mangled, body in zip(parts[::2], parts[1::2], strict=True):
            found[mangled, int(architecture[1])] = Counter(opcode.findall(common + body))
    return found


def read_sass(text: str) -> dict[Key, Opcodes]:
    opcode = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
    return by_kernel(text, r"Function : (\w+)", opcode)


def read_ptx(text: str) -> dict[Key, Opcodes]:
    # An opcode has a type or another suffix; directives begin with a dot, registers with "%".
    opcode = re.compile(r"(?<![\w.%$])[a-z]\w*(?:\.[\w:]+)+")
    return by_kernel(text, r"\.entry\s+(\w+)", opcode)


def short_name(demangled: str) -> str:
    """`adam<float, max>` for "void ...::adam_kernel<float, true>(...)"."""
    match = re.search(r"(\w+)_kernel(?:<(.*?)>)?\(", demangled)
    if match is None:
        return demangled
    arguments = [part.strip().removeprefix("fusedshard::") for part in (match[2] or "").split(",")]
    kept = [FLAGS.get(match[1], part) if part == "true" else part for part in arguments]
    listed = ", ".join(part for part in kept if part not in ("", "false"))
    return f"{match[1]}<{listed}>" if listed else match[1]


# The tools.


def find_tool(name: str) -> Path | None:
    """By CUDA_HOME, on PATH, beside nvcc, in the default toolkit, or in a package from PyPI."""
    path = os.environ.get("PATH", os.defpath)
    if home := os.environ.get("CUDA_HOME"):
        path = f"{home}/bin{os.pathsep}{path}"
    nvcc = shutil.which("nvcc", path=path)
    beside = [Path(nvcc).resolve().parent] if nvcc else []
    packaged = [folder for place in sys.path for folder in Path(place).glob("nvidia/*/bin")]
    others = (*beside, "/usr/local/cuda/bin", sysconfig.get_path("scripts"), *packaged)
    found = shutil.which(name, path=os.pathsep.join([path, *map(str, others)]))
    return Path(found) if found else None


@dataclass(frozen=True)
class Tools:
    nvcc: Path
    cuobjdump: Path
    nvdisasm: Path  # cuobjdump runs it
    cmake: Path
    demangle: Path


def find_tools() -> Tools | str:
    """All of them, or what is missing."""
    if importlib.util.find_spec("pybind11") is None:
        return "needs pybind11"
    found = []
    for name in ("nvcc", "cuobjdump", "nvdisasm", "cmake", "c++filt"):
        path = find_tool(name)
        if path is None:
            return f"needs {name}"
        found.append(path)
    return Tools(*found)


@dataclass(frozen=True)
class Compiler:
    """Compiles as the build configured in a folder would."""

    tools: Tools
    folder: Path
    commands: Mapping[str, list[str]] = field(repr=False)  # by name of the source file
    architectures: tuple[int, ...]

    def command(self, source: Path, output: Path, architectures: Collection[int]) -> list[str]:
        """The build's for a file of that name, with fewer architectures."""
        command = list(self.commands[source.name])
        command[command.index("-c") + 1] = str(source)
        command[command.index("-o") + 1] = str(output)
        unwanted = tuple(
            f"--generate-code=arch=compute_{number},"
            for number in set(self.architectures) - set(architectures)
        )
        return [part for part in command if not part.startswith(unwanted)]

    def compile(
        self,
        source: Path,
        output: Path,
        architectures: Collection[int] = (),
        without: Collection[str] = (),
    ) -> list[Kernel]:
        """Kernels of a file, for all architectures or some, without some of the options."""
        command = self.command(source, output, architectures or self.architectures)
        assert set(without) <= set(command)
        command = [part for part in command if part not in without]
        report = read_report(run(*command, "-Xptxas", "-v", cwd=self.folder))
        sass, ptx = read_sass(self.dump("-sass", output)), read_ptx(self.dump("-ptx", output))
        assert report and report.keys() == sass.keys() == ptx.keys(), (report, sass, ptx)
        return [
            Kernel(
                self.name(mangled), number, resources, sass[mangled, number], ptx[mangled, number]
            )
            for (mangled, number), resources in report.items()
        ]

    def dump(self, what: str, output: Path) -> str:
        path = f"{self.tools.nvdisasm.parent}{os.pathsep}{os.environ['PATH']}"
        return run(self.tools.cuobjdump, what, output, cwd=self.folder, variables={"PATH": path})

    def name(self, mangled: str) -> str:
        return short_name(run(self.tools.demangle, mangled, cwd=self.folder))

    def compile_all(self) -> list[Kernel]:
        sources = sorted(CSRC.glob("*_cuda.cu"))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            outputs = [self.folder / f"{source.stem}.o" for source in sources]
            kernels = [
                kernel for part in pool.map(self.compile, sources, outputs) for kernel in part
            ]
        return sorted(kernels, key=lambda kernel: (kernel.architecture, kernel.name))


def configure(tools: Tools, folder: Path) -> Compiler:
    """Configures a build for those of MULTIPROCESSORS that nvcc knows, with the PTX of each."""
    import pybind11

    listed = run(tools.nvcc, "--list-gpu-arch", cwd=folder)
    known = {int(number) for number in re.findall(r"compute_(\d+)\b", listed)}
    architectures = tuple(number for number in MULTIPROCESSORS if number in known)
    options = [
        "-DFUSEDSHARD_CUDA=ON",
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DCMAKE_CUDA_COMPILER={tools.nvcc}",
        f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(map(str, architectures))}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
    ]
    ninja = find_tool("ninja")
    if ninja is not None:
        options += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    run(tools.cmake, "-S", ROOT, "-B", folder, *options, cwd=folder)
    entries = json.loads((folder / "compile_commands.json").read_text())
    commands = {Path(entry["file"]).name: shlex.split(entry["command"]) for entry in entries}
    return Compiler(tools, folder, commands, architectures)


def table(kernels: Iterable[Kernel]) -> str:
    columns = ("sm", "registers", "spilled bytes", "occupancy", "16-byte loads", "stores")
    widths = [len(column) + 2 for column in columns]
    lines = [f"{'kernel':36}" + "".join(f"{c:>{w}}" for c, w in zip(columns, widths, strict=True))]
    for kernel in kernels:
        found = kernel.resources
        spilled = found.spill_stores + found.spill_loads
        share = f"{kernel.occupancy:.0%}"
        cells = (kernel.architecture, found.registers, spilled, share, kernel.loads, kernel.stores)
        row = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        lines.append(f"{kernel.name:36}{row}")
    return "\n".join(lines)
