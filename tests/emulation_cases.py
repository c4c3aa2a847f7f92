"""The CUDA kernels on emulated devices: they compare with the CPU's to the bit, also under
sanitizers, and faults that are planted in them are found. Run as `pytest
tests/emulation_cases.py`; its name keeps it out of a plain `pytest`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import emulation
import pytest
import torch

pytestmark = pytest.mark.build

ORDERS = (None, 1, 2)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all builds, so that they share what they have in common."""
    return tmp_path_factory.mktemp("emulation")


@pytest.mark.parametrize("seed", ORDERS)
@pytest.mark.parametrize("kernel", emulation.KERNELS)
@pytest.mark.parametrize("sanitizer", emulation.SANITIZE)
def test_kernels_against_the_cpu(
    folder: Path, sanitizer: str | None, kernel: str, seed: int | None
) -> None:
    program = emulation.build_driver(folder, kernel, sanitizer)
    status, output = emulation.run(program, sanitizer=sanitizer, seed=seed)
    assert status == 0, output


@dataclass(frozen=True)
class Fault:
    """A change that makes a driver fail with a message that has `expected` in it."""

    kernel: str
    change: emulation.Change
    expected: str
    sanitizer: str | None = None
    seed: int | None = None


LAUNCH, TILES, REDUCE = "launch.cuh", "adam_tiles.cuh", "reduce_cuda.cu"
HASHES = "fingerprint_cuda.cu"
MIXED, FORMATS = "mixed_cuda.cu", "mixed_formats.cuh"
VECTORS = (LAUNCH, "i < span.tail;", "i <= span.tail;")
NO_TAIL = (LAUNCH, "(span.end - span.tail)", "0")
NO_LEAD = (LAUNCH, "static_cast<int64_t>((kVectorBytes - past) / sizeof(T))", "0")
BEFORE = (TILES, "__syncthreads();  // the others may still read the last segment's", "")
AFTER = (TILES, "__syncthreads();\n    }", "}")
TWO_BARRIERS = "if (threadIdx.x < 128) __syncthreads();\n else __syncthreads();\n }"
SOME_THREADS = (REDUCE, "if (__syncthreads_or(", "if (threadIdx.x < 200 && __syncthreads_or(")
SHUFFLE = "sums[k] += __shfl_down_sync(0xffffffffu, sums[k], half);"
NEARER = (REDUCE, SHUFFLE, SHUFFLE.replace("half", "half / 2"))
NO_LAST_LANE = (REDUCE, SHUFFLE, SHUFFLE.replace("0xf", "0x7"))
HALF_A_WARP = (REDUCE, SHUFFLE, f"if (lane < 16) {SHUFFLE}")
LANES = "for (int lanes = kBlockThreads / 2; lanes > 0; lanes /= 2) {\n    "
WHOLE_WARP = LANES.replace("kBlockThreads", "kWarp")
MIXED_SHUFFLE = "const int32_t other = __shfl_xor_sync(0xffffffffu, largest, lanes);"
CHECK_SHUFFLE = "sum += __shfl_xor_sync(0xffffffffu, sum, lanes);"
EXPONENT_OF_WARP = (FORMATS, LANES + MIXED_SHUFFLE, WHOLE_WARP + MIXED_SHUFFLE)
CHECK_OF_WARP = (FORMATS, LANES + CHECK_SHUFFLE, WHOLE_WARP + CHECK_SHUFFLE)
CHECK_ALONE = (
    FORMATS,
    LANES + CHECK_SHUFFLE,
    LANES.replace("lanes > 0", "lanes > 1") + CHECK_SHUFFLE,
)
ALWAYS_VALID = (FORMATS, "valid ? rest.at[k] : int16_t{0}", "rest.at[k]")
NO_CHECK_BARRIER = (FORMATS, "__syncwarp();  // the others may still read the last check", "")
BEHIND_A_TAIL = (FORMATS, "if (k >= place.present()) param.at[k].bits = 0;", "")
ALONE = (FORMATS, MIXED_SHUFFLE, f"if (largest == 0) continue; {MIXED_SHUFFLE}")
LEAVE = (MIXED, "place.in_segment - lane * kEach >=", "place.in_segment >=")
NO_WARP_BARRIER = (FORMATS, "__syncwarp();  // the others may still read the last exponent", "")
NO_MIXED_TAIL = (FORMATS, "if (present >= kEach) {", "if (present > 0) {")
ANYWHERE = (FORMATS, "aligned(from)", "true")
UNALIGNED_WORDS = (HASHES, "row.address % kVectorBytes == 0", "true")
UNALIGNED_UNITS = (HASHES, "row.address % sizeof(uint32_t) == 0", "true")
BEHIND_THE_END = (HASHES, "if (at >= present) break;", "")
SUMS_IN_USE = (
    HASHES,
    "__syncthreads();  // the first thread may still read the last sums",
    "",
)
FIRST_SUMS = (HASHES, "for (int warp = 0; warp < kWarps;", "for (int warp = 0; warp < 1;")
OTHER_WORDS = (FORMATS, "random_words(key, first / 2 + k / 2)", "random_words(key, first / 2)")

