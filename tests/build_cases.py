"""The BLD cases: real builds and installs. Run as `pytest tests/build_cases.py`; its name keeps
it out of a plain `pytest`."""

from __future__ import annotations

import ast
import json
import platform
import re
import shutil
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from build_tools import (
    ROOT,
    Build,
    Environment,
    Variables,
    copy_tree,
    make_environment,
    path_without,
    run,
    stand_in_nvcc,
)

pytest_plugins = ("build_tools",)
pytestmark = pytest.mark.build

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
QEMU = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")
needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="about x86-64 processors")

# From 0 with lr = eps = 1 the first update is -g / (g + 1).
STEP = """
import fusedshard, torch
p = torch.nn.Parameter(torch.zeros(3))
p.grad = torch.tensor([1.0, 3.0, 9.0])
fusedshard.AdamW([p], lr=1.0, eps=1.0, weight_decay=0.0).step()
torch.testing.assert_close(p.detach(), torch.tensor([-0.5, -0.75, -0.9]), rtol=0, atol=1e-6)
print("stepped")
"""
# Enough elements for every loop's vector body and tail. Prints a digest of all bits.
DIGEST = """
import hashlib, fusedshard, torch
p = torch.nn.Parameter(torch.arange(1003) / 1003 - 0.5)
optimizer = fusedshard.AdamW([p], lr=0.1, weight_decay=0.1)
for step in range(3):
    p.grad = torch.arange(1003) % (step + 7) - 3.25
    optimizer.step()
bits = p.detach().view(torch.int32).tolist()
print(fusedshard._C.cpu_variant(), hashlib.sha256(str(bits).encode()).hexdigest())
"""
CUDA_BUILD = "import torch, fusedshard; print(fusedshard._C.cuda_build())"


def build_requirements() -> list[str]:
    text = (ROOT / "pyproject.toml").read_text()
    match = re.search(r"^requires = (\[.*\])$", text, re.MULTILINE)
    assert match is not None
    return list(ast.literal_eval(match[1]))


def test_bld_01_no_nvcc(cpu_build: Build, installed: Environment) -> None:
    assert "CUDA part left out: no nvcc was found" in cpu_build.log
    assert "stepped" in installed.execute(STEP)
    assert "no nvcc was found" in installed.execute(CUDA_BUILD)


def test_bld_01_cuda_parameter(installed: Environment) -> None:
    """A fake tensor stands for a CUDA parameter, which a torch without CUDA cannot make."""
    code = """
import fusedshard, torch
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    fusedshard.AdamW([torch.nn.Parameter(torch.zeros(3, device="cuda"))])
"""
    last_line = installed.execute(code, fails=True).splitlines()[-1]
    assert re.search(r"Error: .*cuda:0.*FUSEDSHARD_CUDA=1", last_line), last_line


def test_bld_01_cuda_demanded_without_nvcc(
    setup_py: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_py, "DEFAULT_CUDA_HOME", str(tmp_path))
    with pytest.raises(setup_py.SetupError, match=r"FUSEDSHARD_CUDA=1, but no nvcc.*CUDA_HOME"):
        setup_py.plan_cuda({"FUSEDSHARD_CUDA": "1", "PATH": str(tmp_path)})


@needs_nvcc
def test_bld_02_another_cuda_version(tmp_path: Path, packages: Path) -> None:
    answers = {"--version": "Cuda compilation tools, release 11.8, V11.8.89"}
    cuda_home = stand_in_nvcc(tmp_path / "cuda", answers, f'exec "{NVCC}" "$@"')
    environment = make_environment(tmp_path / "env", packages)
    source = copy_tree(tmp_path / "source")
    variables: Variables = {"CUDA_HOME": cuda_home, "TORCH_CUDA_ARCH_LIST": "9.0"}
    log = environment.install("--no-deps", source, variables=variables)
    assert f"CUDA part built by {cuda_home}/bin/nvcc" in log
    assert "'built': True" in environment.execute(CUDA_BUILD)
    assert "stepped" in environment.execute(STEP)


def old_nvcc(cuda_home: Path, otherwise: str = "exit 1") -> Path:
    """nvcc 11.8 as far as setup.py asks it, with fewer architectures."""
    answers = {
        "--version": "Cuda compilation tools, release 11.8, V11.8.89",
        "--list-gpu-arch": "compute_80\ncompute_90",
    }
    return stand_in_nvcc(cuda_home, answers, otherwise)


