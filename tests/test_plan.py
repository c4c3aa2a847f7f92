"""`fusedshard plan` of our optimizers, with what they really allocate and send."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from mixed import BF16, FORMATS, FP16, FP32, FP64
from ranks import Rank, RankPool
from training import GRAD_SYNCS, MODES, backward, stored_bytes
from transports import moving_by

import fusedshard
from fusedshard.options import ParallelOptions
from fusedshard.planning.models import Model, Parameter
from fusedshard.planning.ours import Ours
from fusedshard.planning.usage import Usage
from fusedshard.precision import Precision

# Several buckets, one of them of parts of a parameter; a last block that is not full; empty and
# 0-dim parameters; parameters with and without codes.
SIZES: Sequence[tuple[tuple[int, ...], torch.dtype]] = [
    ((300, 1000), BF16),
    ((5,), BF16),
    ((17, 257), FP32),
    ((0,), BF16),
    ((200, 500), FP32),
    ((), FP32),
    ((64, 100), FP16),
    ((9, 3), FP64),
    ((33,), FP16),
    ((70, 130), BF16),
]
MODEL = Model(
    tuple(Parameter(str(i), shape, dtype) for i, (shape, dtype) in enumerate(SIZES)), "test"
)
ALL_FP32 = Model(tuple(p._replace(dtype=FP32) for p in MODEL.parameters), "test")
CAP_MB = 0.25


class Case(NamedTuple):
    """Arguments of an optimizer."""

    master_weights: bool | None
    state_dtype: torch.dtype
    mode: str
    reduction: str
    grad_sync: str
    model: Model = MODEL

    def planned(self, ranks: int, backend: str = "gloo") -> Usage:
        precision = Precision(self.master_weights, self.state_dtype, True, 0)
        options = ParallelOptions(
            self.mode, None, self.reduction, self.grad_sync, CAP_MB, precision, 0
        )
        return Ours(self.model, options, backend).usage(ranks)


PRECISIONS = dict.fromkeys((f.master_weights, f.state_dtype) for f in FORMATS)
CASES = [Case(*formats, mode, "auto", "step") for formats in PRECISIONS for mode in MODES]
CASES += [
    Case(None, FP32, *ways, model)
    for model in (MODEL, ALL_FP32)
    for ways in itertools.product(MODES, ("ordered", "backend"), (*GRAD_SYNCS, "external"))
]
NCCL_CASES = [
    Case(None, FP32, mode, reduction, grad_sync, model)
    for mode, reduction, grad_sync, model in itertools.product(
        MODES, ("auto", "ordered"), GRAD_SYNCS, (MODEL, ALL_FP32)
    )
]


class Found(NamedTuple):
    """Of a real optimizer after a step.

    Attributes:
        memory: what it says that it holds.
        stored: bytes of all storages, each counted once.
        gradients, steps: likewise.
        sent: by the step.
    """

    memory: dict[str, int]
    stored: int
    gradients: int
    steps: int
    sent: dict[str, int]


def _run_all(rank: Rank, cases: Sequence[Case], way: str | None = None) -> list[Found]:
    with nullcontext() if way is None else moving_by(way):
        return [_run(rank, case) for case in cases]


def _run(rank: Rank, case: Case) -> Found:
    params = [torch.nn.Parameter(torch.ones(p.shape, dtype=p.dtype)) for p in case.model.parameters]
    options: dict[str, Any] = {**case._asdict(), "bucket_cap_mb": CAP_MB}
    del options["model"]
    optimizer = fusedshard.AdamW(params, process_group=rank.group, **options)
    optimizer.stats.reset()
    backward(params, [torch.ones_like(param) for param in params])
    optimizer.step()
    engine = optimizer._built
    held = [engine.steps, engine.step_mirror]
    steps = stored_bytes(held)
    for flat in engine.flats:
        held += [flat.param, *([] if flat.reduced is None else [flat.reduced])]
        for moment in flat.moments.values():
            held += [moment.values, *([] if moment.exponents is None else [moment.exponents])]
        if flat.masters is not None:
            checks = flat.masters.checks
            held += [flat.masters.values, *([] if checks is None else [checks])]
    held += [buffer for lane in engine._exchange.reducer.lanes for buffer in lane.memory.values()]
    gradients = [param.grad for param in params if param.grad is not None]
    sent = dict(optimizer.stats.sent_bytes)
    return Found(
        optimizer.memory(), stored_bytes(held + gradients), stored_bytes(gradients), steps, sent
    )


def check(case: Case, planned: Usage, found: Found) -> None:
    buffers, sent = dict(planned.buffers), dict(planned.sent)
    beside = [buffers.pop("ddp_buckets", 0), sent.pop("ddp_all_reduce", 0)]
    assert all(beside) if case.grad_sync == "external" and planned.sent else not any(beside)
    assert found.memory == {
        "parameters": planned.parameters,
        "moments": planned.exp_avg + planned.exp_avg_sq,
        "masters": planned.masters,
        **buffers,
    }
    assert planned.exp_avg == planned.exp_avg_sq
    assert (planned.gradients, planned.steps) == (found.gradients, found.steps)
    assert planned.total - beside[0] == found.stored
    assert sent == found.sent


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ours_hold_and_send_what_is_planned(ranks: RankPool, world_size: int) -> None:
    results = ranks.run(world_size, _run_all, CASES)
    for index, case in enumerate(CASES):
        planned = case.planned(world_size)
        for found in results:
            check(case, planned, found[index])


def test_ours_over_what_nccl_gets(ranks: RankPool) -> None:
    for found in ranks.run(3, _run_all, NCCL_CASES, "collectives"):
        for case, its in zip(NCCL_CASES, found, strict=True):
            check(case, case.planned(3, "nccl"), its)


def test_bytes_of_one_parameter_by_hand() -> None:
    """1,000 bf16 numbers on 3 ranks: 8 blocks of 128, of which each rank has 3."""
    model = Model((Parameter("w", (1000,), BF16),), "test")
    planned = Case(None, FP32, "sharded", "ordered", "step", model).planned(3)
    assert planned.memory == {
        "parameters": 9 * 128 * 2,
        "gradients": 1000 * 2,
        "masters": 3 * 128 * 2 + 3 * 4,
        "exp_avg": 3 * 128 * 4,
        "exp_avg_sq": 3 * 128 * 4,
        "steps": 8 + 4,
        "buffers": 3 * 128 * 4 + 9 * 128 * 2 + 6 * 128 * 2,
    }
    assert planned.sent == {
        "all_to_all": 6 * 128 * 2,
        "all_gather": 6 * 128 * 2,
        "status": 2 * (8 + 1 + 1 + 1 + 1),
    }
    # Parameter, remainder and check, two moments, read and written; the fp32 mean read.
    assert planned.moved == 3 * 128 * (2 * (2 + 2 + 8) + 4) + 2 * 3 * 4
