"""One rank of the tests on a GPU: ``python gpu_rank.py SETTINGS``, `Settings` as JSON.

It trains in every mode and saves the parameters and the whole state after that.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpu_tools import on_host
from training import AWKWARD, gradient, make_params, train

import fusedshard

# The last one is cut into several buckets.
SHAPES = [*AWKWARD, (300_001,)]
STEPS = 3
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "bucket_cap_mb": 0.5}
WAYS = [(mode, how) for mode in ("sharded", "replicated") for how in ("backend", "ordered")]


class Settings(NamedTuple):
    """What this rank is told."""

    rank: int
    world_size: int
    store: str  # a path
    answer: str  # likewise
    backend: str
    device: str  # of a GPU only its kind counts
    device_id: bool = False  # whether the group is told its device


def result_of(device: str, rank: int, **options: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Parameters and full state after training, in host memory; rank 0's parameters must win."""
    made = make_params(SHAPES, seed=rank)
    params = [torch.nn.Parameter(param.detach().to(device)) for param in made]
    optimizer = fusedshard.AdamW(params, **OPTIONS, **options)
    steps = range(STEPS)
    train(optimizer, params, steps, lambda p, t, i: gradient(p, t, i, rank).to(device))
    return on_host((list(params), optimizer.full_state_dict()))


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    device = torch.device(settings.device)
    torch.set_num_threads(1)
    if device.type == "cuda":  # ranks share one where there is one
        device = torch.device("cuda", settings.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        settings.backend,
        init_method=f"file://{settings.store}",
        rank=settings.rank,
        world_size=settings.world_size,
        timeout=datetime.timedelta(seconds=30),
        device_id=device if settings.device_id else None,
    )
    results = {
        (mode, reduction): result_of(str(device), settings.rank, mode=mode, reduction=reduction)
        for mode, reduction in WAYS
    }
    torch.save(results, settings.answer)
    dist.barrier()
    # As in the benchmarks: gloo's orderly exit aborts now and then.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
