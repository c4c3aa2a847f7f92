"""The native module, and for each kind of device one object that calls its functions.

Tensors go in, addresses go down; `fusedshard.kernels` has checked them before. The extension knows
neither torch nor Python objects. It is loaded after torch, so that both use torch's copy of the
OpenMP runtime.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from fusedshard.dense import Chunks, distance_of

if TYPE_CHECKING:
    from fusedshard.kernels import FingerprintTable
    from fusedshard.tables import SegmentTable, StepTables

try:
    from fusedshard import _C
except ImportError as error:
    _package = Path(__file__).resolve().parent
    _files = [str(path) for path in sorted(_package.glob("_C*.so"))]
    if not _files and (_package.parent / "setup.py").exists():
        raise ImportError(
            f"fusedshard was imported from its source tree ({_package}), which holds no built "
            "extension: run from another directory after `pip install .` (and tests by `pytest`, "
            "not `python -m pytest`), or build in place with `pip install -e .`"
        ) from None
    raise ImportError(
        f"fusedshard's extension cannot be loaded: {error} (file: "
        f"{', '.join(_files) or f'no _C*.so in {_package}'}). Rebuild it with `pip install "
        "--force-reinstall --no-deps --no-cache-dir .` in the source tree"
    ) from error

_C.cpu_variant()  # so that a wrong FUSEDSHARD_CPU_ISA fails at import, not in the first step

# Suffix of the native functions for each dtype they are compiled for.
SUFFIX = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
}
# enum Format of kernels.h
FORMATS = {
    None: 0,
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int16: 4,
    torch.uint8: 5,
}
CODE_BLOCK: int = _C.CODE_BLOCK  # elements of a parameter that share an exponent
FINGERPRINT_BLOCK: int = _C.FINGERPRINT_BLOCK  # bytes that are hashed together


class AdamState(NamedTuple):
    """The arrays of one shard: 1-D, contiguous, of one length.

    Attributes:
        param: fp32, fp64, bf16 or fp16.
        exp_avg, exp_avg_sq, max_exp_avg_sq: of one dtype: that of ``param`` where it is fp32 or
            fp64; else, or with fp32 parameters, fp32, bf16, or uint8 for 8-bit codes.
        master: of bf16 and fp16 parameters: None, fp32 values, or for bf16 int16 remainders.
        checks: of remainders: int32, one for each `CODE_BLOCK` elements.
        exponents: of each moment where they are codes: uint8, one for each `CODE_BLOCK` elements.
        seed: of the stochastic rounding of bf16 and coded moments, and of bf16 parameters without
            a master; None: they are rounded to the nearest.
    """

    param: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    max_exp_avg_sq: torch.Tensor | None
    master: torch.Tensor | None = None
    exponents: tuple[torch.Tensor | None, ...] = (None, None, None)
    seed: int | None = None
    checks: torch.Tensor | None = None

    @property
    def moments(self) -> tuple[torch.Tensor | None, ...]:
        return self.exp_avg, self.exp_avg_sq, self.max_exp_avg_sq

    @property
    def is_mixed(self) -> bool:
        """Whether its arrays have other formats than the arithmetic."""
        return self.exp_avg.dtype != self.param.dtype or self.master is not None or self.is_narrow

    @property
    def is_narrow(self) -> bool:
        return self.param.dtype.itemsize == 2


def mixed_arguments(state: AdamState) -> tuple[int, int, int, list[list[int]], list[int], int]:
    """What describes a shard in mixed precision to the native functions: see arrays.h."""
    moments = [
        [address(values), address(exponents)]
        for values, exponents in zip(state.moments, state.exponents, strict=True)
    ]
    master = None if state.master is None else state.master.dtype
    dtypes = state.param.dtype, master, state.exp_avg.dtype
    formats = [*(FORMATS[dtype] for dtype in dtypes), int(state.seed is not None)]
    places = state.param.data_ptr(), address(state.master), address(state.checks)
    return *places, moments, formats, state.seed or 0


class Control(NamedTuple):
    """What multiplies the gradients, and whether to leave everything as it is.

    Attributes:
        grad_scale: a number, or a tensor of one fp64 element on the arrays' device.
        found_inf: one fp32 element there; anything but 0 skips the update. None: never.
    """

    grad_scale: float | torch.Tensor = 1.0
    found_inf: torch.Tensor | None = None


class Backend(Protocol):
    """The kernels of one kind of device. Nothing here waits for a device."""

    def problem(self, device: torch.device) -> str: ...

    def capturing(self) -> bool: ...

    def about_to_free(self, tensor: torch.Tensor) -> None: ...

    def note_stream(self, device: torch.device, streams: set[Any]) -> None: ...

    def wait_for_streams(self, device: torch.device, streams: set[Any]) -> None: ...

    def flat_memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...

    def adam(
        self, state: AdamState, table: SegmentTable, steps: torch.Tensor, control: Control
    ) -> None: ...

    def count_steps(
        self,
        steps: torch.Tensor,
        step_mirror: torch.Tensor,
        used: torch.Tensor,
        found_inf: torch.Tensor | None,
    ) -> None: ...

    def pack(self, send: torch.Tensor, table: SegmentTable) -> None: ...

    def unpack(self, send: torch.Tensor, table: SegmentTable) -> None: ...

    def mean(self, out: torch.Tensor, chunks: Chunks) -> None: ...

    def square_sum(self, x: torch.Tensor) -> torch.Tensor: ...

    def found_inf(self, found_inf: torch.Tensor, x: torch.Tensor) -> None: ...

    def refresh(self, wide: torch.Tensor, narrow: torch.Tensor) -> None: ...

    def fingerprints(self, hashes: torch.Tensor, table: FingerprintTable) -> None: ...

    def upload(self, tables: StepTables, words: range) -> None: ...


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class CpuBackend:
    """Threads of OpenMP, as many as torch's."""

    def problem(self, device: torch.device) -> str:
        return ""

    def capturing(self) -> bool:
        return False

    def about_to_free(self, tensor: torch.Tensor) -> None:
        """Nothing still reads it."""

    def note_stream(self, device: torch.device, streams: set[Any]) -> None:
        """Work is done when the call returns."""

    def wait_for_streams(self, device: torch.device, streams: set[Any]) -> None:
        """Likewise."""

    def flat_memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.frombuffer(_C.FlatMemory(numel * dtype.itemsize), dtype=dtype)

    def adam(
        self, state: AdamState, table: SegmentTable, steps: torch.Tensor, control: Control
    ) -> None:
        if control.found_inf is not None and control.found_inf.item() != 0:
            return
        rest = (
            table.rows.data_ptr(),
            len(table.rows),
            steps.data_ptr(),
            table.groups.data_ptr(),
            float(control.grad_scale),
            torch.get_num_threads(),
        )
        if state.is_mixed:
            arguments = (*mixed_arguments(state), *rest)
            _C.adam_mixed(*arguments)
        else:
            adam = getattr(_C, f"adam_{SUFFIX[state.param.dtype]}")
            adam(state.param.data_ptr(), *map(address, state.moments), *rest)

    def count_steps(
        self,
        steps: torch.Tensor,
        step_mirror: torch.Tensor,
        used: torch.Tensor,
        found_inf: torch.Tensor | None,
    ) -> None:
        if found_inf is None or found_inf.item() == 0:
            steps.add_(used)
            step_mirror.copy_(steps)

    def pack(self, send: torch.Tensor, table: SegmentTable) -> None:
        _C.pack(*self._move(send, table))

    def unpack(self, send: torch.Tensor, table: SegmentTable) -> None:
        _C.unpack(*self._move(send, table))

    def _move(self, send: torch.Tensor, table: SegmentTable) -> tuple[int, ...]:
        rows, count = table.rows.data_ptr(), len(table.rows)
        threads = torch.get_num_threads()
        return send.data_ptr(), rows, count, send.numel(), send.element_size(), threads

    def mean(self, out: torch.Tensor, chunks: Chunks) -> None:
        addresses = [chunk.data_ptr() for chunk in chunks]
        mean = getattr(_C, f"mean_{SUFFIX[chunks[0].dtype]}")
        mean(out.data_ptr(), addresses, out.numel(), torch.get_num_threads())

    def square_sum(self, x: torch.Tensor) -> torch.Tensor:
        square_sum = getattr(_C, f"square_sum_{SUFFIX[x.dtype]}")
        total = square_sum(x.data_ptr(), x.numel(), torch.get_num_threads())
        return torch.tensor(total, dtype=torch.float64, device=x.device)

    def found_inf(self, found_inf: torch.Tensor, x: torch.Tensor) -> None:
        non_finite = getattr(_C, f"non_finite_{SUFFIX[x.dtype]}")
        if non_finite(x.data_ptr(), x.numel(), torch.get_num_threads()):
            found_inf.fill_(1.0)

    def refresh(self, wide: torch.Tensor, narrow: torch.Tensor) -> None:
        refresh = getattr(_C, f"refresh_{SUFFIX[narrow.dtype]}")
        refresh(wide.data_ptr(), narrow.data_ptr(), wide.numel(), torch.get_num_threads())

    def fingerprints(self, hashes: torch.Tensor, table: FingerprintTable) -> None:
        places = hashes.data_ptr(), table.rows.data_ptr()
        _C.fingerprints(*places, len(hashes), torch.get_num_threads())

    def upload(self, tables: StepTables, words: range) -> None:
        """The kernels read the tables where they are written."""