def test_bld_02_nvcc_too_old_for_the_architecture(tmp_path: Path) -> None:
    cuda_home = old_nvcc(tmp_path / "cuda")
    environment = make_environment(tmp_path / "env")
    source = copy_tree(tmp_path / "source")
    choices: Variables = {"CUDA_HOME": cuda_home, "TORCH_CUDA_ARCH_LIST": "10.0"}
    log = environment.install("--no-deps", source, fails=True, variables=choices)
    for part in ("nvcc 11.8", f"CUDA_HOME is {cuda_home}", "'100-real'", "FUSEDSHARD_CUDA=0"):
        assert part in log
    assert "Traceback" not in log
    assert "CMake" not in log  # it stopped before


def test_bld_02_host_compiler(setup_py: ModuleType, tmp_path: Path) -> None:
    """An nvcc that refuses the host compiler is found out before CMake starts."""
    refusal = 'echo "unsupported GNU version!"; exit 1'
    cuda_home = old_nvcc(tmp_path / "cuda", refusal)
    with pytest.raises(setup_py.SetupError) as error:
        setup_py.plan_cuda({"CUDA_HOME": str(cuda_home), "CUDAHOSTCXX": "g++"})
    for part in ("nvcc 11.8", f"CUDA_HOME is {cuda_home}", "g++ (", "CUDAHOSTCXX", "unsupported"):
        assert part in str(error.value)


def test_bld_03_isolated_without_torch(tmp_path: Path, sdist: Path, packages: Path) -> None:
    """Also BLD-07: from the unpacked sdist."""
    environment = make_environment(tmp_path / "env")
    environment.execute("import torch", fails=True)
    environment.install("--no-deps", sdist)
    environment.show(packages)
    assert "stepped" in environment.execute(STEP)


def test_bld_03_and_05_not_isolated_without_torch_and_ninja(tmp_path: Path, packages: Path) -> None:
    """Neither torch nor ninja, but make: the build requirements installed by hand."""
    environment = make_environment(tmp_path / "env")
    environment.install(*(name for name in build_requirements() if name != "ninja"))
    source = copy_tree(tmp_path / "source")
    command = ("--no-deps", "--no-build-isolation", source)
    neither = path_without(tmp_path / "neither", "ninja", "make")
    variables: Variables = {"PATH": neither, "FUSEDSHARD_CUDA": "0"}
    log = environment.install(*command, fails=True, variables=variables)
    assert "neither ninja nor make was found: pip install ninja" in log
    make = path_without(tmp_path / "make", "ninja")
    environment.install(*command, variables={**variables, "PATH": make})
    (cache,) = source.glob("build/temp*/CMakeCache.txt")
    assert "CMAKE_GENERATOR:INTERNAL=Unix Makefiles" in cache.read_text()
    environment.show(packages)
    assert "stepped" in environment.execute(STEP)


def test_bld_04_independent_of_torch(installed: Environment) -> None:
    """Another torch release changes nothing, since nothing of torch's is used."""
    assert not re.search(r"torch|c10", installed.dynamic_section, re.IGNORECASE)
    symbols = run("nm", "-DC", installed.extension, cwd=installed.folder)
    assert "PyInit__C" in symbols
    assert not re.search(r"\b(torch|c10|at)::|\bTHP|cuda[A-Z]", symbols)


def test_bld_04_extension_is_an_empty_file(broken: Environment) -> None:
    last_line = broken.execute("import fusedshard", fails=True).splitlines()[-1]
    assert last_line.startswith("ImportError:")
    assert str(broken.extension) in last_line
    assert "pip install --force-reinstall --no-deps" in last_line


@needs_nvcc
@pytest.mark.parametrize(
    ("chosen", "architectures"),
    [(None, None), ("9.0", "90-real")],
)
def test_bld_06_architectures(
    chosen: str | None,
    architectures: str | None,
    tmp_path: Path,
    packages: Path,
    setup_py: ModuleType,
) -> None:
    """No GPU is asked: the list is the variable's, or the documented one, and is printed."""
    if architectures is None:
        nvcc = setup_py.read_nvcc(NVCC, {})
        architectures = " ".join(setup_py.default_architectures(nvcc))
    environment = make_environment(tmp_path / "env", packages)
    choices = {"FUSEDSHARD_CUDA": "1"}
    if chosen is not None:
        choices["TORCH_CUDA_ARCH_LIST"] = chosen
    source = copy_tree(tmp_path / "source")
    log = environment.install("--no-deps", source, variables=choices)
    assert f"for architectures {architectures}\n" in log
    said = environment.execute(CUDA_BUILD)
    assert f"'architectures': '{architectures}'" in said
    assert re.search(r"'runtime_version': [1-9]\d{4}", said)
    assert "libcudart" not in environment.dynamic_section
    assert "stepped" in environment.execute(STEP)


