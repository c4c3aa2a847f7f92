"""What README.md promises to be the same bits, where no other test has it: its table names both."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kernel_tools import ADAMW, running_on, ways_to_run
from mixed import BF16, CODED, FORMATS, FP32, FP64, Formats, exact_gradient, make_mixed, train_mixed
from mixed import HYPER as MIXED_HYPER
from oracles import Problem, ordered_mean, run_reference
from ranks import Rank, RankPool
from training import AWKWARD, MODES, assert_same_bits, backward, gradient, make_params

import fusedshard

SHAPES = [*AWKWARD, (300, 301)]
GROUP = ADAMW._replace(lr=0.1, eps=1.0)
HYPER: dict[str, Any] = {"lr": GROUP.lr, "eps": GROUP.eps, "weight_decay": GROUP.weight_decay}
# About 10 KiB, and more than all parameters.
SMALL, LARGE = 0.01, 25
STEPS = 4
Result = tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]


def parts(
    param: torch.Tensor, step: int, index: int, rank: int, micro_batches: int
) -> list[torch.Tensor]:
    """A rank's gradients of one step."""
    return [gradient(param, 10 * step + n, index, rank) for n in range(micro_batches)]


def plain_torch(world_size: int, micro_batches: int = 1) -> Result:
    """Parameters and moments by operations of torch without FMA: gradients of micro-batches are
    added up on each rank, then those of the ranks, in rank order, and divided once."""
    states = []
    for index, param in enumerate(make_params(SHAPES)):
        means = []
        for step in range(STEPS):
            sums = []
            for rank in range(world_size):
                total, *others = parts(param, step, index, rank, micro_batches)
                for other in others:
                    total = total + other
                sums.append(total)
            means.append(ordered_mean(sums))
        states.append(run_reference(Problem(GROUP, param.detach(), means), torch.float32))
    moments = [{"exp_avg": s.exp_avg, "exp_avg_sq": s.exp_avg_sq} for s in states]
    return [state.param for state in states], moments


def train(
    rank: Rank, options: dict[str, Any], micro_batches: int = 1, wait: bool = False
) -> Result:
    """The same by our optimizer; ``wait``: gradients are exchanged after the last micro-batch."""
    external = options.get("grad_sync") == "external"
    params = make_params(SHAPES, seed=rank.rank)  # the first rank's must win
    optimizer = fusedshard.AdamW(params, process_group=rank.group, **HYPER, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        for n in range(micro_batches):
            grads = [
                ordered_mean([gradient(p, 10 * step + n, i, r) for r in range(rank.world_size)])
                if external
                else gradient(p, 10 * step + n, i, rank.rank)
                for i, p in enumerate(params)
            ]
            last = n == micro_batches - 1
            with optimizer.no_sync() if wait and not last else contextlib.nullcontext():
                backward(params, grads)
        optimizer.step()
    state = optimizer.full_state_dict()["state"]
    moments = [
        {name: state[i][name] for name in ("exp_avg", "exp_avg_sq")} for i in range(len(params))
    ]
    return [p.detach().clone() for p in params], moments


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("grad_sync", ["backward", "step", "external"])
def test_modes_ways_to_exchange_and_buckets(ranks: RankPool, grad_sync: str, mode: str) -> None:
    """Each is plain torch on the means, and so all are each other."""
    want = plain_torch(3)
    # Every two of a mode, a way and a size meet.
    bucket = SMALL if (mode == "sharded") == (grad_sync == "step") else LARGE
    options = {"mode": mode, "grad_sync": grad_sync, "bucket_cap_mb": bucket}
    for result in ranks.run(3, train, options):
        assert_same_bits(result, want)


@pytest.mark.parametrize("mode", MODES)
def test_audits_on_the_way(ranks: RankPool, mode: str) -> None:
    for result in ranks.run(3, train, {"mode": mode, "audit_every": 1}):
        assert_same_bits(result, plain_torch(3))


@pytest.mark.parametrize(
    ("options", "wait"),
    [
        ({"mode": "sharded"}, True),
        ({"mode": "sharded"}, False),
        ({"mode": "sharded", "grad_sync": "step"}, False),
        ({"mode": "replicated"}, True),
        ({"mode": "replicated", "grad_sync": "step"}, False),
    ],
    ids=str,
)
def test_accumulation(ranks: RankPool, options: dict[str, Any], wait: bool) -> None:
    """With and without no_sync, where what was exchanged before does not count."""
    want = plain_torch(3, micro_batches=3)
    for result in ranks.run(3, train, {**options, "bucket_cap_mb": SMALL}, 3, wait):
        assert_same_bits(result, want)


def clip_and_train(
    rank: Rank | None, dtype: torch.dtype = FP32, **options: Any
) -> tuple[Any, list[torch.Tensor]]:
    """Parameters and state, and the norms. Gradients whose means have no rounding, so that what
    differs does so by the norms."""
    number, world_size = (0, 1) if rank is None else (rank.rank, rank.world_size)
    params, norms = make_params(SHAPES, dtype=dtype), []
    group = None if rank is None else rank.group
    optimizer = fusedshard.AdamW(params, process_group=group, **HYPER, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(
            params, [exact_gradient(p, step, i, number, world_size) for i, p in enumerate(params)]
        )
        norms.append(optimizer.clip_grad_norm_(1.0))
        optimizer.step()
    return ([p.detach().clone() for p in params], optimizer.full_state_dict()["state"]), norms


def _clip(rank: Rank, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    return clip_and_train(rank, dtype, **options)


@pytest.mark.parametrize("dtype", [FP32, FP64], ids=["fp32", "fp64"])
def test_clipping_in_other_modes_and_on_other_ranks(ranks: RankPool, dtype: torch.dtype) -> None:
    """Norms are added in fp64, in an order that depends on both: of fp32 parameters nothing is left
    of that once they are rounded to fp32, as good as always."""
    alone, norms = clip_and_train(None, dtype)
    for world_size, mode in ((2, "sharded"), (3, "sharded"), (3, "replicated")):
        options = {"mode": mode, "bucket_cap_mb": SMALL}
        results = ranks.run(world_size, _clip, dtype, options)
        for outcome, its_norms in results:
            assert_same_bits((outcome, its_norms), results[0])
            if dtype == FP32:
                assert_same_bits((outcome, its_norms), (alone, norms))
            torch.testing.assert_close(its_norms, norms, rtol=1e-14, atol=0)
            torch.testing.assert_close(outcome[0], alone[0], rtol=0, atol=1e-14)


def test_clipping_by_threads_and_instruction_sets() -> None:
    """And whatever comes before and after it."""
    with_one = clip_and_train(None)
    for variant, threads in ways_to_run():
        with running_on(variant, threads):
            assert_same_bits(clip_and_train(None), with_one, f"{variant}, {threads} threads")


RESUMED = [Formats(None, FP32, True), Formats(True, BF16, True), Formats(False, CODED, True)]


@pytest.mark.parametrize("formats", RESUMED, ids=str)
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 3), (3, 1)])
def test_resuming_on_another_number_of_ranks(
    ranks: RankPool, saved_on: int, loaded_on: int, formats: Formats
) -> None:
    """Also with moments that are rounded at random: bits do not know of the break."""
    straight = train_mixed(None, formats, steps=4)
    saved = ranks.run(saved_on, _train_mixed, formats, 2)[0]
    for mode in MODES:
        for result in ranks.run(loaded_on, _resume, saved, formats, mode):
            assert_same_bits(result, straight)


