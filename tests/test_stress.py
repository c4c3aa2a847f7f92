"""Hundreds of steps in which every rank does as it likes: delays, gradients, backwards."""

from __future__ import annotations

import contextlib
import random
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, RankPool
from training import backward, make_params

import fusedshard
from fusedshard import layout

STEPS = {"sharded": 300, "replicated": 100}
RANKS = 3
SHAPES = [(40,), (17, 25), (1,), (0,), (300,), (3, 5), (), (90, 7), (64,)]
HYPER: dict[str, Any] = {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}

Gradients = list[torch.Tensor | None]


class Plan:
    """What a rank does in a step; all ranks can work out each other's.

    Attributes:
        backwards: the gradients of each backward, and whether it synchronizes.
        taken_away: parameters whose gradients are removed before the step.
        clip: the norm to clip by, if any.
        synchronizes: whether the user asks for the means before the step.
    """

    def __init__(self, params: list[torch.nn.Parameter], mode: str, step: int, rank: int) -> None:
        together = random.Random(f"{step}")
        alone = random.Random(f"{step} {rank}")
        values = torch.Generator().manual_seed(1_000 * step + rank)
        # In replicated mode a backward that synchronizes is collective.
        count = (together if mode == "replicated" else alone).randint(1, 3)
        syncs = [together.random() < 0.7 if mode == "replicated" else alone.random() < 0.7]
        self.backwards: list[tuple[Gradients, bool]] = []
        unused = together.sample(range(len(params)), 2)
        for _ in range(count):
            grads: Gradients = [
                None
                if index in unused or alone.random() < 0.2
                else torch.randn(param.shape, generator=values, dtype=param.dtype)
                for index, param in enumerate(params)
            ]
            if mode == "replicated":  # and reaches some parameter on every rank
                grads[0] = torch.randn(params[0].shape, generator=values, dtype=params[0].dtype)
            self.backwards.append((grads, syncs[0]))
        edits = mode == "sharded" and alone.random() < 0.2
        self.taken_away = alone.sample(range(len(params)), 2) if edits else []
        self.clip = together.choice([None, None, 0.5, 100.0])
        self.synchronizes = together.random() < 0.1

    def sum(self) -> Gradients:
        total: Gradients = [None] * len(self.backwards[0][0])
        for grads, _ in self.backwards:
            for index, grad in enumerate(grads):
                before = total[index]
                total[index] = grad if before is None or grad is None else before + grad
                if grad is None:
                    total[index] = before
        return [None if i in self.taken_away else grad for i, grad in enumerate(total)]


class Reference:
    """torch's optimizer in one process, on the means of all ranks' gradients."""

    def __init__(self, mode: str) -> None:
        self.params = make_params(SHAPES, dtype=torch.float64)
        self.optimizer = torch.optim.AdamW(self.params, **HYPER)
        self.mode = mode

    def step(self, step: int) -> None:
        plans = [Plan(self.params, self.mode, step, rank) for rank in range(RANKS)]
        for param, *grads in zip(self.params, *(plan.sum() for plan in plans), strict=True):
            present = [grad for grad in grads if grad is not None]
            param.grad = sum(present, torch.zeros_like(param)) / RANKS if present else None
        if plans[0].clip is not None:
            torch.nn.utils.clip_grad_norm_([p for p in self.params if p.numel()], plans[0].clip)
        self.optimizer.step()


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_hundreds_of_steps_in_disorder(ranks: RankPool, mode: str) -> None:
    assert ranks.run(RANKS, _train_in_disorder, mode) == [STEPS[mode]] * RANKS


def _train_in_disorder(rank: Rank, mode: str) -> int:
    reference = Reference(mode)
    params = make_params(SHAPES, dtype=torch.float64)
    with mock.patch.object(layout, "MIN_SHARD_BYTES", 128):
        optimizer = fusedshard.AdamW(
            params, mode=mode, process_group=rank.group, bucket_cap_mb=1e-3, **HYPER
        )
    assert optimizer.layout.bucket_count > 5
    delays = random.Random(rank.rank)

    def dawdle(*_: object) -> None:
        if delays.random() < 0.05:
            time.sleep(delays.random() * 0.004)

    for param in params:
        param.register_post_accumulate_grad_hook(dawdle)
    done = 0
    for step in range(STEPS[mode]):
        reference.step(step)
        plan = Plan(params, mode, step, rank.rank)
        optimizer.zero_grad(set_to_none=True)
        for grads, syncs in plan.backwards:
            with contextlib.nullcontext() if syncs else optimizer.no_sync():
                backward(params, grads)
            dawdle()
        done += int(_users_sum(rank, step) == RANKS * step)
        for index in plan.taken_away:
            params[index].grad = None
        if plan.synchronizes:
            optimizer.synchronize()
        if plan.clip is not None:
            optimizer.clip_grad_norm_(plan.clip)
        dawdle()
        optimizer.step()
        for ours, want in zip(params, reference.params, strict=True):
            torch.testing.assert_close(ours.detach(), want.detach(), rtol=0, atol=1e-9)
    return done


def _users_sum(rank: Rank, step: int) -> float:
    total = torch.tensor([float(step)])
    dist.all_reduce(total, group=rank.group)
    return total.item()
