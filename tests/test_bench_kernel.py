"""bench_kernel.py runs, says what it must, and counts rightly. Never a word about timings."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_tools import BENCHMARKS, check_bars, check_spread, load_module, only_report, run

from fusedshard import _C

REFERENCES = {"roofline", "read floor"}
TORCH = {f"torch AdamW {kind}" for kind in ("fused", "foreach", "for-loop")}
DEEPSPEED = "DeepSpeedCPUAdam"
BYTES = {
    "read floor": 16,
    "bf16 + remainder, fp32 moments": 28,
    "bf16 + remainder, bf16 moments": 20,
    "bf16 + remainder, 8-bit moments": 16,
    "bf16 alone, bf16 moments": 16,
    "bf16 + fp32 master, fp32 moments": 32,
    "fp16 + fp32 master, fp32 moments": 32,
    "fp32, 8-bit moments": 16,
}
FORMATS = BYTES.keys() - {"read floor"}
SIZES = (1024, 5000)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    return partial(load_module, monkeypatch)


def check_rows(result: dict[str, Any], isas: set[str], printed: str) -> None:
    rows = {row["name"]: row for row in result["rows"]}
    mixed = {f"{isa}: {formats}" for isa, formats in itertools.product(isas, FORMATS)}
    wanted = isas | mixed | REFERENCES | TORCH | {"torch AdamW fused, our memory"}
    assert wanted <= set(rows) <= wanted | {DEEPSPEED}
    for name, row in rows.items():
        assert len(row["samples"]) == 2 and name in printed
        check_spread(row["seconds"])
        kind = name if name == "read floor" else name.partition(": ")[2]
        assert row["bytes_an_element"] == BYTES.get(kind, 28)
        bandwidth = row["bytes_an_element"] * result["elements"] / row["seconds"]["median"] / 1e9
        assert row["gigabytes_per_second"] == pytest.approx(bandwidth)
        assert {"roofline_samples", "torch_fused_samples"} <= set(row) or name not in mixed
    assert rows["roofline"]["share_of_roofline"]["median"] == 1
    assert rows["torch AdamW fused"]["speed_against_torch_fused"]["median"] == 1


def check_small(report: dict[str, Any]) -> None:
    for result, count in zip(report["small_tensors"], (1, 2), strict=True):
        assert (result["threads"], result["tensors"]) == (count, 50)
        rows = {row["name"]: row for row in result["rows"]}
        assert {"fusedshard.AdamW"} | TORCH <= set(rows) <= {"fusedshard.AdamW", DEEPSPEED} | TORCH
        assert rows["torch AdamW foreach"]["speed_against_torch_foreach"]["median"] == 1
        for row in rows.values():
            assert len(row["samples"]) == 2
            check_spread(row["seconds"])
            assert row["largest_difference_from_fp64"] < 2e-6, "not all did the same work"


def check_distances(distances: dict[str, float], isas: set[str]) -> None:
    """Parameters of 2 to 4, whose bf16 neighbours are 2^-6 apart, moved by 0.003."""
    assert isas | TORCH < set(distances)
    for name, distance in distances.items():
        formats = name.partition(": ")[2]
        limit = 2e-6 if not formats else 2**-7
        if "bf16 alone" in formats:
            limit = 3 * 2**-6  # up or down at random, in each of three steps
        assert 0 < distance < limit, name


def test_kernel(tmp_path: Path) -> None:
    sizes = ("--elements", *map(str, SIZES[::-1]))
    options = ("--isa", "all", *sizes, "--repeats", "2", "--idle-wait", "0.01")
    printed = run(tmp_path, str(BENCHMARKS / "bench_kernel.py"), *options)
    report = only_report(tmp_path, "kernel")
    isas = {f"fusedshard {isa}" for isa in _C.cpu_variants()}
    places = [(result["threads"], result["elements"]) for result in report["results"]]
    assert places == [(count, size) for size in SIZES for count in (1, 2)]
    for result in report["results"]:
        check_rows(result, isas, printed)
        assert result["copies"] == 3, "as many as --quick takes"
    assert report["device_name"] == report["machine"]["cpu"] and report["left_out"] == []
    check_small(report)
    check_distances(report["largest_difference_from_fp64"], isas)
    bars = report["bars"]
    assert len(bars) == 2 * 3 + any(DEEPSPEED in bar["claim"] for bar in bars)
    assert not any("ceiling" in bar for bar in bars), "of small arrays it says nothing"
    check_bars(report, printed)


def test_copies_take_turns(module: Any) -> None:
    copies = module("cold_copies")
    rotation = copies.Rotation(3)
    assert [rotation.take("abc") for _ in range(2)] == [["a", "b", "c"]] * 2
    rotation = copies.Rotation(700)
    taken = rotation.take(range(700)) + rotation.take(range(700))
    assert taken == [*range(700), *range(2 * copies.MOST_CALLS - 700)]


def test_as_many_copies_as_go_through_the_cache(module: Any, tmp_path: Path) -> None:
    copies = module("cold_copies")
    assert copies.copies_needed(1024, 16, 1 << 20) == 64
    assert copies.copies_needed(1000, 16, 1 << 20) == 66
    assert copies.copies_needed(1 << 20, 16, 1 << 20) == 1
    assert copies.last_level_cache(tmp_path) == copies.UNKNOWN_CACHE
    for index, size in enumerate(("48K", "1024K", "32768K", "32K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert copies.last_level_cache(tmp_path) == 32 << 20


@pytest.mark.parametrize("flat", [False, True])
def test_copies_lie_in_memory_of_their_own(module: Any, flat: bool) -> None:
    arrays = module("cold_copies").allocate(1000, 3, flat=flat)
    stretches = sorted((a.data_ptr(), a.data_ptr() + a.nbytes) for copy in arrays for a in copy)
    assert len(stretches) == 3 * 4 and {stop - start for start, stop in stretches} == {4000}
    for (_, stop), (start, _) in itertools.pairwise(stretches):
        assert stop <= start
    assert all(copy.grad.min() >= 0.5 and copy.exp_avg.count_nonzero() == 0 for copy in arrays)


def test_parts_of_a_shard_in_mixed_precision(module: Any) -> None:
    """300 elements from the third block of 128 on, which end in the fifth."""
    mixed = module("mixed_arrays")
    for configuration in mixed.CONFIGURATIONS:
        whole, _ = mixed.allocate(configuration, 1024)
        part = mixed.part(whole, 256, 300)
        arrays = {
            "param": (256, 300),
            "exp_avg": (256, 300),
            "exp_avg_sq": (256, 300),
            "master": (256, 300),
            "checks": (2, 3),
        }
        for name, (start, length) in arrays.items():
            found, source = getattr(part, name), getattr(whole, name)
            assert (found is None) == (source is None)
            if found is not None:
                assert found.data_ptr() == source[start:].data_ptr() and len(found) == length
        for found, source in zip(part.exponents, whole.exponents, strict=True):
            assert (found is None) == (source is None)
            if found is not None:
                assert found.data_ptr() == source[2:].data_ptr() and len(found) == 3
        assert configuration.memory_bytes == 4 + sum(
            array.itemsize
            for name in list(arrays)[:4]
            if (array := getattr(whole, name)) is not None
        )


def test_shares_of_a_roofline_that_moves_other_bytes(module: Any) -> None:
    """28 bytes in the time in which a copy moves as many: as on a GPU."""
    measure = module("kernel_measure")
    works = {
        name: measure.Measured([], measure.Rotation(1), moved)
        for name, moved in (("roofline", 8), ("torch AdamW fused", 28), ("ours", 28))
    }
    samples = {"roofline": [8.0, 16.0], "torch AdamW fused": [56.0, 112.0], "ours": [28.0, 56.0]}
    rows = {row["name"]: row for row in measure.rows(samples, 10**9, works)}
    assert rows["roofline"]["share_of_roofline"]["median"] == 1
    assert rows["ours"]["share_of_roofline"]["median"] == 1
    assert rows["ours"]["speed_against_torch_fused"]["median"] == 2
    assert rows["ours"]["gigabytes_per_second"] == pytest.approx(28 / 42)
    (row,) = measure.rows_of_configuration(samples, 10**9, works)
    assert (row["name"], row["roofline_samples"]) == ("ours", [8.0, 16.0])


def test_bars_and_their_ceilings(module: Any) -> None:
    kernel = module("bench_kernel")
    samples = {
        "roofline": [9.6, 19.2],
        "read floor": [8.0, 16.0],
        "torch AdamW fused": [16.0, 32.0],
        DEEPSPEED: [11.0, 22.0],
        "ours": [10.0, 20.0],
    }
    bars = [bar.as_json() for bar in kernel.fp32_bars(samples, "ours", 1, 1 << 25, "cpu")]
    assert [bar["wanted"] for bar in bars] == [">= 1.6", ">= 1.2", ">= 0.95"]
    assert [bar["measured"]["median"] for bar in bars] == pytest.approx([1.6, 1.1, 0.96])
    assert [bar["met"] for bar in bars] == [True, False, True]
    assert [bar["ceiling"]["median"] for bar in bars[:2]] == [2.0, 1.375]
    assert all("32 Mi fp32 elements, 1 thread" in bar["claim"] for bar in bars)
    (smaller, *_) = kernel.fp32_bars(samples, "ours", 1, 1 << 14, "cpu")
    assert "ceiling" not in smaller.as_json()
    two = kernel.fp32_bars(samples, "ours", 2, 1 << 25, "cpu")
    assert [bar.wanted for bar in two] == [">= 1.4", ">= 0.9"]
    assert kernel.fp32_bars(samples, "ours", 1, 1 << 25, "cuda") == []
    small = {"torch AdamW foreach": [9.0, 9.0], "fusedshard.AdamW": [3.0, 3.0]}
    assert kernel.small_bar(small, 1, 1000).met
    assert not kernel.small_bar(small | {"fusedshard.AdamW": [3.1, 3.1]}, 1, 1000).met


def test_what_a_gpu_is_measured_with(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock gets one update at a time; what needs a CPU is left out."""
    kernel, measure = module("bench_kernel"), module("kernel_measure")
    contenders = module("kernel_contenders")
    timed: list[Callable[[], object]] = []

    class Clock:
        def seconds(self, work: Callable[[], object]) -> float:
            work()
            timed.append(work)
            return 1.0

    monkeypatch.setattr(kernel, "DeviceClock", Clock)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(contenders, "is_installed", lambda package: False)
    command = ["bench_kernel.py", "--quick", "--device", "cuda", "--repeats", "1"]
    monkeypatch.setattr("sys.argv", command)
    plan = kernel.plan_of(kernel.parse())
    assert (plan.device, plan.names, plan.threads) == ("cuda", ["fusedshard"], [1])
    names = [contender.name for contender in contenders.contenders([None], "cuda")]
    assert names == ["fusedshard", *(f"torch AdamW {k}" for k in ("fused", "foreach", "for-loop"))]
    here = measure.Plan(**vars(plan) | {"device": "cpu"})
    works = measure.fp32_works(here, measure.Memory(here, 1000))
    for work in works.values():
        assert work.seconds(here.device_seconds) == 1.0
    assert len(timed) == len(works)


