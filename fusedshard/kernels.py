"""Checked access to the kernels: every check of a tensor is here, then it goes to the backend of
the tensor's device.

On a GPU each call queues its work on the current stream of the tensors' device and returns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedshard.dense import Chunks, is_dense, is_plain, shows_its_memory
from fusedshard.native import (
    BACKENDS,
    CODE_BLOCK,
    FINGERPRINT_BLOCK,
    SUFFIX,
    AdamState,
    Backend,
    Control,
    CudaBackend,
    cuda_build_note,
)
from fusedshard.tables import SegmentTable, integers

SUPPORTED_DTYPES = tuple(SUFFIX)
CPU = torch.device("cpu")
MOMENT_DTYPES = (torch.float32, torch.bfloat16, torch.uint8)
MASTER_DTYPES = {
    torch.bfloat16: (None, torch.float32, torch.int16),
    torch.float16: (None, torch.float32),
}
# Segments in mixed precision begin where every array of a GPU has a 16-byte boundary.
MIXED_ALIGNMENT = 8


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What numbers of a dtype are computed with: fp32 for bf16 and fp16."""
    return torch.float32 if dtype in MASTER_DTYPES else dtype


def check_device(name: str, device: torch.device) -> None:
    """Raise for a device that this build has no kernels for, and say what to do.

    Raises:
        ValueError: this build has no kernels for such devices.
        RuntimeError: it has none for this GPU's architecture.
    """
    if device.type not in BACKENDS:
        message = f"{name}: got device {device}, wanted {' or '.join(BACKENDS)}"
        if device.type == "cuda":
            message += (
                f": the CUDA part was left out of this build ({cuda_build_note()}); rebuild "
                "with CUDA_HOME set to a CUDA toolkit and FUSEDSHARD_CUDA=1"
            )
        raise ValueError(message)
    problem = BACKENDS[device.type].problem(device)
    if problem:
        raise RuntimeError(f"{name}: got device {device}, which fusedshard cannot use: {problem}")


def capturing(device: torch.device) -> bool:
    """Whether what is queued on the device's current stream goes into a CUDA graph."""
    return BACKENDS[device.type].capturing()