@pytest.mark.parametrize(
    ("variables", "architectures"),
    [
        ({}, ("80-real", "90")),
        ({"TORCH_CUDA_ARCH_LIST": ""}, ("80-real", "90")),
        ({"TORCH_CUDA_ARCH_LIST": "8.0 9.0+PTX"}, ("80-real", "90")),
        ({"TORCH_CUDA_ARCH_LIST": "8.0;9.0a"}, ("80-real", "90a-real")),
        ({"CUDAARCHS": "80;90-virtual", "TORCH_CUDA_ARCH_LIST": "7.0"}, ("80", "90-virtual")),
        ({"CUDAARCHS": "all-major"}, ("all-major",)),
    ],
)
def test_bld_06_architecture_lists(
    variables: dict[str, str],
    architectures: tuple[str, ...],
    setup_py: ModuleType,
    tmp_path: Path,
) -> None:
    cuda_home = old_nvcc(tmp_path / "cuda", "exit 0")
    plan = setup_py.plan_cuda({"CUDA_HOME": str(cuda_home), **variables})
    assert plan.architectures == architectures


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TORCH_CUDA_ARCH_LIST": "Hopper"}, "TORCH_CUDA_ARCH_LIST: got 'Hopper', wanted"),
        ({"CUDAARCHS": "9.0"}, "CUDAARCHS: got '9.0', wanted"),
        ({"TORCH_CUDA_ARCH_LIST": "7.0"}, "got '70-real', wanted one that nvcc 11.8"),
        ({"FUSEDSHARD_CUDA": "yes"}, "FUSEDSHARD_CUDA: got 'yes', wanted 0 or 1"),
        ({"CUDACXX": "no/nvcc"}, "CUDACXX: got 'no/nvcc', wanted"),
    ],
)
def test_bld_06_wrong_choices(
    variables: dict[str, str], message: str, setup_py: ModuleType, tmp_path: Path
) -> None:
    cuda_home = old_nvcc(tmp_path / "cuda", "exit 0")
    with pytest.raises(setup_py.SetupError, match=message):
        setup_py.plan_cuda({"CUDA_HOME": str(cuda_home), **variables})


def test_bld_07_sdist_is_complete(sdist: Path, tmp_path: Path) -> None:
    checkout = copy_tree(tmp_path / "source")
    in_git_only = {".gitignore"}
    wanted = {str(file.relative_to(checkout)) for file in checkout.rglob("*") if file.is_file()}
    packed = {str(file.relative_to(sdist)) for file in sdist.rglob("*") if file.is_file()}
    assert wanted - packed <= in_git_only
    assert any(name.endswith(".cu") for name in packed)


def test_bld_07_wheel_has_no_sources(cpu_build: Build) -> None:
    names = zipfile.ZipFile(cpu_build.wheel).namelist()
    unwanted = re.compile(r"\.(h|cuh|cpp|cu|txt\.in)$|^(csrc|tests|benchmarks)/|CMakeLists")
    assert [name for name in names if unwanted.search(name)] == []
    assert {"fusedshard/_C.pyi", "fusedshard/py.typed"} < set(names)


def test_bld_08_blanks_and_accents(tmp_path: Path, packages: Path) -> None:
    folder = tmp_path / "a b" / "é c"
    (folder / "tmp").mkdir(parents=True)
    environment = make_environment(folder / "env", packages)
    source = copy_tree(folder / "source")
    variables: Variables = {"TMPDIR": folder / "tmp", "TORCH_CUDA_ARCH_LIST": "9.0"}
    environment.install("--no-deps", source, variables=variables)
    assert "stepped" in environment.execute(STEP, variables)


def test_bld_09_import_order(installed: Environment) -> None:
    code = "import fusedshard; import torch; print(torch.ones(2).sum(), fusedshard.AdamW)"
    assert "tensor(2.)" in installed.execute(code)


