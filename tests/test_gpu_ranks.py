"""Ranks that train on a GPU: over NCCL, and over gloo by way of host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_rank import OPTIONS, SHAPES, STEPS, WAYS, result_of
from gpu_tools import DEVICE, NoAnswer, require_gpu, run_ranks
from training import assert_close, assert_same_bits, train_reference

require_gpu()
pytestmark = pytest.mark.gpu

needs_nccl = pytest.mark.skipif(not dist.is_nccl_available(), reason="torch has no NCCL")
REFUSED = "Duplicate GPU detected"


def check_two_ranks(ranks: list[dict[tuple[str, str], Any]]) -> None:
    """All ranks have the same, both modes agree to the bit, and the mean gradients were used."""
    assert_same_bits(ranks[1], ranks[0])
    assert_same_bits(ranks[0]["sharded", "ordered"], ranks[0]["replicated", "ordered"])
    options = {name: value for name, value in OPTIONS.items() if name != "bucket_cap_mb"}
    reference = train_reference(2, "AdamW", SHAPES, STEPS, **options)
    for way in WAYS:
        assert_close(ranks[0][way], reference)


@needs_nccl
@pytest.mark.parametrize("device_id", [False, True], ids=["device unknown", "device given"])
def test_one_nccl_rank_has_the_bits_of_a_cpu(tmp_path: Path, device_id: bool) -> None:
    (rank,) = run_ranks(tmp_path / "ranks", 1, backend="nccl", device=DEVICE, device_id=device_id)
    for mode, reduction in WAYS:
        want = result_of("cpu", 0, mode=mode, reduction=reduction)
        assert_same_bits(rank[mode, reduction], want)


@needs_nccl
def test_two_nccl_ranks(tmp_path: Path) -> None:
    try:
        ranks = run_ranks(tmp_path / "ranks", 2, backend="nccl", device=DEVICE)
    except NoAnswer as error:
        if REFUSED in str(error):
            version = ".".join(map(str, torch.cuda.nccl.version()))
            pytest.skip(f"NCCL {version} refuses two ranks on one card: {REFUSED}")
        raise
    check_two_ranks(ranks)


def test_two_gloo_ranks_have_the_bits_of_cpus(tmp_path: Path) -> None:
    ours = run_ranks(tmp_path / "ours", 2, backend="gloo", device=DEVICE)
    check_two_ranks(ours)
    theirs = run_ranks(tmp_path / "theirs", 2, backend="gloo", device="cpu")
    for way in WAYS:
        if way[1] == "ordered":
            assert_same_bits(ours[0][way], theirs[0][way])