FAULTS = {
    "pack: a vector too many": Fault("pack", VECTORS, "heap-buffer-overflow", "address"),
    "adam: a vector too many": Fault("adam", VECTORS, "heap-buffer-overflow", "address"),
    "no tail": Fault("adam", NO_TAIL, "adam fp32"),
    "unaligned vectors": Fault("adam", NO_LEAD, "misaligned address", "address"),
    "no barrier before": Fault("adam", BEFORE, "data race", "thread"),
    "no barrier before, shuffled": Fault("adam", BEFORE, "adam fp32", seed=1),
    "no barrier after": Fault("adam", AFTER, "data race", "thread"),
    "no barrier after, values": Fault("adam", AFTER, "adam fp32"),
    "two barriers": Fault("adam", (*AFTER[:2], TWO_BARRIERS), "threads wait at different barriers"),
    "barrier of some": Fault("reduce", SOME_THREADS, "after 56 of 256 threads have returned"),
    "mixed: codes by a warp's exponent": Fault("mixed", EXPONENT_OF_WARP, "exponents"),
    "mixed: an exponent without its lanes": Fault("mixed", ALONE, "meet in different calls"),
    "mixed: threads that leave a warp": Fault("mixed", LEAVE, "waiting in __shfl_xor_sync"),
    "mixed: no warp barrier": Fault("mixed", NO_WARP_BARRIER, "data race", "thread"),
    "mixed: a warp's check": Fault("mixed", CHECK_OF_WARP, "master 4"),
    "mixed: a check without a lane's part": Fault("mixed", CHECK_ALONE, "master 4"),
    "mixed: remainders of edited blocks": Fault("mixed", ALWAYS_VALID, "master 4"),
    "mixed: a check of what is not there": Fault("mixed", BEHIND_A_TAIL, "checks"),
    "mixed: no warp barrier before checks": Fault("mixed", NO_CHECK_BARRIER, "data race", "thread"),
    "mixed: a vector in a tail": Fault("mixed", NO_MIXED_TAIL, "heap-buffer-overflow", "address"),
    "mixed: vectors of any gradient": Fault("mixed", ANYWHERE, "misaligned address", "address"),
    "mixed: words of another element": Fault("mixed", OTHER_WORDS, "stochastic"),
    "fingerprint: vectors of any array": Fault(
        "fingerprint", UNALIGNED_WORDS, "misaligned address", "address"
    ),
    "fingerprint: units of any array": Fault(
        "fingerprint", UNALIGNED_UNITS, "misaligned address", "address"
    ),
    "fingerprint: bytes behind the end": Fault(
        "fingerprint", BEHIND_THE_END, "heap-buffer-overflow", "address"
    ),
    "fingerprint: no barrier": Fault("fingerprint", SUMS_IN_USE, "data race", "thread"),
    "fingerprint: one warp's sum": Fault("fingerprint", FIRST_SUMS, "fingerprints: element"),
    "shuffle of nearer lanes": Fault("reduce", NEARER, "square_sum"),
    "shuffle without a lane": Fault("reduce", NO_LAST_LANE, "not in the mask 0x7fffffff"),
    "shuffle of half a warp": Fault("reduce", HALF_A_WARP, "waiting in __shfl_down_sync"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults(folder: Path, name: str) -> None:
    fault = FAULTS[name]
    program = emulation.build_driver(folder, fault.kernel, fault.sanitizer, [fault.change])
    status, output = emulation.run(program, sanitizer=fault.sanitizer, seed=fault.seed)
    assert status != 0
    assert fault.expected in output


# Updates of 20 segments, as Python asks for them. argv: the module, and the words to write into an
# array of 64.
PROGRAM = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(emulation.ROOT / "tests")!r})
import emulation, torch
module = emulation.load(Path(sys.argv[1]))
param, grad, exp_avg, exp_avg_sq = torch.rand(4, 20 * 1024)
rows = [[i * 1024, 1000, grad.data_ptr() + i * 4096, 1, 0, 0, 0, 0] for i in range(20)]
rows = torch.tensor(rows)
tiles = torch.tensor([[i, 0] for i in range(20)], dtype=torch.int32)
groups = torch.tensor([[1e-3, 0.9, 0.999, 1e-8, 0.01, 1, 0, 0]], dtype=torch.float64)
steps, expected = torch.tensor([3]), param.clone()
state = [array.data_ptr() for array in (param, exp_avg, exp_avg_sq)]
rest = [rows.data_ptr(), tiles.data_ptr(), len(tiles), steps.data_ptr(), groups.data_ptr()]
rest += [1.0, 0, 0, 0, 0]
module.adam_f32(*state, 0, *rest)
assert (param != expected).view(20, 1024)[:, :1000].all()
codes, exponents = torch.zeros(2, 20 * 1024).byte(), torch.zeros(2, 160).byte()
moments = [[c.data_ptr(), e.data_ptr()] for c, e in zip(codes, exponents)] + [[0, 0]]
module.adam_mixed(param.data_ptr(), 0, 0, moments, [1, 0, 5, 1], 7, *rest)
assert codes.view(2, 20, 1024)[:, :, :1000].all() and exponents.all()
words, written = torch.arange(100), torch.zeros(64, dtype=torch.int64)
module.write_words(written.data_ptr(), words.data_ptr(), int(sys.argv[2]), 0, 0)
print("done")
"""


def run_program(module: Path, sanitizer: str | None, words: int = 64) -> tuple[int, str]:
    command = (sys.executable, "-c", PROGRAM, module, str(words))
    return emulation.run(*command, sanitizer=sanitizer, preloaded=True)


@pytest.mark.parametrize("sanitizer", emulation.SANITIZE)
def test_module_beside_torch(folder: Path, sanitizer: str | None) -> None:
    status, output = run_program(emulation.build(folder, sanitizer), sanitizer)
    assert status == 0 and "done" in output, output


# What runs the kernels as the optimizer does; the others would show nothing more, in minutes.
PYTHON_TESTS = ("test_segment_table", "test_pack", "test_device_tables", "test_kernels")
CHOICE = "(emulated or device_tables) and not plain_torch and not quarter_above"


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_python_kernel_tests(folder: Path, sanitizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the threads of a block in shuffled order."""
    module = emulation.build(folder, sanitizer)
    monkeypatch.setenv("FUSEDSHARD_EMULATED", str(module))
    files = [str(Path(__file__).with_name(f"{name}.py")) for name in PYTHON_TESTS]
    # -s: pytest would keep for itself what a sanitizer says as it ends the process.
    command = (sys.executable, "-m", "pytest", "-qs", "-p", "no:cacheprovider", "-k", CHOICE)
    status, output = emulation.run(*command, *files, sanitizer=sanitizer, seed=3, preloaded=True)
    assert status == 0, output
    assert " passed" in output


