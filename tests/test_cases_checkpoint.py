"""CKP-01 and CKP-05: training goes on where it stopped, by a file and by a folder."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed import BF16, FP32
from ranks import Rank, RankPool
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from training import MODES, assert_same_bits, gradient

import fusedshard

STOP, END = 5, 10


class Job:
    """A model in two groups, with a scheduler."""

    def __init__(self, rank: Rank, mode: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.rank = rank
        layers = (torch.nn.Linear(37, 41), torch.nn.Linear(41, 5))
        self.model = torch.nn.Sequential(*layers).to(dtype)
        groups: list[dict[str, Any]] = [
            {"params": [layer.weight for layer in layers]},
            {"params": [layer.bias for layer in layers], "lr": 0.3, "weight_decay": 0.0},
        ]
        self.optimizer = fusedshard.AdamW(
            groups, lr=0.1, eps=1e-3, mode=mode, process_group=rank.group
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def steps(self, which: range) -> None:
        for step in which:
            for index, param in enumerate(self.model.parameters()):
                param.grad = gradient(param, step, index, self.rank.rank)
            self.optimizer.step()
            self.scheduler.step()

    def whole(self) -> Any:
        params = [param.detach().clone() for param in self.model.parameters()]
        return params, self.optimizer.full_state_dict(), self.scheduler.state_dict()


def by_file(job: Job, path: Path) -> Callable[[Job], None]:
    """Save; returns what loads it."""
    content = {"model": job.model.state_dict(), "optimizer": job.optimizer.full_state_dict()}
    buffer = io.BytesIO()
    torch.save(content, buffer)

    def load_it(other: Job) -> None:
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True, map_location="cpu")
        other.model.load_state_dict(saved["model"])
        other.optimizer.load_state_dict(saved["optimizer"])

    return load_it


def by_folder(job: Job, path: Path) -> Callable[[Job], None]:
    def content(of: Job) -> dict[str, Any]:
        return dict(
            zip(("model", "optimizer"), get_state_dict(of.model, of.optimizer), strict=True)
        )

    save(content(job), checkpoint_id=path, process_group=job.rank.group)

    def load_it(other: Job) -> None:
        saved = content(other)
        load(saved, checkpoint_id=path, process_group=other.rank.group)
        set_state_dict(
            other.model,
            other.optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )

    return load_it


each_way = pytest.mark.parametrize("way", [by_file, by_folder])


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("mode", MODES)
@each_way
def test_ckp_01_ten_steps_and_twice_five(
    ranks: RankPool, tmp_path: Path, way: Any, mode: str, dtype: torch.dtype
) -> None:
    results = ranks.run(2, _ckp_01, tmp_path / "saved", way, mode, dtype)
    for stopped, loaded, straight, resumed in results:
        assert_same_bits(loaded, stopped)
        assert_same_bits(resumed, straight)
        assert_same_bits((loaded, resumed), (results[0][1], results[0][3]))
        masters = [state for state in straight[1]["state"].values() if "master_weights" in state]
        assert len(masters) == (4 if dtype == BF16 else 0)


def _ckp_01(rank: Rank, path: Path, way: Any, mode: str, dtype: torch.dtype) -> Any:
    job = Job(rank, mode, dtype)
    job.steps(range(STOP))
    stopped, load_it = job.whole(), way(job, path)
    other = Job(rank, mode, dtype)
    load_it(other)
    other.scheduler.load_state_dict(stopped[2])
    loaded = other.whole()
    job.steps(range(STOP, END))
    other.steps(range(STOP, END))
    return stopped, loaded, job.whole(), other.whole()


@pytest.mark.parametrize("world_size", [1, 2])
@each_way
def test_ckp_05_the_step_count_survives(
    ranks: RankPool, tmp_path: Path, way: Any, world_size: int
) -> None:
    """Of which bf16 would make 1000; the next update is torch's number 1002, of fp32 weights."""
    for before, after, masters, expected in ranks.run(world_size, _ckp_05, tmp_path / "saved", way):
        for counts, number in ((before, 1001), (after, 1002)):
            assert all(c.shape == () and c.dtype == FP32 and c == number for c in counts)
        torch.testing.assert_close(masters, expected, rtol=0, atol=1e-6)


def _ckp_05(rank: Rank, path: Path, way: Any) -> Any:
    job = Job(rank, "sharded", BF16)
    job.steps(range(1))
    state = job.optimizer.full_state_dict()
    for values in state["state"].values():
        values["step"] = torch.tensor(1001.0)
    job.optimizer.load_state_dict(state)
    load_it = way(job, path)
    other = Job(rank, "sharded", BF16)
    load_it(other)
    loaded = other.optimizer.full_state_dict()
    other.steps(range(1, 2))
    after = other.optimizer.full_state_dict()
    return (
        [values["step"] for values in loaded["state"].values()],
        [values["step"] for values in after["state"].values()],
        [after["state"][index]["master_weights"] for index in range(4)],
        _torchs_step(loaded, other),
    )


def _torchs_step(state: dict[str, Any], job: Job) -> list[torch.Tensor]:
    """From the masters on, by the mean of the ranks' gradients."""
    groups = [
        {
            **group,
            "params": [
                torch.nn.Parameter(state["state"][i]["master_weights"]) for i in group["params"]
            ],
        }
        for group in state["param_groups"]
    ]
    optimizer = torch.optim.AdamW(groups)
    optimizer.load_state_dict(copy.deepcopy(state))  # whose tensors it changes
    numbers = {param: index for index, param in enumerate(job.model.parameters())}
    own = [param for group in job.optimizer.param_groups for param in group["params"]]
    twins = [param for group in optimizer.param_groups for param in group["params"]]
    for twin, param in zip(twins, own, strict=True):
        ranks = range(job.rank.world_size)
        grads = [gradient(param, 1, numbers[param], rank).to(FP32) for rank in ranks]
        twin.grad = torch.stack(grads).mean(dim=0)
    optimizer.step()
    return [twin.detach() for twin in twins]
