"""Against DistributedDataParallel: the gradients and losses of a real backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Rank, RankPool
from torch.nn.parallel import DistributedDataParallel
from training import GRAD_SYNCS, MODES, Variant, assert_same_bits

HYPER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        # No bias: before a BatchNorm its gradient is rounding noise, which Adam scales up.
        torch.nn.Conv2d(3, 5, 3, bias=False),
        torch.nn.BatchNorm2d(5),
        torch.nn.Flatten(),
        torch.nn.Linear(5 * 6 * 6, 17),
        torch.nn.GELU(),
        torch.nn.Linear(17, 1),
    )
    weight = next(model.parameters())
    weight.data = weight.data.to(memory_format=torch.channels_last)
    return model


def run(rank: Rank, wrap: bool, make: Any, steps: int = 20) -> Any:
    model = make_model()
    optimizer = make(model, rank)
    forward = DistributedDataParallel(model, process_group=rank.group) if wrap else model
    grads = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(97 * step + rank.rank)
        batch = torch.randn(4, 3, 8, 8, generator=generator)
        optimizer.zero_grad()
        forward(batch).square().mean().backward()
        optimizer.step()
        if step == 0:
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    params = [p.detach().clone() for p in model.parameters()]
    state = getattr(optimizer, "full_state_dict", optimizer.state_dict)()["state"]
    return params, grads, state


def _ddp(rank: Rank) -> Any:
    return run(rank, True, lambda m, r: torch.optim.AdamW(m.parameters(), **HYPER))


def _ours(rank: Rank, variant: Variant) -> Any:
    external = variant.grad_sync == "external"
    return run(rank, external, lambda m, r: variant.ours(m.parameters(), r, **HYPER))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("grad_sync", GRAD_SYNCS)
def test_dst_11_replicated_is_ddp_and_sharded_is_replicated(
    ranks: RankPool, world_size: int, grad_sync: str
) -> None:
    ddp = ranks.run(world_size, _ddp)
    replicated, sharded = (
        ranks.run(world_size, _ours, Variant("AdamW", mode, grad_sync))
        for mode in ("replicated", "sharded")
    )
    for rank in range(world_size):
        assert_same_bits(replicated[rank][0], replicated[0][0])
        assert_same_bits(sharded[rank][0], replicated[0][0])
        assert_same_bits(sharded[rank][2], replicated[0][2])
        _compare(replicated[rank], ddp[0])
        if world_size == 2:  # dividing by a power of two before or after adding is the same
            assert_same_bits(replicated[rank][1], ddp[rank][1])


@pytest.mark.parametrize("mode", MODES)
def test_a_wrapped_model_trains_as_under_ddp(ranks: RankPool, mode: str) -> None:
    ddp = ranks.run(3, _ddp)
    for result in ranks.run(3, _ours, Variant("AdamW", mode, "external")):
        _compare(result, ddp[0])


def _compare(ours: Any, reference: Any) -> None:
    for a, b in zip(ours[0], reference[0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    for index, state in reference[2].items():
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours[2][index][name], state[name], rtol=0, atol=1e-6)
