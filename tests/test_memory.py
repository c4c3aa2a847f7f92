"""Bytes: what each rank holds, what it sends, and what construction needs on the way."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from ranks import Rank, RankPool
from training import gradient, make_params

import fusedshard
from fusedshard.layout import owned_ranges

# Sizes as in a small transformer: 2.9 M elements.
SHAPES = [(512, 512)] * 4 + [(512,)] * 6 + [(2048, 512), (2048,), (512, 1024), (1000, 300)]
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES)
CAP_MB = 2


def _one_step(rank: Rank, mode: str, reduction: str) -> Any:
    params = make_params(SHAPES)
    optimizer = fusedshard.AdamW(
        params, mode=mode, reduction=reduction, bucket_cap_mb=CAP_MB, process_group=rank.group
    )
    optimizer.stats.reset()
    for index, param in enumerate(params):
        param.grad = gradient(param, 0, index, rank.rank)
    optimizer.step()
    shown = sum(
        state[name].nbytes
        for state in optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq")
    )
    stats = dict(optimizer.stats.calls), dict(optimizer.stats.sent_bytes)
    return optimizer.memory(), optimizer.layout, stats, shown


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sharded_memory_adds_up(ranks: RankPool, world_size: int) -> None:
    results = ranks.run(world_size, _one_step, "sharded", "ordered")
    layout = results[0][1]
    padded = layout.padded_numel
    assert NUMEL <= padded < 1.01 * NUMEL, "padding is to stay under 1 %"
    largest = max(bucket.numel for flat in layout.flats for bucket in flat.buckets)
    for memory, other_layout, _, _ in results:
        assert other_layout == layout
        assert memory == {
            "parameters": 4 * padded,
            "moments": 8 * padded // world_size,
            "masters": 0,
            "reduced": 4 * padded // world_size,
            "send": 2 * 4 * largest,
            "receive": 2 * 4 * largest * (world_size - 1) // world_size,
        }
        assert memory["moments"] <= 1.01 * 8 * NUMEL / world_size
    # What `state` shows is what a rank owns, and together that is each moment once.
    assert sum(shown for *_, shown in results) == 8 * NUMEL


def test_replicated_memory_adds_up(ranks: RankPool) -> None:
    for memory, layout, _, shown in ranks.run(2, _one_step, "replicated", "ordered"):
        assert memory["moments"] == 8 * layout.padded_numel
        assert memory["reduced"] == 0
        assert shown == 8 * NUMEL


def test_one_rank_needs_no_wire_buffers() -> None:
    params = make_params(SHAPES)
    optimizer = fusedshard.AdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    memory = optimizer.memory()
    assert (memory["reduced"], memory["send"], memory["receive"]) == (0, 0, 0)
    assert optimizer.stats.calls == {}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("mode", "reduction", "expected"),
    [
        ("sharded", "ordered", {"all_to_all": 1, "all_gather": 1}),
        ("sharded", "backend", {"reduce_scatter": 1, "all_gather": 1}),
        ("replicated", "ordered", {"all_to_all": 1, "all_gather": 1}),
        ("replicated", "backend", {"all_reduce": 2}),
    ],
)
def test_wire_volume(
    ranks: RankPool, world_size: int, mode: str, reduction: str, expected: dict[str, int]
) -> None:
    for _, layout, (calls, sent), _ in ranks.run(world_size, _one_step, mode, reduction):
        share = 4 * layout.padded_numel * (world_size - 1) // world_size
        assert calls.pop("status") == 1
        assert sent.pop("status") == (world_size - 1) * (
            8 + 1 + 1 + layout.bucket_count + len(SHAPES)
        )
        assert calls == dict.fromkeys(expected, layout.bucket_count)
        assert sent == {name: shares * share for name, shares in expected.items()}


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_element_has_one_owner(ranks: RankPool, world_size: int) -> None:
    (_, layout, _, _) = ranks.run(world_size, _one_step, "sharded", "ordered")[0]
    owners = [torch.zeros(shape).flatten() for shape in SHAPES]
    for rank in range(world_size):
        for index, ranges in owned_ranges(layout, rank).items():
            for start, stop in ranges:
                owners[index][start:stop] += 1
    assert all(bool((count == 1).all()) for count in owners)


# Builds 40 parameters of 4 MiB and an optimizer with 8 MiB buckets, and prints by how many bytes
# the peak of resident memory rose during construction.
_CONSTRUCTION = """
import torch, fusedshard

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

torch.set_num_threads(1)
warm = fusedshard.AdamW([torch.nn.Parameter(torch.ones(8))])
params = [torch.nn.Parameter(torch.full((1 << 20,), float(i))) for i in range(40)]
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # resets the peak
before = status("VmRSS")
optimizer = fusedshard.AdamW(params, bucket_cap_mb=8)
print(status("VmHWM") - before)
assert [p[-1].item() for p in params] == [float(i) for i in range(40)]
assert len(optimizer.layout.flats) == 20
"""


def test_construction_holds_one_bucket_more_than_the_parameters() -> None:
    # A fixed threshold makes malloc return each parameter to the system as it is released.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", _CONSTRUCTION]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    mib = int(done.stdout) / 2**20
    assert mib < 8 + 6, "160 MiB of parameters, buckets of 8 MiB"