class CudaBackend:
    """Launches on the current stream of the tensors' device, whichever device is current.

    Args:
        functions: those of ``_C.cuda``.
    """

    def __init__(self, functions: _C._CudaFunctions) -> None:
        self._functions = functions
        self._problems: dict[torch.device, str] = {}
        self.tile_elements = functions.TILE_ELEMENTS

    def problem(self, device: torch.device) -> str:
        """Why the kernels cannot run there, or nothing; asked once a device."""
        if device not in self._problems:
            index, _ = self.where(device)
            self._problems[device] = self._functions.device_problem(index)
        return self._problems[device]

    def where(self, device: torch.device) -> tuple[int, int]:
        """The device's number and its current stream."""
        index = torch.cuda.current_device() if device.index is None else device.index
        return index, torch.cuda.current_stream(index).cuda_stream

    def about_to_free(self, tensor: torch.Tensor) -> None:
        """The current stream may still read memory that was allocated on another one."""
        tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def note_stream(self, device: torch.device, streams: set[Any]) -> None:
        """Something to wait for was queued on the current one."""
        streams.add(torch.cuda.current_stream(device))

    def wait_for_streams(self, device: torch.device, streams: set[Any]) -> None:
        """The current one goes on after all that the others hold by now."""
        current = torch.cuda.current_stream(device)
        for stream in streams:
            if stream != current:
                current.wait_stream(stream)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def flat_memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def adam(
        self, state: AdamState, table: SegmentTable, steps: torch.Tensor, control: Control
    ) -> None:
        scale = control.grad_scale
        rest = (
            table.device_rows.data_ptr(),
            table.tiles.data_ptr(),
            len(table.tiles),
            steps.data_ptr(),
            table.device_groups.data_ptr(),
            1.0 if isinstance(scale, torch.Tensor) else scale,
            address(scale) if isinstance(scale, torch.Tensor) else 0,
            address(control.found_inf),
            *self.where(state.param.device),
        )
        if state.is_mixed:
            arguments = (*mixed_arguments(state), *rest)
            self._functions.adam_mixed(*arguments)
        else:
            adam = getattr(self._functions, f"adam_{SUFFIX[state.param.dtype]}")
            adam(state.param.data_ptr(), *map(address, state.moments), *rest)

    def count_steps(
        self,
        steps: torch.Tensor,
        step_mirror: torch.Tensor,
        used: torch.Tensor,
        found_inf: torch.Tensor | None,
    ) -> None:
        arrays = steps.data_ptr(), step_mirror.data_ptr(), used.data_ptr(), len(steps)
        self._functions.count_steps(*arrays, address(found_inf), *self.where(steps.device))

    def pack(self, send: torch.Tensor, table: SegmentTable) -> None:
        sizes = send.numel(), send.element_size()
        self._functions.pack(*self._tiled(send, table), *sizes, *self.where(send.device))

    def unpack(self, send: torch.Tensor, table: SegmentTable) -> None:
        where = self.where(send.device)
        self._functions.unpack(*self._tiled(send, table), send.element_size(), *where)

    def _tiled(self, send: torch.Tensor, table: SegmentTable) -> tuple[int, int, int, int]:
        rows, tiles = table.device_rows.data_ptr(), table.tiles.data_ptr()
        return send.data_ptr(), rows, tiles, len(table.tiles)

    def mean(self, out: torch.Tensor, chunks: Chunks) -> None:
        first = chunks[0]
        mean = getattr(self._functions, f"mean_{SUFFIX[first.dtype]}")
        layout = first.data_ptr(), distance_of(chunks), len(chunks), out.numel()
        mean(out.data_ptr(), *layout, *self.where(out.device))

    def square_sum(self, x: torch.Tensor) -> torch.Tensor:
        size = self._functions.square_sum_workspace(x.numel())
        workspace = torch.empty(size, dtype=torch.float64, device=x.device)
        square_sum = getattr(self._functions, f"square_sum_{SUFFIX[x.dtype]}")
        square_sum(workspace.data_ptr(), x.data_ptr(), x.numel(), *self.where(x.device))
        return workspace[-1]

    def found_inf(self, found_inf: torch.Tensor, x: torch.Tensor) -> None:
        check = getattr(self._functions, f"found_inf_{SUFFIX[x.dtype]}")
        check(found_inf.data_ptr(), x.data_ptr(), x.numel(), *self.where(x.device))

    def refresh(self, wide: torch.Tensor, narrow: torch.Tensor) -> None:
        refresh = getattr(self._functions, f"refresh_{SUFFIX[narrow.dtype]}")
        places = wide.data_ptr(), narrow.data_ptr(), wide.numel()
        refresh(*places, *self.where(wide.device))

    def fingerprints(self, hashes: torch.Tensor, table: FingerprintTable) -> None:
        terms = hashes.new_empty(table.block_count)
        places = hashes.data_ptr(), terms.data_ptr(), table.device_rows.data_ptr()
        self._functions.fingerprints(*places, len(hashes), len(terms), *self.where(hashes.device))

    def upload(self, tables: StepTables, words: range) -> None:
        """Write which of these words have changed since they were uploaded last; in a CUDA graph
        all of them, since other steps may have run when it is replayed."""
        tables.replayed |= self.capturing()
        where = self.where(tables.device_words.device)
        for start, stop in tables.stretches_to_send(words):
            to, values = tables.device_words[start:stop], tables.words[start:stop]
            self._functions.write_words(to.data_ptr(), values.data_ptr(), stop - start, *where)
        tables.note_sent(words)  # not before: where a launch fails, all of it is sent again
        for group, column, value in tables.device_scalars:
            tables.device_groups[group, column].copy_(value.reshape(()))


def cuda_build_note() -> str:
    """Why the CUDA part was left out; empty where it was built."""
    return _C.cuda_build()["note"]


# By type of device. A build without CUDA has one for the CPU alone.
BACKENDS: dict[str, Backend] = {"cpu": CpuBackend()}
if _C.cuda_build()["built"]:
    BACKENDS["cuda"] = CudaBackend(_C.cuda)
