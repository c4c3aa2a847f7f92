"""bench_scale.py runs, says what it must, and its dry run is the product. Never a word about
timings."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_tools import BENCHMARKS, check_bars, check_spread, load_module, only_report, run
from ranks import Rank, RankPool

import fusedshard
from fusedshard.layout import ParamSpec, build_layout, owned_ranges

needs_meta_collectives = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::alltoall_base_", "Meta"),
    reason="this torch's collectives take no meta tensors",
)
MODELS = ("small dense", "small experts", "50 tensors")
DTYPES = ("bf16", "fp32")


@needs_meta_collectives
def test_quick_form(tmp_path: Path) -> None:
    printed = run(tmp_path, str(BENCHMARKS / "bench_scale.py"))
    report = only_report(tmp_path, "scale")
    rows = {(row["model"], row["dtype"], row["ranks"]): row for row in report["results"]}
    assert list(rows) == list(itertools.product(MODELS, DTYPES, (8, 64)))
    for row in rows.values():
        for spread in (*row["seconds"].values(), *row["step_seconds"].values()):
            check_spread(spread, positive=False)
        assert {len(samples) for samples in row["samples"].values()} == {2}
        parts = zip(*(row["samples"][f"step: {name}"] for name in row["step_seconds"]), strict=True)
        assert row["samples"]["step"] == pytest.approx([sum(step) for step in parts])
        # Each bucket there and back, and what the ranks agree on.
        buckets = row["buckets"]
        there = "all_to_all" if row["dtype"] == "bf16" else "reduce_scatter"
        assert row["collectives"] == {there: buckets, "all_gather": buckets, "status": 1}
        assert f"{row['padding_waste'] * 100:.3f}" in printed
    check_bars(report, printed)
    assert len(report["bars"]) == 4 and "not judged: --quick" in printed
    assert (tmp_path / "scale.png").stat().st_size > 10_000
    # 1,000 elements take 1,024 at 128-byte boundaries, 50 of them 51,200. Shards begin at such
    # boundaries, too, and of bf16 numbers at whole blocks of 128 remainders: 800 of them take 896.
    elements = {("bf16", 8): 51_200, ("bf16", 64): 64 * 896, ("fp32", 8): 51_200}
    elements["fp32", 64] = 51_200
    for (dtype, ranks), padded in elements.items():
        row = rows[MODELS[2], dtype, ranks]
        size, shard = 2 if dtype == "bf16" else 4, padded // ranks
        assert row["padding_waste"] == pytest.approx(padded / 50_000 - 1)
        assert (row["buckets"], row["largest_bucket_bytes"]) == (1, padded * size)
        assert row["largest_shard_bytes"] == shard * size
        # Two fp32 moments; of bf16 a remainder of two bytes and four for each 128 of them.
        masters = 2 * shard + 4 * math.ceil(shard / 128) if dtype == "bf16" else 0
        assert row["state_bytes"] == 8 * shard + masters


def optimizer_after_a_step(params: list[torch.nn.Parameter], group: Any) -> fusedshard.AdamW:
    optimizer = fusedshard.AdamW(params, process_group=group, bucket_cap_mb=0.5)
    optimizer.stats.reset()
    torch.autograd.backward(params, [torch.zeros_like(param) for param in params])
    optimizer.step()
    return optimizer


def account_of(optimizer: fusedshard.AdamW) -> dict[str, Any]:
    """What does not depend on the device."""
    kinds = [flat.kind.partition("@")[0] for flat in optimizer.layout.flats]
    memory, stats = optimizer.memory(), optimizer.stats
    memory.pop("receive")  # over gloo without a rank's own chunk
    buckets = [flat.buckets for flat in optimizer.layout.flats]
    return {"kinds": kinds, "buckets": buckets, "memory": memory, "sent": dict(stats.sent_bytes)}


SHAPES = [(300, 700), (5,), (1000, 64), (64,)]


def real_account(rank: Rank) -> dict[str, Any]:
    params = [torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in SHAPES]
    return account_of(optimizer_after_a_step(params, rank.group))


@needs_meta_collectives
def test_the_dry_run_does_what_a_real_rank_does(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ranks.run(2, real_account)[0]
    with load_module(monkeypatch, "scale_dry_run").dry_rank(2) as space:
        tensors = [space.new(math.prod(shape), torch.bfloat16).view(shape) for shape in SHAPES]
        params = [torch.nn.Parameter(tensor) for tensor in tensors]
        optimizer = optimizer_after_a_step(params, None)
        assert optimizer.stats.calls["status"] == 1
        dry = account_of(optimizer)
    assert dry == real
    assert len(real["buckets"]) > 1


@needs_meta_collectives
def test_a_dry_rank_hears_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with load_module(monkeypatch, "scale_dry_run").dry_rank(5):
        comm = fusedshard.comm.Communicator(None, fusedshard.stats.Stats())
        assert (comm.rank, comm.world_size) == (0, 5)
        assert comm.gather_objects({"a": 1}) == [{"a": 1}] * 5
    assert not torch.distributed.is_initialized()
    assert "meta" not in fusedshard.native.BACKENDS


@pytest.mark.parametrize("world_size", [1, 3, 64, 1000])
def test_owned_numels(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_module(monkeypatch, "bench_scale")
    numels = [0, 1, 1000, 70_000, 33, 3_000_000, 64]
    specs = [ParamSpec(i, numel, "float32@cpu", 4) for i, numel in enumerate(numels)]
    layout = build_layout(specs, world_size, 1 << 20)
    owned = [owned_ranges(layout, rank).values() for rank in range(world_size)]
    want = [sum(stop - start for start, stop in itertools.chain(*ranges)) for ranges in owned]
    assert sum(want) == sum(numels)
    assert bench.owned_numels(layout).tolist() == want


@pytest.mark.parametrize(("dtype", "block"), [("bf16", 128), ("fp32", 1)])
@pytest.mark.parametrize(("world_size", "most"), [(1024, 0.02), (16384, 0.25)])
def test_padding_of_70_billion_parameters(
    world_size: int, most: float, dtype: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In per cent: the bar is 1 at 1,024 ranks. README.md says what it is at more."""
    bench = load_module(monkeypatch, "bench_scale")
    shapes, size = bench.models(quick=False)["70 B, dense"], bench.DTYPES[dtype].itemsize
    assert (len(shapes), bench.numel_of(shapes)) == (723, 70_553_706_496)
    specs = [ParamSpec(i, math.prod(s), dtype, size, block) for i, s in enumerate(shapes)]
    layout = build_layout(specs, world_size, bench.CAP_BYTES)
    padded = sum(bucket.numel for flat in layout.flats for bucket in flat.buckets)
    waste = bench.waste_of(layout, bench.numel_of(shapes)) * 100
    assert waste == pytest.approx((padded / 70_553_706_496 - 1) * 100)
    assert 0 < waste < most
    assert bench.owned_numels(layout).sum() == 70_553_706_496


def test_bars_are_those_of_one_model_and_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_module(monkeypatch, "bench_scale")
    rows = [
        {
            "model": model,
            "dtype": "bf16",
            "ranks": ranks,
            "padding_waste": waste,
            "seconds": {"construction": {"median": 2.5, "lower": 1.0, "upper": 3.0}},
        }
        for model, ranks, waste in [("a", 8, 0.5), ("a", 64, 0.009), ("b", 64, 0.5)]
    ]
    slow, narrow = bench.bars_of(rows, "a", 64)
    assert (slow.met, slow.wanted, slow.measured.median) == (False, "<= 2.0", 2.5)
    assert (narrow.met, narrow.wanted) == (True, "<= 1.0")
    assert narrow.measured.median == pytest.approx(0.9)
    assert "a, bf16, 64 ranks" in narrow.claim


def test_a_trillion_parameters_in_thousands_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_module(monkeypatch, "bench_scale")
    shapes = bench.models(quick=False)["1 T, 16 experts"]
    assert len(shapes) == 5283 and 1.0e12 < bench.numel_of(shapes) < 1.03e12
