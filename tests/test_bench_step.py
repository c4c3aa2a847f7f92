"""bench_step.py runs, does the same work in every way, and counts rightly. Never a word about
timings."""

from __future__ import annotations

import os
import sys
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from audited import FSDP_ON_CPUS
from bench_tools import BENCHMARKS, check_bars, check_spread, load_module, only_report, run
from ranks import Rank, RankPool

import fusedshard

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
DDP = "DDP + AdamW fused"
ZERO = "DDP + ZeroRedundancyOptimizer fused"
FSDP = "FSDP2 + AdamW fused"
REPLICATED = "fusedshard replicated, ordered"
SHARDED = "fusedshard sharded, ordered"
IN_STEP = "fusedshard sharded, ordered, exchanged in step"
BACKEND = "fusedshard sharded, backend"
FSDP_VARIANTS = {FSDP, "FSDP2, parameters kept after forward + AdamW fused"}
VARIANTS = {
    "DDP + AdamW for-loop",
    "DDP + AdamW foreach",
    DDP,
    "DDP, gradient_as_bucket_view + AdamW fused",
    ZERO,
    "DDP + ZeroRedundancyOptimizer fused, parameters_as_bucket_view",
    REPLICATED,
    SHARDED,
    IN_STEP,
    BACKEND,
} | (FSDP_VARIANTS if FSDP_ON_CPUS else set())
MODELS = ("gpt17m", "gpt124m", "resnet50", "small_tensors")
PADDING = 1.02  # of the small models, whose tensors are small


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda name: load_module(monkeypatch, name)


def test_quick_form_under_torchrun(tmp_path: Path) -> None:
    options = ("--model", "gpt17m", "--steps", "1", "--repeats", "1")
    printed = run(tmp_path, *TORCHRUN, str(BENCHMARKS / "bench_step.py"), *options)
    report = only_report(tmp_path, "step_gpt17m_2_ranks")
    assert (tmp_path / "step_gpt17m_2_ranks.png").stat().st_size > 10_000
    settings = report["settings"]
    assert (settings["ranks"], settings["device"]) == (2, "cpu")
    assert settings["steps_of_each"] == 1 * (1 + 1), "a round that is not counted, then one"
    rows = {row["name"]: row for row in report["results"]}
    assert set(rows) == VARIANTS
    for name, row in rows.items():
        assert len(row["samples"]) == settings["repeats"]
        check_spread(row["step_seconds"])
        assert row["cpu_seconds"] > 0
        assert name in " ".join(printed.split())
        assert set(row["seconds"]) == {"forward", "backward", "step", "zero_grad"}
    assert report["largest_loss_difference"] < 1e-4, "not all did the same work"
    assert report["groups"] == [
        {"variants": [*rows], "reference_samples": rows[DDP]["samples"]},
    ]
    assert len(report["bars"]) == (5 if FSDP_ON_CPUS else 4)
    check_bars(report, printed)
    check_costs(rows, settings["parameters"])


def check_costs(rows: dict[str, dict[str, Any]], parameters: int) -> None:
    """Of fp32 parameters on two ranks."""
    moments = 8 * parameters
    for name in (DDP, REPLICATED):
        assert moments <= rows[name]["state_bytes"] <= moments * PADDING
    for name in (SHARDED, FSDP) if FSDP_ON_CPUS else (SHARDED,):
        assert moments / 2 <= rows[name]["state_bytes"] <= moments / 2 * PADDING
    for name in (DDP, SHARDED):  # parameters, gradients, moments
        needed = 8 * parameters + rows[name]["state_bytes"]
        assert needed < rows[name]["peak_bytes"] < 40e6
        assert rows[name]["peak_bytes"] == max(rows[name]["peak_bytes_of_ranks"])
    ordered = rows[SHARDED]
    assert ordered["traffic"]["collectives"] == {"exchange by pairs": 3}
    assert ordered["collectives"] == {"all_to_all": 1, "status": 1, "all_gather": 1}
    assert set(ordered["seconds_of_step"]) == {"exchange", "status", "update", "gather"}
    assert rows[DDP]["traffic"]["algorithm_bytes"] == {"all_reduce": 4 * parameters}
    for name in VARIANTS - FSDP_VARIANTS:
        traffic = rows[name]["traffic"]
        # What others send over the loopback adds to it.
        assert traffic["loopback_bytes"] > sum(traffic["algorithm_bytes"].values())
        assert traffic["host_synchronizations"] is None