def test_bld_09_ranks_import_together(installed: Environment, tmp_path: Path) -> None:
    """With nothing cached, and nothing compiled or cached by them."""
    code = f"""
import os, subprocess, sys
step = {STEP!r}
ranks = [subprocess.Popen([sys.executable, "-B", "-c", step]) for _ in range(4)]
assert [rank.wait(120) for rank in ranks] == [0, 0, 0, 0]
"""
    caches = ("HOME", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR")
    before = sorted(installed.site.glob("fusedshard/*"))
    assert installed.execute(code, dict.fromkeys(caches, tmp_path)).count("stepped") == 4
    assert list(tmp_path.iterdir()) == []
    assert sorted(installed.site.glob("fusedshard/*")) == before


def test_bld_10_failed_load(broken: Environment) -> None:
    code = """
import torch
def train():
    import fusedshard
    optimizer = fusedshard.AdamW([torch.nn.Parameter(torch.zeros(3))])
    optimizer.step()
train()
"""
    printed = broken.execute(code, fails=True)
    assert printed.splitlines()[-1].startswith("ImportError:")
    assert "Exception ignored" not in printed
    assert "AttributeError" not in printed


def _compile_commands(cpu_build: Build) -> dict[str, str]:
    """Command line by object file."""
    commands = json.loads((cpu_build.cmake / "compile_commands.json").read_text())
    return {entry["output"]: entry["command"] for entry in commands}


@needs_x86
def test_bld_11_wide_code_only_in_its_variants(cpu_build: Build) -> None:
    commands = _compile_commands(cpu_build)
    assert len(commands) > 4
    for output, command in commands.items():
        assert not re.search(r"-march=|-mtune=native|-ffast-math|-Ofast|-mfma\b", command)
        path = cpu_build.cmake / output
        wide = re.search(r"cpu_(avx2|avx512)\.dir", output)
        assert bool(wide) == ("-mavx" in command)
        if wide:
            # A function that the linker may share with other objects would carry AVX into them.
            shared = run("nm", "--extern-only", "--defined-only", path, cwd=ROOT)
            names = [line.split()[-1] for line in shared.splitlines()]
            assert [n for n in names if "cpu_kernels" not in n and "DW.ref" not in n] == []
        else:
            code = run("objdump", "-d", "--no-show-raw-insn", path, cwd=ROOT)
            assert re.search(r"\tmov", code)
            assert re.findall(r"\tv[a-z0-9]+ .*%[xyz]mm", code) == []


def test_bld_11_same_bits_from_the_baseline(installed: Environment) -> None:
    chosen, digest = installed.execute(DIGEST).split()
    assert installed.execute(DIGEST, {"FUSEDSHARD_CPU_ISA": "baseline"}).split() == [
        "baseline",
        digest,
    ]
    assert chosen != "baseline" or platform.machine() != "x86_64"


@needs_x86
@pytest.mark.skipif(QEMU is None, reason="needs qemu-user, to emulate a processor without AVX")
def test_bld_11_emulated_processor(installed: Environment) -> None:
    # OPENBLAS_CORETYPE, where set, names the real processor to numpy.
    emulator = ("env", "-u", "OPENBLAS_CORETYPE", str(QEMU), "-cpu", "Nehalem")
    printed = run(*emulator, installed.python, "-c", DIGEST, cwd=installed.folder)
    digest = installed.execute(DIGEST).split()[1]
    assert printed.split()[-2:] == ["baseline", digest]


def test_editable_install(tmp_path: Path, packages: Path) -> None:
    environment = make_environment(tmp_path / "env", packages)
    source = copy_tree(tmp_path / "source")
    variables = {"FUSEDSHARD_CUDA": "0"}
    environment.install("--no-deps", "--editable", source, variables=variables)
    assert str(source) in environment.execute("import fusedshard; print(fusedshard.__file__)")
    assert "stepped" in environment.execute(STEP)


def test_stub_names_what_the_module_has(installed: Environment) -> None:
    tree = ast.parse((ROOT / "fusedshard/_C.pyi").read_text())
    kinds = (ast.FunctionDef, ast.ClassDef)
    stub = {node.name for node in tree.body if isinstance(node, kinds)}
    constants = [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    stub |= {target.id for target in constants if isinstance(target, ast.Name)} - {"cuda"}
    names = installed.execute("import torch, fusedshard._C as C; print(*dir(C))").split()
    assert {n for n in names if n[0] != "_"} == {n for n in stub if n[0] != "_"}