def _train_mixed(rank: Rank, formats: Formats, steps: int) -> Any:
    return train_mixed(rank, formats, steps)


def _resume(rank: Rank, saved: Any, formats: Formats, mode: str) -> Any:
    params = [torch.nn.Parameter(value.clone()) for value in saved[0]]
    optimizer = fusedshard.AdamW(
        params, process_group=rank.group, mode=mode, **formats._asdict(), **MIXED_HYPER
    )
    optimizer.load_state_dict(saved[1])
    for step in (2, 3):
        optimizer.zero_grad()
        backward(params, exact_gradients(params, step, rank))
        optimizer.step()
    return [p.detach().clone() for p in params], optimizer.full_state_dict()


def exact_gradients(params: Sequence[torch.Tensor], step: int, rank: Rank) -> list[torch.Tensor]:
    return [
        exact_gradient(p, step, index, rank.rank, rank.world_size) for index, p in enumerate(params)
    ]


@pytest.mark.parametrize("world_size", [1, 2])
def test_deterministic_mode_changes_and_warns_of_nothing(ranks: RankPool, world_size: int) -> None:
    """In every mode and format; torch.empty, that it fills with NaN, shows nowhere."""
    for with_it, without in ranks.run(world_size, _in_deterministic_mode):
        assert_same_bits(with_it, without)


def _in_deterministic_mode(rank: Rank) -> Any:
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    outcomes: list[list[Any]] = [[], []]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, formats in enumerate(FORMATS[::2]):
            mode, warn_only = MODES[number % 2], bool(number // 2 % 2)
            reduction = ("ordered", "backend")[number // 4 % 2]
            for outcome, on in zip(outcomes, (True, False), strict=True):
                torch.use_deterministic_algorithms(on, warn_only=warn_only)
                try:
                    outcome.append(_whole_life(rank, formats, mode=mode, reduction=reduction))
                finally:
                    torch.use_deterministic_algorithms(False)
    return outcomes


def _whole_life(rank: Rank, formats: Formats, **options: Any) -> Any:
    """Accumulation, clipping, a step, saving, loading, and another step."""
    params = make_mixed()
    optimizer = fusedshard.AdamW(
        params, process_group=rank.group, **formats._asdict(), **MIXED_HYPER, **options
    )
    norms = []
    for step in range(2):
        optimizer.zero_grad()
        with optimizer.no_sync():
            backward(params, exact_gradients(params, step, rank))
        backward(params, exact_gradients(params, step, rank))
        norms.append(optimizer.clip_grad_norm_(1e3))
        optimizer.step()
        if step == 0:
            optimizer.load_state_dict(optimizer.full_state_dict())
    return [p.detach().clone() for p in params], optimizer.full_state_dict(), norms