def steps_of(rank: Rank, model: str, names: list[str]) -> dict[str, Any]:
    """The loss of four steps in each way; what a fifth sends, as counted and as profiled."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import step_job
        import step_models
    finally:
        sys.path.remove(str(BENCHMARKS))
    work = step_models.small_workloads()[model]
    found: dict[str, Any] = {}
    for name in names:
        runner = step_job.make_runner(work, name, "cpu", 2)
        for _ in range(2):
            runner.round()
        found[name] = {"loss": runner.figures()["loss"]}
        runner.forget()
        found[name]["sent"] = step_job.traffic_of(runner)["algorithm_bytes"]
        if isinstance(runner.optimizer, fusedshard.AdamW):
            found[name]["counted"] = dict(runner.optimizer.stats.sent_bytes)
    return found | {"parameters": runner.parameters}


@pytest.mark.parametrize("model", MODELS)
def test_volume_is_what_the_algorithms_need(ranks: RankPool, model: str) -> None:
    names = [DDP, ZERO, REPLICATED, SHARDED, IN_STEP, BACKEND]
    if FSDP_ON_CPUS:
        names.append(FSDP)
    found, *others = ranks.run(4, steps_of, model, names)
    nbytes = 4 * found["parameters"]
    share = 3 / 4  # (N - 1) / N
    assert found[DDP]["sent"] == {"all_reduce": 2 * share * nbytes}
    assert found[ZERO]["sent"] == {"all_reduce": 2 * share * nbytes, "broadcast": share * nbytes}
    for name in (REPLICATED, SHARDED, IN_STEP):
        assert found[name]["sent"] == {"send": sum(found[name]["counted"].values())}
    # gloo makes a reduce-scatter of an all-reduce, which sends twice as much.
    counted = found[BACKEND]["counted"]
    reduced = counted.pop("reduce_scatter")
    assert reduced >= share * nbytes
    wanted = {"all_reduce": 2 * reduced, "send": sum(counted.values())}
    assert found[BACKEND]["sent"] == wanted
    if FSDP_ON_CPUS:
        assert found[FSDP]["sent"]["all_gather"] >= share * nbytes
    for rank in (found, *others):
        losses = [rank[name]["loss"] for name in names]
        assert max(losses) - min(losses) < 1e-5, "not all did the same work"
    assert len({rank[DDP]["loss"] for rank in (found, *others)}) == 4, "ranks share their batches"


def test_each_collective_has_its_volume(module: Any) -> None:
    traffic = module("traffic")
    calls = [traffic.Call(kind, 100) for kind in traffic.VOLUME for _ in range(2)]
    assert traffic.volume(calls, 4) == {
        "all_reduce": 300,
        "reduce_scatter": 150,
        "all_to_all": 150,
        "all_gather": 600,
        "broadcast": 150,
        "send": 200,
    }
    unknown = traffic.volume([*calls, traffic.Call("scan", 100)], 4)
    assert unknown["scan"] is None
    assert traffic.sent_bytes({"algorithm_bytes": unknown}) is None
    assert traffic.sent_bytes({"algorithm_bytes": traffic.volume(calls, 4)}) == 1550
    sends = [traffic.Call("send", 8)] * 6
    assert traffic.collectives(sends, 4) == {"exchange by pairs": 2}


def test_models_are_those_they_are_called(module: Any) -> None:
    wanted = {
        "gpt17m": 16_994_880,
        # GPT-2: tokens, positions, blocks and norms, without biases.
        "gpt124m": 50_257 * 768 + 1024 * 768 + 12 * 12 * 768**2 + 25 * 768,
        "resnet50": 25_557_032,
        "small_tensors": 1000 // 2 * (16 * 16 + 16),
    }
    found = module("step_models").workloads()
    assert {name: work.parameters() for name, work in found.items()} == wanted
    with torch.device("meta"):
        assert len(list(found["small_tensors"].build().parameters())) == 1000
        resnet = found["resnet50"].build()
    assert set(module("step_models").small_workloads()) == set(wanted) == set(MODELS)
    # The strides of ResNet-50: 224 pixels become 7.
    images = torch.empty(1, 3, 224, 224, device="meta")
    assert resnet.blocks(resnet.stem(images)).shape == (1, 2048, 7, 7)


def test_groups_fit_into_memory_and_hold_the_reference(module: Any) -> None:
    resident = module("resident")
    names = [*"abRcde"]
    assert resident.groups(names, "R", 4) == [[*"Rabc"], [*"Rde"]]
    assert resident.groups(names, "R", 2) == [["R", name] for name in "abcde"]
    # Of 100 GB 80 may be used: 2 for what passes, the rest for fourfold copies of 1 GB.
    assert resident.variants_at_once(10**9, 100 * 10**9) == 19
    assert resident.variants_at_once(10**9, 10**9) == 2


def test_variants_of_two_groups_are_compared_by_the_reference(module: Any) -> None:
    report = module("step_report")
    runner, job = module("runner"), module("step_job")

    def group(**samples: list[float]) -> Any:
        return job.Group(runner.Outcome(samples, [], 0.0, 1, 1), {})

    # The second group met a machine half as fast.
    first = group(**{DDP: [2.0, 4.0], SHARDED: [1.0, 2.0]})
    second = group(**{DDP: [4.0, 4.0], ZERO: [4.0, 8.0]})
    relative = report.relative_samples([first, second])
    assert relative[SHARDED] == [0.5, 0.5] and relative[ZERO] == [1.0, 2.0]
    found = {row["name"]: row["time"]["median"] for row in report.comparisons(relative)}
    assert found == {f"{SHARDED} / {DDP}": 0.5, f"{SHARDED} / {ZERO}": (0.5 + 0.25) / 2}
    state = [{"name": DDP, "state_bytes": 800}, {"name": SHARDED, "state_bytes": 202}]
    for ranks, limits in ((1, [1.0, 1.01]), (2, [1.0, 0.9, 1.01]), (4, [1.1, 0.9, 1.01])):
        bars = report.bars(relative, state, ranks)
        assert [bar.at_most for bar in bars] == limits
        assert bars[-1].measured.median == pytest.approx(202 * ranks / 800)


def test_peak_is_of_the_work_alone(module: Any) -> None:
    resident, kept = module("resident"), torch.ones(64 << 18)  # 64 MiB
    peak = resident.peak_bytes(lambda: torch.ones(32 << 18).sum(), "cpu")
    assert 30 << 20 <= peak < 40 << 20
    del kept


def test_waits_for_the_device_are_counted(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def step() -> None:
        assert modes == ["warn"]
        for text in ("called a synchronizing CUDA operation", "something else") * 2:
            warnings.warn(text, stacklevel=1)

    assert module("traffic").host_synchronizations(step) == 2
    assert modes == ["warn", "default"]


def test_fsdp_is_left_out_where_it_cannot_run(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    variants = module("step_variants")
    names = list(variants.builders(1e-3))
    assert set(names) == VARIANTS | FSDP_VARIANTS
    monkeypatch.setattr(torch, "__version__", "2.6.0+cpu")
    assert set(variants.runnable(names, "cpu")) == VARIANTS - FSDP_VARIANTS
    assert variants.runnable(names, "cuda:0") == names
    monkeypatch.setattr(torch, "__version__", "2.7.0")
    assert variants.runnable(names, "cpu") == names


def process_of(device: str, failing: int | None) -> tuple[str, int, float]:
    """Which process a rank is, and the sum of what all gave."""
    rank = torch.distributed.get_rank()
    if rank == failing:
        raise ValueError("this rank has failed")
    total = torch.tensor([1.0 + rank])
    torch.distributed.all_reduce(total)
    return device, os.getpid(), total.item()


def test_ranks_are_new_each_time_and_tell_what_failed(module: Any) -> None:
    with module("fresh_ranks").ranks_here(2) as ranks:
        first, second = (ranks.run(process_of, None) for _ in range(2))
        with pytest.raises(RuntimeError, match="this rank has failed"):
            ranks.run(process_of, 1)
    assert first[::2] == second[::2] == ("cpu", 3.0)
    assert len({first[1], second[1], os.getpid()}) == 3


class Recorded:
    """Ranks that do nothing."""

    device, reports = "cpu", False

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def run(self, work: Any, *args: Any) -> Any:
        self.calls.append((work.__name__, *args))
        return 4 * 4 * 116_032 * 2 if work.__name__ == "least_available" else []


def test_options(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step, measured = module("bench_step"), []

    def measure(ranks: Any, model: str, args: Namespace) -> None:
        measured.append((ranks.ranks, model))

    for options, wanted in (
        (["--quick"], [(2, model) for model in MODELS]),
        (["--model", "resnet50"], [(ranks, "resnet50") for ranks in (1, 2, 4)]),
        (["--ranks", "3", "1", "--model", "gpt17m"], [(3, "gpt17m"), (1, "gpt17m")]),
    ):
        measured.clear()
        monkeypatch.setattr("sys.argv", ["bench_step.py", *options])
        with monkeypatch.context() as patch:
            patch.setattr(step, "measure", measure)
            step.main()
        assert measured == wanted
    for options, peaks in ((["--quick"], [DDP, SHARDED]), (["--quick", "--no-memory"], [])):
        monkeypatch.setattr("sys.argv", ["bench_step.py", *options])
        ranks = Recorded()
        step.measure(ranks, "gpt17m", step.parse())
        turns = [call[2] for call in ranks.calls if call[0] == "take_turns_at"]
        assert all(group[0] == DDP and len(group) == 2 for group in turns)
        assert {name for group in turns for name in group} == VARIANTS
        assert [call[2] for call in ranks.calls if call[0] == "peak_of"] == peaks
