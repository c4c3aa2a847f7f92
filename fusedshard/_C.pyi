# The native module: addresses, counts and scalars. fusedshard/kernels.py says what they mean and
# checks them. Written to match csrc/bindings.cpp.
from collections.abc import Sequence
from typing import TypedDict

# lr, beta1, beta2, eps, weight_decay, decoupled, amsgrad, maximize
_Group = tuple[float, float, float, float, float, bool, bool, bool]

class _CudaBuild(TypedDict):
    built: bool
    architectures: str
    runtime_version: int
    note: str

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
    segments: int,
    segment_count: int,
    groups: Sequence[_Group],
    grad_scale: float,
    threads: int,
    /,
) -> None: ...
def adam_f64(
    param: int,
    exp_avg: int,
    exp_avg_sq: int,
    max_exp_avg_sq: int,
    segments: int,
    segment_count: int,
    groups: Sequence[_Group],
    grad_scale: float,
    threads: int,
    /,
) -> None: ...
def mean_f32(out: int, chunks: Sequence[int], length: int, threads: int, /) -> None: ...
def mean_f64(out: int, chunks: Sequence[int], length: int, threads: int, /) -> None: ...
def square_sum_f32(x: int, length: int, threads: int, /) -> float: ...
def square_sum_f64(x: int, length: int, threads: int, /) -> float: ...
def pack(out: int, rows: int, count: int, numel: int, itemsize: int, threads: int, /) -> None: ...
def unpack(in_: int, rows: int, count: int, numel: int, itemsize: int, threads: int, /) -> None: ...
def roofline_f32(p: int, g: int, m: int, v: int, length: int, threads: int, /) -> None: ...