def flat_memory(numel: int, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
    """A zeroed 1-D tensor of ``numel`` (at least 1) elements. On the CPU it lies on huge pages
    that are untouched yet: they appear as they are written, and torch's deterministic mode does
    not fill them."""
    return BACKENDS[device.type].flat_memory(numel, dtype, device)


def adam_(
    state: AdamState,
    table: SegmentTable,
    steps: torch.Tensor,
    grad_scale: float | torch.Tensor = 1.0,
    found_inf: torch.Tensor | None = None,
) -> None:
    """One fused Adam or AdamW update, in place, of the active segments of a shard.

    Each element of the parameter, the moments and the gradient is read once and written once.
    Bits depend neither on the device nor on the number of threads or the instruction set. The
    caller announces the change to autograd.

    Args:
        state: the shard.
        table: its segments, uploaded.
        steps: int64, the step count of each parameter before this update; `count_steps_` follows
            when all shards are done.
        grad_scale: multiplies gradients first: a number, or a tensor of one fp64 element.
        found_inf: one fp32 element; anything but 0 leaves everything as it is.

    Raises:
        TypeError, ValueError: naming the array, what it is, and what was wanted.
    """
    param = state.param
    device, numel = param.device, param.numel()
    backend = _check("param", param, param.dtype, numel, device)
    _check_moments(state)
    if state.is_mixed:
        _check_mixed(state, table)
    if state.max_exp_avg_sq is None and table.amsgrad:
        raise ValueError("max_exp_avg_sq: got None, wanted an array, as a group has amsgrad")
    _check_end(table, param)
    if isinstance(grad_scale, torch.Tensor):
        _check_like("grad_scale", grad_scale.view(-1), torch.float64, 1, device)
    if found_inf is not None:
        _check_like("found_inf", found_inf.view(-1), torch.float32, 1, device)
    backend.adam(state, table, steps, Control(grad_scale, found_inf))


def count_steps_(
    steps: torch.Tensor,
    step_mirror: torch.Tensor,
    used: torch.Tensor,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Count one step of every used parameter, unless ``found_inf`` (one fp32 element) is not 0.

    Args:
        steps: int64, one a parameter.
        step_mirror: fp32, likewise: ``steps`` as torch shows them.
        used: int64, 0 or 1 for each.
    """
    BACKENDS[steps.device.type].count_steps(steps, step_mirror, used, found_inf)


def pack_(send: torch.Tensor, table: SegmentTable) -> None:
    """Copy the gradients that the table points at into ``send`` (1-D); zero between them, and
    where there is none."""
    _check_move(send, table).pack(send, table)


def unpack_(send: torch.Tensor, table: SegmentTable) -> None:
    """Copy ``send`` (1-D) back to the gradients that the table points at."""
    _check_move(send, table).unpack(send, table)


def mean_(out: torch.Tensor, chunks: Chunks) -> None:
    """``out = (chunks[0] + chunks[1] + ...) / len(chunks)``, added in that order.

    All are 1-D, contiguous, of one length and device. Chunks are of one dtype, and ``out`` is of
    that, or fp32 where they are bf16 or fp16; where it is of theirs it may be one of them. On a GPU
    chunks must lie at equal distances, as the rows of one tensor do.
    """
    if len(chunks) == 0:
        raise ValueError("chunks: got none, wanted at least one")
    dtype, device = chunks[0].dtype, chunks[0].device
    for index, chunk in enumerate(_unlike(chunks)):
        backend = _check(f"chunks[{index}]", chunk, dtype, out.numel(), device)
    _check_like("out", out, wide_dtype(dtype), out.numel(), device)
    backend.mean(out, chunks)


def _unlike(chunks: Chunks) -> Sequence[torch.Tensor]:
    """Those that differ in more than their place: the rows of a tensor do not, and may be many."""
    return [chunks[0]] if isinstance(chunks, torch.Tensor) else chunks


def square_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum of the squares of a 1-D contiguous tensor: one fp64 element on its device.

    Summed in double precision and in a fixed order: the same bits on every device, for every
    number of threads and every instruction set.
    """
    return _check("x", x, x.dtype, x.numel(), x.device).square_sum(x)


def found_inf_(found_inf: torch.Tensor, x: torch.Tensor) -> None:
    """Set ``found_inf`` (one fp32 element) to 1 where an element of ``x`` (1-D, contiguous) is
    infinite or NaN; else leave it."""
    backend = _check("x", x, x.dtype, x.numel(), x.device)
    _check_like("found_inf", found_inf.view(-1), torch.float32, 1, x.device)
    backend.found_inf(found_inf, x)


def refresh_(wide: torch.Tensor, narrow: torch.Tensor) -> None:
    """Take over from ``narrow`` (bf16 or fp16) what is not the rounding of ``wide`` (fp32, as
    long): somebody has changed it. Both are 1-D and contiguous."""
    if narrow.dtype not in MASTER_DTYPES:
        raise TypeError(
            f"narrow: got {narrow.dtype}, wanted {' or '.join(map(str, MASTER_DTYPES))}"
        )
    backend = _check("narrow", narrow, narrow.dtype, wide.numel(), wide.device)
    _check_like("wide", wide, torch.float32, wide.numel(), wide.device)
    backend.refresh(wide, narrow)


class FingerprintTable:
    """Tensors whose fingerprints are asked for again and again: they are checked once.

    Their memory is kept, and must stay where it is: a tensor that gets other memory, as by
    ``p.data = ...``, is not followed there, and storages must not be resized.

    Args:
        tensors: dense ones (their elements fill a stretch of memory in any order), of any dtype,
            all on one device.

    Attributes:
        device: theirs.
        rows, device_rows: (n, 3) int64, a `FingerprintRow` of fingerprint.h each, on the host and
            for the kernels.
        block_count: blocks of all tensors.

    Raises:
        TypeError, ValueError: naming the tensor, what it is, and what was wanted.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.device = tensors[0].device if tensors else CPU
        for index, tensor in enumerate(tensors):
            _check_bytes(f"tensors[{index}]", tensor, self.device)
        self._memory = [tensor.detach() for tensor in tensors]
        sizes = integers([tensor.nbytes for tensor in tensors])
        blocks = (sizes + FINGERPRINT_BLOCK - 1) // FINGERPRINT_BLOCK
        addresses = integers([tensor.data_ptr() for tensor in tensors])
        self.rows = torch.stack([addresses, sizes, blocks.cumsum(0) - blocks], dim=1)
        self.block_count = int(blocks.sum())
        self._backend = BACKENDS[self.device.type]
        on_device = isinstance(self._backend, CudaBackend)
        self.device_rows = self.rows.to(self.device) if on_device else self.rows

    def fingerprints(self) -> torch.Tensor:
        """A 64-bit hash of the bytes of each tensor as they are now: int64, on the host.

        It depends on each byte, on where it lies, and on their number, but neither on dtype nor
        shape. It is the same on every device, for every number of threads and every instruction
        set. Two tensors of one size that differ within one aligned word of 8 bytes alone, as in one
        element, have different fingerprints for certain; any others but for a probability of about
        2^-64. It is no protection against an adversary.

        Waits for the device, as the answer is on the host.
        """
        hashes = torch.empty(len(self.rows), dtype=torch.int64, device=self.device)
        self._backend.fingerprints(hashes, self)
        return hashes.cpu()


def fingerprints(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`FingerprintTable.fingerprints` of tensors that are asked for once."""
    return FingerprintTable(tensors).fingerprints()


def _check_bytes(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if not is_plain(tensor):
        raise TypeError(
            f"{name}: got a {type(tensor).__name__} of layout {tensor.layout} without plain memory "
            "of its own, wanted a dense tensor"
        )
    check_device(name, tensor.device)
    if tensor.device != device:
        raise ValueError(f"{name}: got device {tensor.device}, wanted {device} as the first")
    if not shows_its_memory(tensor):
        raise ValueError(
            f"{name}: got a lazily negated or conjugated view, wanted one whose memory holds its "
            "values: pass a clone"
        )
    if not is_dense(tensor):
        raise ValueError(
            f"{name}: got shape {tuple(tensor.shape)} with strides {tensor.stride()}, wanted "
            "elements that fill their memory without gaps or overlaps: pass a contiguous copy"
        )


def _check_moments(state: AdamState) -> None:
    """They fit the parameter, each other, and their exponents."""
    param, dtype = state.param, state.exp_avg.dtype
    allowed = (param.dtype,) if param.dtype == torch.float64 else MOMENT_DTYPES
    if dtype not in allowed:
        raise TypeError(f"exp_avg: got {dtype}, wanted {' or '.join(map(str, allowed))}")
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    for name, moment, exponents in zip(names, state.moments, state.exponents, strict=True):
        if moment is not None:
            _check_like(name, moment, dtype, param.numel(), param.device)
        if moment is not None and dtype == torch.uint8:
            blocks = -(-param.numel() // CODE_BLOCK)
            if exponents is None:
                raise ValueError(f"exponents of {name}: got None, wanted {blocks}")
            _check_like(f"exponents of {name}", exponents, torch.uint8, blocks, param.device)


def _check_mixed(state: AdamState, table: SegmentTable) -> None:
    param, master = state.param, state.master
    allowed = MASTER_DTYPES.get(param.dtype, (None,))
    if (None if master is None else master.dtype) not in allowed:
        got = None if master is None else master.dtype
        raise TypeError(f"master: got {got}, wanted {' or '.join(map(str, allowed))}")
    if master is not None:
        _check_like("master", master, master.dtype, param.numel(), param.device)
    if master is not None and master.dtype == torch.int16:
        blocks = -(-param.numel() // CODE_BLOCK)
        if state.checks is None:
            raise ValueError(f"checks: got None, wanted {blocks} for the remainders")
        _check_like("checks", state.checks, torch.int32, blocks, param.device)
    in_blocks = state.exp_avg.dtype == torch.uint8 or state.checks is not None
    multiple = CODE_BLOCK if in_blocks else MIXED_ALIGNMENT
    if table.alignment % multiple:
        raise ValueError(
            f"table: got segments that begin at multiples of {table.alignment}, wanted {multiple}"
        )
    for name in ("param", "master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        array = getattr(state, name)
        if array is not None and array.data_ptr() % 16:
            raise ValueError(f"{name}: got address {array.data_ptr():#x}, wanted a multiple of 16")


def _check_move(send: torch.Tensor, table: SegmentTable) -> Backend:
    backend = _check("send", send, send.dtype, send.numel(), send.device)
    _check_end(table, send)
    return backend


def _check_end(table: SegmentTable, array: torch.Tensor) -> None:
    if table.end > array.numel():
        raise ValueError(f"table: ends at {table.end}, wanted at most {array.numel()}")
    if table.device_rows.device != array.device:
        raise ValueError(f"table: got device {table.device_rows.device}, wanted {array.device}")


def _check(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, numel: int, device: torch.device
) -> Backend:
    check_device(name, tensor.device)
    if tensor.dtype != dtype or dtype not in SUFFIX:
        wanted = dtype if dtype in SUFFIX else " or ".join(map(str, SUFFIX))
        raise TypeError(f"{name}: got {tensor.dtype}, wanted {wanted}")
    _check_like(name, tensor, dtype, numel, device)
    return BACKENDS[device.type]


def _check_like(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, numel: int, device: torch.device
) -> None:
    if tensor.device != device:
        raise ValueError(f"{name}: got device {tensor.device}, wanted {device}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: got {tensor.dtype}, wanted {dtype}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: got shape {tuple(tensor.shape)} with strides {tensor.stride()}, "
            "wanted one contiguous dimension"
        )
    if tensor.numel() != numel:
        raise ValueError(f"{name}: got {tensor.numel()} elements, wanted {numel}")
