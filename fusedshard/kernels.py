"""Typed access to the native kernels: every check of a tensor is here, then addresses go down.

The extension knows neither torch nor Python objects. It is loaded after torch, so that both use
torch's copy of the OpenMP runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fusedshard.layout import Segment

try:
    from fusedshard import _C
except ImportError as error:
    _package = Path(__file__).resolve().parent
    _files = [str(path) for path in sorted(_package.glob("_C*.so"))]
    if not _files and (_package.parent / "setup.py").exists():
        raise ImportError(
            f"fusedshard was imported from its source tree ({_package}), which holds no built "
            "extension: run from another directory after `pip install .`, or build in place "
            "with `pip install -e .`"
        ) from None
    raise ImportError(
        f"fusedshard's extension cannot be loaded: {error} (file: "
        f"{', '.join(_files) or f'no _C*.so in {_package}'}). Rebuild it with `pip install "
        "--force-reinstall --no-deps --no-cache-dir .` in the source tree"
    ) from error

_C.cpu_variant()  # so that a wrong FUSEDSHARD_CPU_ISA fails at import, not in the first step

# Suffix of the native functions for each dtype they are compiled for.
_SUFFIX = {torch.float32: "f32", torch.float64: "f64"}
SUPPORTED_DTYPES = tuple(_SUFFIX)

_COLUMNS = 6  # start, length, grad address, active, step, group: struct Segment in kernels.h


class GroupScalars(NamedTuple):
    """Hyperparameters of a param group, in the order in which the extension takes them."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    amsgrad: bool
    maximize: bool


class AdamState(NamedTuple):
    """The arrays of one shard: 1-D, contiguous, of one dtype and length."""

    param: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    max_exp_avg_sq: torch.Tensor | None


class SegmentTable:
    """The kernel's table for one shard: a row for each segment.

    What never changes (start, length) is written once; `refresh` writes what differs from step
    to step for all rows together.

    Args:
        segments: the shard's segments.
        itemsize: bytes of an element.
    """

    def __init__(self, segments: Sequence[Segment], itemsize: int) -> None:
        self.params = integers([s.param for s in segments])
        self.rows = torch.zeros((len(segments), _COLUMNS), dtype=torch.int64, device="cpu")
        self.rows[:, 0] = integers([s.shard_start for s in segments])
        self.rows[:, 1] = integers([s.length for s in segments])
        self._param_offset_bytes = integers([s.param_start for s in segments]) * itemsize
        self._shard_offset_bytes = self.rows[:, 0] * itemsize
        # One past the last element that any row names.
        self.end = max((s.shard_start + s.length for s in segments), default=0)

    def point_at_shard(self, gradient: torch.Tensor) -> None:
        """Take the gradients from one array parallel to the shard; it must outlive the table."""
        self.rows[:, 2] = gradient.data_ptr() + self._shard_offset_bytes

    def point_at_params(self, addresses: torch.Tensor) -> None:
        """Take each segment from its parameter's own gradient: ``addresses`` from
        `gradient_addresses`."""
        found = addresses[self.params]
        self.rows[:, 2] = torch.where(found == 0, found, found + self._param_offset_bytes)

    def refresh(self, active: torch.Tensor, steps: torch.Tensor, groups: torch.Tensor) -> None:
        """Write activity, step count (after the update) and group: int64, one a parameter."""
        self.rows[:, 3] = active[self.params]
        self.rows[:, 4] = steps[self.params]
        self.rows[:, 5] = groups[self.params]


def integers(values: Sequence[int]) -> torch.Tensor:
    """An int64 tensor in host memory, whatever torch's default device."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def gradient_addresses(grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Addresses of dense gradients in their parameters' storage order, int64; 0 for None."""
    return integers([0 if grad is None else grad.data_ptr() for grad in grads])


def check_device(name: str, device: torch.device) -> None:
    """Raise ValueError for a device that this build has no kernels for, and say what to do."""
    if device.type == "cpu":
        return
    message = f"{name}: got device {device}, wanted cpu"
    build = _C.cuda_build()
    if device.type == "cuda" and not build["built"]:
        message += (
            f": the CUDA part was left out of this build ({build['note']}); rebuild with "
            "CUDA_HOME set to a CUDA toolkit and FUSEDSHARD_CUDA=1"
        )
    elif device.type == "cuda":
        message += ": this version of fusedshard updates parameters on the CPU only"
    raise ValueError(message)


