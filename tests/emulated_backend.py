"""The optimizer's own wrapper on emulated CUDA kernels: they take the place of the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from emulation import load

from fusedshard.native import BACKENDS, CudaBackend

STREAM = 77  # a handle that is only noted


class EmulatedBackend(CudaBackend):
    """`CudaBackend` for tensors in host memory.

    Attributes:
        graph: whether the current stream is said to be captured.
    """

    def __init__(self, functions: Any) -> None:
        super().__init__(functions)
        self.graph = False

    def where(self, device: torch.device) -> tuple[int, int]:
        return 0, STREAM

    def about_to_free(self, tensor: torch.Tensor) -> None:
        """Its memory has no streams."""

    def note_stream(self, device: torch.device, streams: set[Any]) -> None:
        """Nor has what is done to it."""

    def wait_for_streams(self, device: torch.device, streams: set[Any]) -> None:
        """Likewise."""

    def capturing(self) -> bool:
        return self.graph


@contextmanager
def emulated_kernels(functions: Any) -> Iterator[EmulatedBackend]:
    """Run CPU tensors on the CUDA kernels of a module that `emulation.build` made, or on those of
    the module at a path."""
    if isinstance(functions, Path):
        functions = load(functions)
    backend = EmulatedBackend(functions)
    with mock.patch.dict(BACKENDS, cpu=backend):
        yield backend


def is_emulated() -> bool:
    return isinstance(BACKENDS["cpu"], EmulatedBackend)
