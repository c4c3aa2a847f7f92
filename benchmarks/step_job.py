"""What the ranks of bench_step.py do: train the variants of one model in turns, or one alone."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness import gather
from resident import available_bytes, peak_bytes
from runner import BatchRunner, Outcome, take_turns
from step_models import Workload, small_workloads, workloads
from step_variants import builders
from traffic import traffic


def workload(model: str, device: str, args: argparse.Namespace) -> Workload:
    return (small_workloads() if args.quick else workloads(device))[model]


def make_runner(work: Workload, variant: str, device: str, steps: int) -> BatchRunner:
    torch.manual_seed(0)
    batches = work.batches(dist.get_rank(), dist.get_world_size())
    build = builders(work.learning_rate)[variant]
    return BatchRunner(work.build(), build, batches, steps, device)


class Group(NamedTuple):
    """What variants that took turns did, and what one step of each sends."""

    outcome: Outcome
    traffic: dict[str, dict[str, Any]]


def take_turns_at(device: str, model: str, names: list[str], args: argparse.Namespace) -> Group:
    """Train these variants in turns. Collective."""
    torch.set_num_threads(args.threads)
    work = workload(model, device, args)
    runners = {name: make_runner(work, name, device, args.steps) for name in names}
    outcome = take_turns(runners, args)
    return Group(outcome, {name: traffic_of(runner) for name, runner in runners.items()})


def traffic_of(runner: BatchRunner) -> dict[str, Any]:
    batch = runner.next_batch()
    return traffic(partial(runner.train, batch, lambda: None), runner.device.type)


def peak_of(device: str, model: str, name: str, args: argparse.Namespace) -> list[int]:
    """Bytes that a variant needs on each rank, from building the model to its third step."""
    torch.set_num_threads(args.threads)

    def train(work: Workload) -> None:
        runner = make_runner(work, name, device, args.steps)
        for _ in range(3):
            runner.step()

    # Loads code, and makes what a process has only once.
    train(small_workloads()[model])
    return gather(peak_bytes(partial(train, workload(model, device, args)), device))


def least_available(device: str) -> int:
    """Bytes that the rank with least memory has. Collective."""
    return min(gather(available_bytes(device)))