def flat_memory(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A zeroed 1-D CPU tensor of ``numel`` (at least 1) elements on huge pages, untouched yet:
    pages appear as they are written. torch's deterministic mode does not fill it."""
    memory = _C.FlatMemory(numel * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype)


def adam_(
    state: AdamState,
    table: SegmentTable,
    groups: Sequence[GroupScalars],
    grad_scale: float = 1.0,
) -> None:
    """One fused Adam or AdamW update, in place, of the active segments of a shard.

    Each element of the parameter, the moments and the gradient is read once and written once.
    Gradients are multiplied by ``grad_scale`` first. Bits depend neither on the number of
    threads nor on the instruction set. The caller announces the change to autograd.

    Raises:
        TypeError, ValueError: naming the array, what it is, and what was wanted.
    """
    param = state.param
    _check("param", param, param.dtype, param.numel())
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        array = getattr(state, name)
        if array is not None:
            _check(name, array, param.dtype, param.numel())
    if state.max_exp_avg_sq is None and any(
        groups[index].amsgrad for index in table.rows[:, 5].unique().tolist()
    ):
        raise ValueError("max_exp_avg_sq: got None, wanted an array, as a group has amsgrad")
    _check_end(table, param)
    getattr(_C, f"adam_{_SUFFIX[param.dtype]}")(
        param.data_ptr(),
        state.exp_avg.data_ptr(),
        state.exp_avg_sq.data_ptr(),
        0 if state.max_exp_avg_sq is None else state.max_exp_avg_sq.data_ptr(),
        table.rows.data_ptr(),
        len(table.rows),
        groups,
        grad_scale,
        torch.get_num_threads(),
    )


def pack_(send: torch.Tensor, table: SegmentTable) -> None:
    """Copy the gradients that the table points at into ``send`` (1-D); zero between them, and
    where there is none."""
    _move(_C.pack, "send", send, table)


def unpack_(send: torch.Tensor, table: SegmentTable) -> None:
    """Copy ``send`` (1-D) back to the gradients that the table points at."""
    _move(_C.unpack, "send", send, table)


def _move(
    function: Callable[..., None], name: str, buffer: torch.Tensor, table: SegmentTable
) -> None:
    _check(name, buffer, buffer.dtype, buffer.numel())
    _check_end(table, buffer)
    rows, itemsize, threads = table.rows, buffer.element_size(), torch.get_num_threads()
    function(buffer.data_ptr(), rows.data_ptr(), len(rows), buffer.numel(), itemsize, threads)


def mean_(out: torch.Tensor, chunks: Sequence[torch.Tensor]) -> None:
    """``out = (chunks[0] + chunks[1] + ...) / len(chunks)``, added in that order.

    All are 1-D, contiguous, of one dtype and length; ``out`` may be one of the chunks.
    """
    if not chunks:
        raise ValueError("chunks: got none, wanted at least one")
    _check("out", out, out.dtype, out.numel())
    for index, chunk in enumerate(chunks):
        _check(f"chunks[{index}]", chunk, out.dtype, out.numel())
    addresses = [chunk.data_ptr() for chunk in chunks]
    threads = torch.get_num_threads()
    getattr(_C, f"mean_{_SUFFIX[out.dtype]}")(out.data_ptr(), addresses, out.numel(), threads)


def square_sum(x: torch.Tensor) -> float:
    """Sum of the squares of a 1-D contiguous tensor, in double precision and in a fixed order:
    the same bits for every number of threads and every instruction set."""
    _check("x", x, x.dtype, x.numel())
    threads = torch.get_num_threads()
    return getattr(_C, f"square_sum_{_SUFFIX[x.dtype]}")(x.data_ptr(), x.numel(), threads)


def _check_end(table: SegmentTable, array: torch.Tensor) -> None:
    if table.end > array.numel():
        raise ValueError(f"table: ends at {table.end}, wanted at most {array.numel()}")


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, numel: int) -> None:
    check_device(name, tensor.device)
    if tensor.dtype != dtype or dtype not in _SUFFIX:
        wanted = dtype if dtype in _SUFFIX else " or ".join(map(str, _SUFFIX))
        raise TypeError(f"{name}: got {tensor.dtype}, wanted {wanted}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: got shape {tuple(tensor.shape)} with strides {tensor.stride()}, "
            "wanted one contiguous dimension"
        )
    if tensor.numel() != numel:
        raise ValueError(f"{name}: got {tensor.numel()} elements, wanted {numel}")
