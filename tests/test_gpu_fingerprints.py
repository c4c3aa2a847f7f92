"""Fingerprints on a GPU are the CPU's, wherever the tensors lie."""

from __future__ import annotations

import pytest
import torch
from fingerprint_oracle import BLOCK, ROUND, random_bytes
from gpu_tools import DEVICE, placed, require_gpu

from fusedshard.kernels import FingerprintTable, fingerprints

require_gpu()
pytestmark = pytest.mark.gpu

SIZES = [0, 1, 7, 8, 9, 17 * 257, 40 * BLOCK + 77]
SIZES += [edge + by for edge in (ROUND, BLOCK) for by in (-9, -1, 0, 1, 8)]


@pytest.mark.parametrize("offset", range(17))
def test_sizes_at_any_address(offset: int) -> None:
    tensors = [random_bytes(size) for size in SIZES]
    there = [placed(tensor, offset=offset) for tensor in tensors]
    assert fingerprints(there).tolist() == fingerprints(tensors).tolist()


def test_many_tensors_in_one_call() -> None:
    sizes = torch.randint(0, 2 * BLOCK, (3000,), generator=torch.Generator().manual_seed(0))
    tensors = list(random_bytes(int(sizes.sum())).split(sizes.tolist()))
    there = [tensor.to(DEVICE) for tensor in tensors]
    assert fingerprints(there).tolist() == fingerprints(tensors).tolist()


def test_more_blocks_than_a_card_holds_at_once() -> None:
    tensor = random_bytes(10_000 * BLOCK + 5)
    assert fingerprints([tensor.to(DEVICE)]).item() == fingerprints([tensor]).item()


def test_a_table_tells_what_the_current_stream_has_written() -> None:
    x = torch.zeros(1 << 20)
    there = x.to(DEVICE)
    table = FingerprintTable([there, there[:5]])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        there[-1] = 3.0
        answer = table.fingerprints()
    x[-1] = 3.0
    assert answer.device.type == "cpu"
    assert answer.tolist() == fingerprints([x, x[:5]]).tolist()


def test_tensors_of_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=rf"tensors\[1\]: got device {DEVICE}, wanted cpu"):
        fingerprints([torch.ones(3), torch.ones(3, device=DEVICE)])
