"""The machine code gate: what nvcc makes of the GPU kernels. Needs no GPU, but nvcc, cuobjdump and
nvdisasm. Run as `pytest tests/machine_code_cases.py`; its name keeps it out of a plain `pytest`.

Where a tool is missing the cases are skipped, or fail with FUSEDSHARD_REQUIRE_MACHINE_CODE=1.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from machine_code import (
    CSRC,
    KIB,
    MULTIPROCESSORS,
    Compiler,
    Kernel,
    configure,
    find_tools,
    occupancy,
    table,
)
from machine_code_rules import CODES, RULES, VECTORS, problems

pytestmark = pytest.mark.build

# What a planted fault calls instead of load() and store() of launch.cuh.
ONE_BY_ONE = """
template <typename T>
__device__ Vector<T> load_each(const T* from) {
  Vector<T> vector;
  for (int k = 0; k < Vector<T>::kWidth; ++k) vector.at[k] = from[k];
  return vector;
}
template <typename T>
__device__ void store_each(T* to, const Vector<T>& vector) {
  auto* bytes = reinterpret_cast<volatile char*>(to);  // else nvcc joins them
  for (int k = 0; k < sizeof(vector); ++k) bytes[k] = reinterpret_cast<const char*>(&vector)[k];
}
"""
FAULTY = """
__global__ void probe_kernel(float* x, int i) {
  float values[96];
  for (int k = 0; k < 96; ++k) values[k] = x[k];
  __syncthreads();
  for (int k = 0; k < 96; ++k) x[k] = values[95 - k];
}
__global__ void added_kernel(float* x, int i) {
  float local[256];
  for (int k = 0; k < i; ++k) local[k * k % 256] = x[k];
  atomicAdd(x, __fmaf_rn(local[i], x[1], __fdividef(x[2], x[3])));
}
"""

Edit = tuple[str, str]
OF_ADAM = {name for name in VECTORS if name.startswith("adam<")}
WITH_MAX = {name for name in OF_ADAM if "max" in name}
OF_MIXED = {name for name in VECTORS if name.startswith("adam_mixed<")}
MIXED, FORMATS = "mixed_cuda.cu", "mixed_formats.cuh"


def give_up(reason: str) -> NoReturn:
    if os.environ.get("FUSEDSHARD_REQUIRE_MACHINE_CODE") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    tools = find_tools()
    if isinstance(tools, str):
        give_up(tools)
    return configure(tools, tmp_path_factory.mktemp("machine_code"))


@pytest.fixture(scope="session")
def kernels(compiler: Compiler) -> list[Kernel]:
    return compiler.compile_all()


def of_architecture(kernels: list[Kernel], architecture: int) -> list[Kernel]:
    chosen = [kernel for kernel in kernels if kernel.architecture == architecture]
    return chosen or give_up(f"needs an nvcc that knows sm_{architecture}")


def test_table(kernels: list[Kernel], capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{table(kernels)}")


@pytest.mark.parametrize("architecture", MULTIPROCESSORS)
def test_every_kernel_is_seen(architecture: int, kernels: list[Kernel]) -> None:
    names = [kernel.name for kernel in of_architecture(kernels, architecture)]
    assert sorted(names) == sorted(VECTORS)


@pytest.mark.parametrize("architecture", MULTIPROCESSORS)
@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str, architecture: int, kernels: list[Kernel]) -> None:
    found = problems(rule, of_architecture(kernels, architecture))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("architecture", "registers", "shared", "share"),
    [
        (80, 64, 0, 4 / 8),
        (80, 65, 0, 3 / 8),
        (80, 32, 40 * KIB, 4 / 8),
        (90, 32, 0, 1),
        (90, 255, 0, 1 / 8),
        (120, 40, 0, 1),
        (120, 80, 0, 3 / 6),
        (120, 81, 0, 2 / 6),
    ],
)
def test_occupancy(architecture: int, registers: int, shared: int, share: float) -> None:
    """As CUDA's occupancy calculator has it."""
    assert occupancy(architecture, registers, shared) == share


# Planted faults, each of which a rule must report.


def plant(
    compiler: Compiler,
    folder: Path,
    source: str,
    *edits: Edit,
    edited: str | None = None,
    without: Sequence[str] = (),
) -> list[Kernel]:
    """The kernels of a file in csrc/, for one architecture, where that or another is edited."""
    copy = shutil.copytree(CSRC, folder / "csrc")
    path = copy / (edited or source)
    text = path.read_text()
    for pattern, replacement in edits:
        text, changes = re.subn(pattern, replacement, text)
        assert changes, pattern
    path.write_text(text.replace("namespace fusedshard {", f"namespace fusedshard {{{ONE_BY_ONE}"))
    output = folder / "planted.o"
    return compiler.compile(copy / source, output, compiler.architectures[:1], without)


