"""Flat memory: zeroed, on huge pages, as long as somebody holds it, and no longer."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernel_tools import FLOATS

from fusedshard.kernels import flat_memory

HUGE_PAGE = 2 << 20
GIB = 1 << 30
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("numel", [1, 31, 1000, 3_000_001])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8], ids=str)
def test_is_zero_and_begins_on_a_huge_page(dtype: torch.dtype, numel: int) -> None:
    flat = flat_memory(numel, dtype)
    assert (flat.dtype, flat.shape, flat.stride()) == (dtype, (numel,), (1,))
    assert flat.data_ptr() % HUGE_PAGE == 0
    assert not flat.any()
    flat[-1] = 1
    assert flat.sum() == 1


def vm_flags(address: int) -> list[str]:
    """The kernel's flags of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping holds {address:#x}")


@pytest.mark.skipif(not SWITCH.exists(), reason="this Linux has no transparent huge pages")
def test_is_advised_for_huge_pages_to_its_end() -> None:
    flat = flat_memory(5_000_000, torch.float32)
    other = torch.zeros(5_000_000)
    assert "hg" in vm_flags(flat.data_ptr())
    assert "hg" in vm_flags(flat.data_ptr() + flat.nbytes - 1)
    assert "hg" not in vm_flags(other.data_ptr())


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_deterministic_mode_does_not_fill_it() -> None:
    before = resident_bytes()
    flat = flat_memory(GIB // 4, torch.float32)
    assert resident_bytes() - before < GIB // 8
    assert not flat[:: 1 << 22].any()


def status_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def resident_bytes() -> int:
    return status_bytes("VmRSS")


def mapped_bytes() -> int:
    gc.collect()
    return status_bytes("VmSize")


def test_is_unmapped_with_its_last_tensor() -> None:
    before = mapped_bytes()
    flat = flat_memory(GIB // 4, torch.float32)
    flat[:100] = 7.0
    view = flat[50:54]
    assert mapped_bytes() - before > GIB // 2
    del flat
    assert mapped_bytes() - before > GIB // 2
    assert view.tolist() == [7.0] * 4
    del view
    assert mapped_bytes() - before < GIB // 2


def test_a_slice_of_the_storage_keeps_the_memory() -> None:
    """As parameters do, which have storages of their own within it."""
    before = mapped_bytes()
    flat = flat_memory(GIB // 4, torch.float32)
    flat[100:104] = 7.0
    part = flat.untyped_storage()[400:416]
    tensor = flat.new_empty(0).set_(part, 0, (4,), (1,))
    del flat, part
    assert mapped_bytes() - before > GIB // 2
    assert tensor.tolist() == [7.0] * 4
    del tensor
    assert mapped_bytes() - before < GIB // 2


@pytest.mark.parametrize("numel", [0, -1])
def test_refuses_a_size(numel: int) -> None:
    with pytest.raises(ValueError, match=f"bytes: got {4 * numel}, wanted above 0"):
        flat_memory(numel, torch.float32)


def test_more_than_the_machine_has() -> None:
    with pytest.raises(RuntimeError, match=f"cannot map {1 << 55} bytes: "):
        flat_memory(1 << 53, torch.float32)
