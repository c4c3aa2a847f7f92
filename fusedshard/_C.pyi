# The native module: addresses, counts and scalars. fusedshard/kernels.py says what they mean and
# checks them. Written to match csrc/bindings.cpp.
from collections.abc import Callable, Sequence
from typing import Protocol, TypedDict

class _CudaBuild(TypedDict):
    built: bool
    architectures: str
    runtime_version: int
    note: str

CODE_BLOCK: int
FINGERPRINT_BLOCK: int

class FlatMemory:
    def __init__(self, bytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def cpu_variants() -> list[str]: ...
def cpu_variant() -> str: ...
def set_cpu_variant(name: str, /) -> None: ...
def cuda_build() -> _CudaBuild: ...
def adam_f32(
    param: int,
    exp_avg: int,
    exp_avg_sq: int,
    max_exp_avg_sq: int,
    rows: int,
    row_count: int,
    steps: int,
    groups: int,
    grad_scale: float,
    threads: int,
    /,
) -> None: ...
def adam_f64(
    param: int,
    exp_avg: int,
    exp_avg_sq: int,
    max_exp_avg_sq: int,
    rows: int,
    row_count: int,
    steps: int,
    groups: int,
    grad_scale: float,
    threads: int,
    /,
) -> None: ...
def adam_mixed(
    param: int,
    master: int,
    checks: int,
    moments: Sequence[Sequence[int]],
    formats: Sequence[int],
    seed: int,
    rows: int,
    row_count: int,
    steps: int,
    groups: int,
    grad_scale: float,
    threads: int,
    /,
) -> None: ...
def mean_f32(out: int, chunks: Sequence[int], length: int, threads: int, /) -> None: ...
def square_sum_f32(x: int, length: int, threads: int, /) -> float: ...
def non_finite_f32(x: int, length: int, threads: int, /) -> bool: ...
def mean_f64(out: int, chunks: Sequence[int], length: int, threads: int, /) -> None: ...
def square_sum_f64(x: int, length: int, threads: int, /) -> float: ...
def non_finite_f64(x: int, length: int, threads: int, /) -> bool: ...
def mean_bf16(out: int, chunks: Sequence[int], length: int, threads: int, /) -> None: ...
def square_sum_bf16(x: int, length: int, threads: int, /) -> float: ...
def non_finite_bf16(x: int, length: int, threads: int, /) -> bool: ...
def mean_f16(out: int, chunks: Sequence[int], length: int, threads: int, /) -> None: ...
def square_sum_f16(x: int, length: int, threads: int, /) -> float: ...
def non_finite_f16(x: int, length: int, threads: int, /) -> bool: ...
def refresh_bf16(wide: int, narrow: int, length: int, threads: int, /) -> None: ...
def refresh_f16(wide: int, narrow: int, length: int, threads: int, /) -> None: ...
def pack(out: int, rows: int, count: int, numel: int, itemsize: int, threads: int, /) -> None: ...
def unpack(in_: int, rows: int, count: int, numel: int, itemsize: int, threads: int, /) -> None: ...
def fingerprints(hashes: int, rows: int, row_count: int, threads: int, /) -> None: ...
def roofline_f32(p: int, g: int, m: int, v: int, length: int, threads: int, /) -> None: ...

class _CudaAdam(Protocol):
    def __call__(
        self,
        param: int,
        exp_avg: int,
        exp_avg_sq: int,
        max_exp_avg_sq: int,
        rows: int,
        tiles: int,
        tile_count: int,
        steps: int,
        groups: int,
        grad_scale: float,
        device_grad_scale: int,
        found_inf: int,
        device: int,
        stream: int,
        /,
    ) -> None: ...

class _CudaAdamMixed(Protocol):
    def __call__(
        self,
        param: int,
        master: int,
        checks: int,
        moments: Sequence[Sequence[int]],
        formats: Sequence[int],
        seed: int,
        rows: int,
        tiles: int,
        tile_count: int,
        steps: int,
        groups: int,
        grad_scale: float,
        device_grad_scale: int,
        found_inf: int,
        device: int,
        stream: int,
        /,
    ) -> None: ...

class _CudaFunctions(Protocol):
    """The submodule cuda, which only a build with CUDA has."""

    TILE_ELEMENTS: int
    adam_f32: _CudaAdam
    adam_f64: _CudaAdam
    adam_mixed: _CudaAdamMixed

    def device_problem(self, device: int, /) -> str: ...
    def square_sum_workspace(self, length: int, /) -> int: ...
    def pack(
        self,
        out: int,
        rows: int,
        tiles: int,
        tile_count: int,
        numel: int,
        itemsize: int,
        device: int,
        stream: int,
        /,
    ) -> None: ...
    def unpack(
        self,
        in_: int,
        rows: int,
        tiles: int,
        tile_count: int,
        itemsize: int,
        device: int,
        stream: int,
        /,
    ) -> None: ...
    def fingerprints(
        self,
        hashes: int,
        terms: int,
        rows: int,
        row_count: int,
        block_count: int,
        device: int,
        stream: int,
        /,
    ) -> None: ...
    def write_words(self, to: int, words: int, count: int, device: int, stream: int, /) -> None: ...
    def count_steps(
        self,
        steps: int,
        step_mirror: int,
        used: int,
        count: int,
        found_inf: int,
        device: int,
        stream: int,
        /,
    ) -> None: ...
    # mean, square_sum, found_inf and refresh, of each dtype, are called by name.
    def __getattr__(self, name: str, /) -> Callable[..., None]: ...

cuda: _CudaFunctions