def reported(rule: str, kernels: list[Kernel]) -> set[str]:
    return {kernel.name for kernel in kernels if RULES[rule](kernel)}


@pytest.mark.parametrize(
    ("array", "names"),
    [("p", OF_ADAM), ("g", OF_ADAM), ("m", OF_ADAM), ("v", OF_ADAM), ("vmax", WITH_MAX)],
)
def test_planted_scalar_load(
    array: str, names: set[str], compiler: Compiler, tmp_path: Path
) -> None:
    """Of one array of five."""
    edit = (rf"\bload\({array} \+", f"load_each({array} +")
    assert reported("vectors", plant(compiler, tmp_path, "adam_cuda.cu", edit)) == names


@pytest.mark.parametrize(
    ("array", "names"), [("p", OF_ADAM), ("m", OF_ADAM), ("v", OF_ADAM), ("vmax", WITH_MAX)]
)
def test_planted_scalar_store(
    array: str, names: set[str], compiler: Compiler, tmp_path: Path
) -> None:
    edit = (rf"\bstore\({array} \+", f"store_each({array} +")
    assert reported("vectors", plant(compiler, tmp_path, "adam_cuda.cu", edit)) == names


@pytest.mark.parametrize("source", ["reduce_cuda.cu", "pack_cuda.cu"])
@pytest.mark.parametrize("access", ["load", "store"])
def test_planted_scalar_access(
    source: str, access: str, compiler: Compiler, tmp_path: Path
) -> None:
    edit = (rf"\b{access}\(", f"{access}_each(")
    planted = plant(compiler, tmp_path, source, edit)
    at = ("load", "store").index(access)
    names = {kernel.name for kernel in planted if VECTORS[kernel.name][at] > 0}
    assert names <= reported("vectors", planted)


@pytest.mark.parametrize("access", [r"load\(x \+ from\)", r"store\(to \+ from, vector\)"])
@pytest.mark.parametrize(("types", "names"), [("true", OF_MIXED), ("sizeof(T) == 1", set(CODES))])
def test_planted_scalar_access_of_mixed_precision(
    access: str, types: str, names: set[str], compiler: Compiler, tmp_path: Path
) -> None:
    """Of all arrays, and of codes alone."""
    whole = access.replace("\\", "")
    edit = (access, f"{types} ? {whole.replace('(', '_each(', 1)} : {whole}")
    assert reported("vectors", plant(compiler, tmp_path, MIXED, edit, edited=FORMATS)) == names


@pytest.mark.parametrize(("source", "names"), [("adam_cuda.cu", OF_ADAM), (MIXED, OF_MIXED)])
def test_planted_spills(source: str, names: set[str], compiler: Compiler, tmp_path: Path) -> None:
    """Eight blocks a multiprocessor leave a thread half of the registers."""
    edit = (r"__launch_bounds__\(kThreads, \w+\)", "__launch_bounds__(kThreads, 8)")
    assert reported("local memory", plant(compiler, tmp_path, source, edit)) == names


@pytest.mark.parametrize(
    ("source", "contracted"),
    [
        ("adam_cuda.cu", OF_ADAM),
        (MIXED, OF_MIXED),
        ("reduce_cuda.cu", {name for name in VECTORS if "square" in name}),
    ],
)
def test_planted_contraction(
    source: str, contracted: set[str], compiler: Compiler, tmp_path: Path
) -> None:
    planted = plant(compiler, tmp_path, source, without=["-fmad=false"])
    assert {k.name for k in planted if "fma.rn.f" in RULES["arithmetic"](k)} == contracted


def test_planted_scalar_load_of_hashed_words(compiler: Compiler, tmp_path: Path) -> None:
    planted = plant(compiler, tmp_path, "fingerprint_cuda.cu", (r"\bload\(", "load_each("))
    assert reported("vectors", planted) == {"fingerprint_blocks"}


def test_planted_kernels(compiler: Compiler, tmp_path: Path) -> None:
    """One with too many registers, and one with all other faults that no list names."""
    source = tmp_path / "table_cuda.cu"
    source.write_text(FAULTY)
    planted = compiler.compile(source, tmp_path / "planted.o", compiler.architectures[:1])
    assert reported("occupancy", planted) == {"probe"}
    for rule in ("local memory", "vectors", "arithmetic", "atomics"):
        assert reported(rule, planted) == {"added"}, rule
    (added,) = (kernel for kernel in planted if kernel.name == "added")
    assert RULES["arithmetic"](added) == "div.approx.f32, fma.rn.f32"
    assert re.fullmatch(r"(RED|ATOM)\S*, atom\.global\.add\.f32", RULES["atomics"](added))
