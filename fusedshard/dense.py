"""What a tensor's memory holds: its elements, and nothing else?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# What each rank has sent, in rank order: 1-D tensors, or the rows of one 2-D tensor.
Chunks = Sequence[torch.Tensor] | torch.Tensor
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether its operations are intercepted, so that its address is not that of its values."""
    if type(tensor) in _PLAIN_TYPES:  # as of every parameter and gradient, at each step
        return False
    return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has memory of its own that holds its elements."""
    return tensor.layout == torch.strided and not tensor.is_quantized and not is_wrapper(tensor)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory without gaps or overlaps, in any order."""
    if tensor.numel() == 0:
        return True
    expected = 1
    dims = [(s, n) for s, n in zip(tensor.stride(), tensor.size(), strict=True) if n != 1]
    for stride, size in sorted(dims):
        if stride != expected:
            return False
        expected *= size
    return True


def shows_its_memory(tensor: torch.Tensor) -> bool:
    """Whether its values are those that kernels read: a lazily negated or conjugated view shows
    others than its memory holds, and a tensor of efficient zeros has none."""
    return not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())


def distance_of(chunks: Chunks) -> int:
    """Elements from the beginning of each to that of the next.

    Raises:
        ValueError: it is not the same for all.
    """
    if isinstance(chunks, torch.Tensor):
        return chunks.stride(0)
    addresses = [chunk.data_ptr() for chunk in chunks]
    stride = addresses[1] - addresses[0] if len(chunks) > 1 else 0
    if addresses != [addresses[0] + i * stride for i in range(len(chunks))]:
        raise ValueError("chunks: got scattered ones, wanted equal distances on this device")
    return stride // chunks[0].element_size()
