"""One rank of a job of any size without its memory, wire and kernels: Python and layout are left.

Tensors are of torch's meta device, whose operations move nothing, and have addresses of their own;
collectives are those of torch's fake process group; and what the ranks say to each other is what
this one says. All else is fusedshard as it is, on the way that it takes on a GPU over NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fusedshard import comm, flat, holdings
from fusedshard.layout import Slot
from fusedshard.native import BACKENDS, CudaBackend

META = torch.device("meta")
ALIGNMENT = 512  # as torch's allocator of GPU memory


class AddressSpace:
    """Meta tensors that lie apart: all are stretches of one that is larger than any memory."""

    def __init__(self) -> None:
        self._all = torch.empty(1 << 60, dtype=torch.uint8, device=META)
        self._end = ALIGNMENT  # address 0 means that there is nothing

    def new(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        tensor = self._all.narrow(0, self._end, nbytes).view(dtype)
        self._end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return tensor.data  # else one change would count as a change of all


class _NoKernels:
    """Native functions that return at once."""

    TILE_ELEMENTS = 4096  # kTileElements in kernels.h: not every build has the CUDA part

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _launch_nothing


def _launch_nothing(*arguments: object) -> None:
    """As a launch, without the work."""


class DryBackend(CudaBackend):
    """`CudaBackend` for meta tensors, with one stream."""

    def __init__(self, space: AddressSpace) -> None:
        super().__init__(_NoKernels())  # type: ignore[arg-type]
        self._space = space

    def problem(self, device: torch.device) -> str:
        return ""

    def where(self, device: torch.device) -> tuple[int, int]:
        return 0, 0

    def about_to_free(self, tensor: torch.Tensor) -> None:
        """There is nothing to free."""

    def note_stream(self, device: torch.device, streams: set[Any]) -> None:
        """Nothing is queued."""

    def wait_for_streams(self, device: torch.device, streams: set[Any]) -> None:
        """Likewise."""

    def capturing(self) -> bool:
        return False

    def flat_memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._space.new(numel, dtype)


class MirrorGloo:
    """As ProcessGroupGloo, among ranks that all send what they are sent."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._expected: dict[tuple[int, int], torch.Tensor] = {}

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        (self._expected[peer, tag],) = tensors

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._expected.pop((peer, tag)).copy_(tensors[0])

    def _allgather_base(self, out: torch.Tensor, own: torch.Tensor) -> _Done:
        out.view(self._size, -1).copy_(own)
        return _Done()


class _Done:
    def wait(self) -> None:
        """It is there."""


def collectives_take_meta_tensors() -> bool:
    """Which torch 2.6's do not."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("c10d::alltoall_base_", "Meta")


@contextmanager
def dry_rank(world_size: int) -> Iterator[AddressSpace]:
    """Be rank 0 of so many ranks, in the default group, with the meta device to train on."""
    if not collectives_take_meta_tensors():
        raise RuntimeError(f"torch {torch.__version__}: its collectives take no meta tensors")
    space = AddressSpace()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    group: Any = dist.group.WORLD
    fake = group._get_backend(torch.device("cpu"))
    group._register_backend(META, dist.ProcessGroup.BackendType.CUSTOM, fake)
    comm._connections[group] = MirrorGloo(world_size)
    try:
        with (
            mock.patch.dict(BACKENDS, {META.type: DryBackend(space)}),
            mock.patch.object(flat, "view_as_param", _view_as_param),
            mock.patch.object(holdings, "view_as_param", _view_as_param),
        ):
            yield space
    finally:
        dist.destroy_process_group()


def _view_as_param(memory: torch.Tensor, slot: Slot, like: torch.Tensor) -> torch.Tensor:
    """As `flat.view_as_param`, but in the same storage: one of its own has no place on the meta
    device."""
    stretch = memory.narrow(0, slot.start, slot.numel)
    return stretch.as_strided(like.size(), like.stride(), stretch.storage_offset())