def test_module_writes_behind_a_tensor(folder: Path) -> None:
    status, output = run_program(emulation.build(folder, "address"), "address", words=65)
    assert status != 0 and "heap-buffer-overflow" in output, output


def test_module_without_a_barrier(folder: Path) -> None:
    module = emulation.build(folder, "thread", [AFTER])
    status, output = run_program(module, "thread")
    assert status != 0 and "data race" in output, output


def test_emulated_devices(folder: Path) -> None:
    """What tests can see of them, and how they fail when they are told to."""
    module = emulation.load(emulation.build(folder))
    control = module.emulation
    x, out = torch.ones(100_000), torch.zeros(100_000)
    mean = (out.data_ptr(), x.data_ptr(), len(x), 1, len(x))
    module.mean_f32(*mean, 0, 5)
    assert control.last_launch() == (0, 5, 6)
    module.mean_f32(*mean, 1, 7)
    assert control.last_launch() == (1, 7, 4) and control.launch_count() == 2
    assert control.current_device() == 0 and torch.equal(out, x)
    with pytest.raises(RuntimeError, match="mean: invalid device ordinal"):
        module.mean_f32(*mean, 2, 0)
    control.set_launch_error(209)
    with pytest.raises(RuntimeError, match="mean: no kernel image"):
        module.mean_f32(*mean, 0, 0)
    module.mean_f32(*mean, 0, 0)
    assert module.device_problem(1) == ""
    control.set_kernel_image_error(209)
    assert "compute capability 9.0" in module.device_problem(1)
    assert control.last_error() == 0


def test_changes_that_do_not_fit(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"launch\.cuh has 'threads' \d+ times, not once"):
        emulation.build_driver(folder, "pack", changes=[("launch.cuh", "threads", "")])
    with pytest.raises(ValueError, match=r"no such source: \{'other.cu'\}"):
        emulation.build_driver(folder, "pack", changes=[("other.cu", "a", "b")])