def test_sizes_that_do_not_fit_are_left_out(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = module("bench_kernel")
    assert module("kernel_measure").fits(1 << 28, 16 << 30)
    assert not module("kernel_measure").fits(1 << 28, 8 << 30)
    assert 0 < kernel.available_bytes("cpu") < 1 << 50
    monkeypatch.setattr(kernel, "available_bytes", lambda device: 0)
    monkeypatch.setattr("sys.argv", ["bench_kernel.py", "--quick"])
    with pytest.raises(SystemExit, match="no size fits"):
        kernel.main()


def test_sizes_in_words(module: Any) -> None:
    text = module("kernel_chart").size_text
    assert [text(n) for n in (1024, 3 << 20, 1 << 30, 5000)] == ["1 Ki", "3 Mi", "1 Gi", "5,000"]


def test_who_reads_an_updates_distance_is_told_of_wrong_work(module: Any) -> None:
    contenders = module("kernel_contenders")
    params = contenders.small_parameters("cpu", 3)
    grads = [param.grad for param in params]
    assert contenders.distance_from_fp64(lambda: None, params, grads) > 1e-3
    step = torch.optim.AdamW(params, **contenders.HYPERPARAMETERS).step
    assert contenders.distance_from_fp64(step, params, grads) < 2e-6
