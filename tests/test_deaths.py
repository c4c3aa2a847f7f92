"""A process group or a rank that goes away: checkpoints are still to be had, nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, RankPool, RanksFailed
from training import PATIENCE, Job, assert_close, assert_same_bits, impatient

import fusedshard.kernels


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_a_group_destroyed_under_the_optimizer(ranks: RankPool, mode: str) -> None:
    """What it needs it has itself, so that a last checkpoint is still to be had."""
    results = ranks.run(2, _destroyed, mode)
    for ours in results:
        assert_close(ours, Job.reference(2, 3))


def _destroyed(rank: Rank, mode: str) -> Any:
    job = Job(rank, mode, impatient(2))
    job.steps(range(2))
    dist.destroy_process_group(job.group)
    job.steps(range(2, 3))
    return job.whole()


_WORLD_DESTROYED = """
import os, torch, torch.distributed as dist, fusedshard
dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}",
                        rank=int(os.environ["RANK"]), world_size=2)
param = torch.nn.Parameter(torch.zeros(3))
optimizer = fusedshard.AdamW([param], lr=1.0, eps=1.0)
param.grad = torch.full((3,), 1.0 + 4 * dist.get_rank())
optimizer.step()
dist.destroy_process_group()
state = optimizer.full_state_dict()["state"][0]
param.grad = None
optimizer.step()
print(param.tolist(), [round(x, 6) for x in state["exp_avg"].tolist()])
"""


def test_the_world_destroyed_under_the_optimizer(tmp_path: Path) -> None:
    """As by a script that takes its checkpoint last."""
    environment = {**os.environ, "STORE": str(tmp_path / "store")}
    command = [sys.executable, "-c", _WORLD_DESTROYED]
    ranks = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(r)}, stdout=subprocess.PIPE, text=True
        )
        for r in range(2)
    ]
    for rank in ranks:
        assert rank.communicate(timeout=120)[0] == "[-0.75, -0.75, -0.75] [0.3, 0.3, 0.3]\n"


def test_ranks_die_one_after_another(tmp_path: Path) -> None:
    """Within a closure, between gradients and update, before a step; the others keep what they
    had, and go on without the dead from a checkpoint."""
    pool = RankPool(tmp_path)
    try:
        with pytest.raises(RanksFailed) as caught:
            pool.run(4, _die_in_turn)
    finally:
        pool.stop()
    # Whatever a survivor found wrong it would have said before it died in its turn; rank 0 does
    # not die.
    died = [f"rank {rank}: the process died" for rank in (1, 2, 3)]
    assert str(caught.value).splitlines() == died


def _die_in_turn(rank: Rank) -> None:
    groups = {size: impatient(size) for size in (2, 3, 4)}
    checkpoint: Any = None
    for size, mode, way in (
        (4, "replicated", "closure"),
        (3, "sharded", "packing"),
        (2, "sharded", "before"),
    ):
        job = Job(rank, mode, groups[size])
        if checkpoint is not None:
            for param, saved in zip(job.params, checkpoint[0], strict=True):
                with torch.no_grad():
                    param.copy_(saved)
            job.optimizer.load_state_dict(checkpoint[1])
        job.steps(range(2))
        checkpoint = job.whole()
        dies = rank.rank == size - 1
        if dies and way == "packing":  # which backward begins
            fusedshard.kernels.pack_ = _die  # type: ignore[assignment]
        job.gradients(2)
        before, start = job.local(), time.monotonic()
        if dies and way == "before":
            _die()
        if dies:
            job.optimizer.step(_die)
        with pytest.raises(RuntimeError):
            job.optimizer.step()
        assert time.monotonic() - start < PATIENCE + 10
        assert_same_bits(before, job.local())
        assert_same_bits(before[0], checkpoint[0])


def _die(*_: Any) -> None:
    os._exit(9)
