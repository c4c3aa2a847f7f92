"""Steps over NCCL on one GPU, with one rank and with two; also the program of a rank.

Two ranks on one card say whether the collectives work together, and what a step sends. They share
the card, so their times say nothing of two cards.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_stage import Spread, save, skip

import fusedshard

TENSORS, ELEMENTS = 64, 1 << 18  # 64 MiB of fp32 parameters
WAYS = [(mode, how) for mode in ("sharded", "replicated") for how in ("backend", "ordered")]
LIMIT_SECONDS = 28.0
REFUSED = "Duplicate GPU detected"


def train(mode: str, reduction: str, steps: int) -> dict[str, Any]:
    """Of one rank: seconds of a step, what it sends, and the sum of the parameters' bits."""
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    params = [
        torch.nn.Parameter(torch.randn(ELEMENTS, generator=generator, device="cuda"))
        for _ in range(TENSORS)
    ]
    for param in params:
        param.grad = torch.randn(ELEMENTS, generator=generator, device="cuda")
    optimizer = fusedshard.AdamW(params, lr=1e-3, mode=mode, reduction=reduction)
    optimizer.step()
    optimizer.stats.reset()
    seconds = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    bits = sum(int(param.detach().view(torch.int32).sum(dtype=torch.int64)) for param in params)
    sent = {name: count // steps for name, count in optimizer.stats.sent_bytes.items()}
    return {"seconds": seconds, "sent_bytes": sent, "sum_of_bits": bits}


def run_rank(rank: int, world_size: int, store: str, answer: str, steps: int) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())  # ranks share one where there is one
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=world_size)
    answers = {f"{mode}, {how}": train(mode, how, steps) for mode, how in WAYS}
    Path(answer).write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


def start_ranks(world_size: int, folder: Path, steps: int) -> tuple[list[Any], str]:
    """The ranks' answers, and what they printed; fewer answers where some have failed."""
    store = (folder / "store").as_uri()
    environment = {
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    }
    log, answers = folder / "log.txt", [folder / f"{rank}.json" for rank in range(world_size)]
    with log.open("wb") as output:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    str(rank),
                    str(world_size),
                    store,
                    str(path),
                    str(steps),
                ],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank, path in enumerate(answers)
        ]
        end = time.monotonic() + LIMIT_SECONDS
        # As long as all may still succeed.
        while time.monotonic() < end and any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks):
                break
            time.sleep(0.1)
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads(p.read_text()) for p in answers if p.exists()], log.read_text()


def summary(answers: list[Any]) -> dict[str, Any]:
    found = {}
    for way in answers[0]:
        ranks = [answer[way] for answer in answers]
        spread = Spread.of(
            [max(times) for times in zip(*(r["seconds"] for r in ranks), strict=True)]
        )
        agree = len({rank["sum_of_bits"] for rank in ranks}) == 1
        sent = ranks[0]["sent_bytes"]
        found[way] = {"seconds": asdict(spread), "sent_bytes": sent, "ranks_agree": agree}
        print(f"{len(ranks)} ranks, {way}: {spread.text(1e3)} ms, sent {sent}", flush=True)
    return found


def main(*, quick: bool) -> None:
    if not dist.is_nccl_available():
        skip("torch was built without NCCL")
    figures: dict[str, Any] = {"parameter_bytes": 4 * TENSORS * ELEMENTS}
    problems, refused = [], ""
    for world_size in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            answers, printed = start_ranks(world_size, Path(folder), 3 if quick else 15)
        name = f"{world_size} ranks"
        if len(answers) == world_size:
            figures[name] = summary(answers)
            differ = [way for way, row in figures[name].items() if not row["ranks_agree"]]
            problems += [f"{name}: parameters differ: {', '.join(differ)}"] if differ else []
        elif REFUSED in printed:
            figures[name] = refused = f"NCCL refuses two ranks on one card ({REFUSED})"
            print(f"{name}: {refused}")
        else:
            print(printed)
            figures[name] = "failed"
            problems.append(f"{name}: no answer within {LIMIT_SECONDS:.0f} s, or an error")
        save(figures)
    if problems:
        sys.exit("; ".join(problems))
    if refused:
        skip(f"1 rank was measured, but {refused}")


if __name__ == "__main__":
    own_rank, ranks, own_store, own_answer, step_count = sys.argv[1:]
    run_rank(int(own_rank), int(ranks), own_store, own_answer, int(step_count))
