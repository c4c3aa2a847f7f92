"""clip_grad_norm_ and synchronize, between other calls and after edits of the gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import Rank, RankPool, RanksFailed
from training import MODES, backward, gradient, make_params

import fusedshard

each_mode = pytest.mark.parametrize("mode", MODES)
WORLDS = [(1, "sharded"), *((n, mode) for n in (2, 3, 4) for mode in MODES)]
each_world = pytest.mark.parametrize(("world_size", "mode"), WORLDS)


@each_mode
def test_an_unused_parameter_of_an_earlier_step_is_not_counted(ranks: RankPool, mode: str) -> None:
    assert ranks.run(2, _unused_later, mode) == [[5.0, 3.0]] * 2


def _unused_later(rank: Rank, mode: str) -> list[float]:
    """In buckets of their own."""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = fusedshard.Adam(params[:1], process_group=rank.group, mode=mode)
    optimizer.add_param_group({"params": params[1:]})
    params[0].grad, params[1].grad = torch.tensor([3.0]), torch.tensor([4.0])
    norms = [optimizer.clip_grad_norm_(1.0).item()]
    optimizer.step()
    params[0].grad, params[1].grad = torch.tensor([3.0]), None
    norms.append(optimizer.clip_grad_norm_(1.0).item())
    return norms


@each_mode
def test_synchronize_averages_once(ranks: RankPool, mode: str) -> None:
    for calls, grad, same in ranks.run(2, _synchronize, mode):
        assert calls == [1, 1, 1]
        assert grad == (1.5 if mode == "replicated" else 1.0) or grad == 2.0
        assert same


def _synchronize(rank: Rank, mode: str) -> tuple[list[int], float, bool]:
    params, plain = (make_params([(50,)]) for _ in range(2))
    optimizer, twin = (
        fusedshard.AdamW(p, process_group=rank.group, mode=mode, grad_sync="step", eps=1.0)
        for p in (params, plain)
    )
    calls = []
    optimizer.stats.reset()
    for param in (params[0], plain[0]):
        param.grad = torch.full((50,), 1.0 + rank.rank)
    for call in (optimizer.synchronize, optimizer.synchronize, optimizer.step):
        call()
        calls.append(optimizer.stats.calls["all_to_all"])
    twin.step()
    assert params[0].grad is not None
    return calls, params[0].grad[0].item(), torch.equal(params[0], plain[0])


@each_mode
def test_gradients_that_change_after_synchronize_count(ranks: RankPool, mode: str) -> None:
    """On one rank alone: edited in place, replaced, and taken away."""
    assert ranks.run(2, _change_later, mode) == [True] * 2


def _change_later(rank: Rank, mode: str) -> bool:
    params, plain = (make_params([(3,), (4,), (5,)]) for _ in range(2))
    optimizer, twin = (
        fusedshard.AdamW(p, process_group=rank.group, mode=mode, grad_sync="step", eps=1.0)
        for p in (params, plain)
    )
    for early, ps in ((True, params), (False, plain)):
        for i, param in enumerate(ps):
            param.grad = gradient(param, 0, i, rank.rank)
        if early:
            optimizer.synchronize()
        if mode == "replicated" and not early:
            twin.synchronize()
        if rank.rank == 1:
            assert ps[0].grad is not None
            ps[0].grad.mul_(3.0)
            ps[1].grad = torch.ones(4)
            ps[2].grad = None
    optimizer.step()
    twin.step()
    return all(torch.equal(a, b) for a, b in zip(params, plain, strict=True))


@each_world
def test_gradients_that_change_after_clipping_are_refused(
    ranks: RankPool, world_size: int, mode: str
) -> None:
    """On every rank, though one has changed its own; and nothing is lost."""
    assert ranks.run(world_size, _change_after_clipping, mode) == [True] * world_size


def _change_after_clipping(rank: Rank, mode: str) -> bool:
    (param,) = make_params([(6,)])
    options: Any = {"process_group": rank.group, "mode": mode, "grad_sync": "step"}
    optimizer = fusedshard.AdamW([param], **options)
    param.grad = torch.ones(6)
    optimizer.clip_grad_norm_(0.5)
    before = param.detach().clone()
    if rank.rank == 0:
        param.grad.mul_(2.0)
    with pytest.raises(RuntimeError, match="changed after clip_grad_norm_ or unscale_"):
        optimizer.step()
    return torch.equal(param, before) and not optimizer.state


@each_world
@pytest.mark.parametrize("clips_later", [True, False])
def test_a_step_that_is_left_out_leaves_nothing_behind(
    ranks: RankPool, world_size: int, mode: str, clips_later: bool
) -> None:
    """As scripts do where the norm is not finite: zero_grad, and on to the next batch."""
    want = 0.05 if clips_later else 0.1
    for norm, exp_avg in ranks.run(world_size, _leave_out, mode, clips_later):
        assert norm == math.inf and exp_avg == pytest.approx([want], rel=1e-5)


def _leave_out(rank: Rank, mode: str, clips_later: bool) -> tuple[float, list[float]]:
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = fusedshard.Adam([param], process_group=rank.group, mode=mode)
    param.grad = torch.tensor([math.inf])
    norm = optimizer.clip_grad_norm_(1.0).item()
    optimizer.zero_grad()
    param.grad = torch.ones(1)
    if clips_later:
        optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    return norm, optimizer.full_state_dict()["state"][0]["exp_avg"].tolist()


@each_mode
def test_clipping_anew_takes_the_new_gradients(ranks: RankPool, mode: str) -> None:
    """Where a step was left out, also without optimizer.zero_grad()."""
    assert ranks.run(2, _clip_anew, mode) == [[3.0, 5.0]] * 2


def _clip_anew(rank: Rank, mode: str) -> list[float]:
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = fusedshard.Adam([param], process_group=rank.group, mode=mode)
    norms = []
    for value in (3.0, 5.0):
        param.grad = None
        backward([param], [torch.tensor([value])])
        norms.append(optimizer.clip_grad_norm_(1.0).item())
    optimizer.step()
    return norms


@each_mode
def test_clipping_twice_multiplies(ranks: RankPool, mode: str) -> None:
    for norms, exp_avg in ranks.run(2, _clip_twice, mode):
        assert norms == pytest.approx([2.0, 1.0, 0.5], rel=1e-5)
        assert exp_avg == pytest.approx(0.1 * 0.25, rel=1e-5)


def _clip_twice(rank: Rank, mode: str) -> tuple[list[float], float]:
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = fusedshard.Adam([param], process_group=rank.group, mode=mode)
    param.grad = torch.ones(4)
    norms = [optimizer.clip_grad_norm_(max_norm).item() for max_norm in (1.0, 0.5, 9.0)]
    optimizer.step()
    return norms, optimizer.full_state_dict()["state"][0]["exp_avg"][0].item()


def test_no_gradients_have_a_norm_of_zero(ranks: RankPool) -> None:
    assert ranks.run(2, _no_gradients) == [0.0] * 2


def _no_gradients(rank: Rank) -> float:
    optimizer = fusedshard.AdamW(make_params([(3,)]), process_group=rank.group)
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    assert not optimizer.state
    return norm.item()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"norm_type": 0}, "norm_type: got 0, wanted a number above 0"),
        ({"norm_type": math.nan}, "norm_type: got nan"),
        ({"parameters": [torch.ones(3)]}, "parameters: number 0 is not one of this optimizer's"),
    ],
)
def test_wrong_arguments_on_one_rank_raise_on_all(
    ranks: RankPool, arguments: dict[str, Any], message: str
) -> None:
    for text in ranks.run(2, _wrong_arguments, arguments):
        assert message in text


def _wrong_arguments(rank: Rank, arguments: dict[str, Any]) -> str:
    (param,) = make_params([(3,)])
    optimizer = fusedshard.AdamW([param], process_group=rank.group)
    param.grad = torch.ones(3)
    with pytest.raises(ValueError) as error:
        optimizer.clip_grad_norm_(1.0, **(arguments if rank.rank == 1 else {}))
    optimizer.step()
    return str(error.value)


def test_a_rank_that_does_not_clip_is_not_waited_for_forever(ranks: RankPool) -> None:
    """Collective: the others' status is then step's, and all go on with what they have."""
    with pytest.raises(RanksFailed, match="rank 0"):
        ranks.run(2, _one_clips)


def _one_clips(rank: Rank) -> None:
    import datetime

    import torch.distributed as dist

    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=3))
    (param,) = make_params([(3,)])
    optimizer = fusedshard.AdamW([param], process_group=group)
    param.grad = torch.ones(3)
    if rank.rank == 0:
        optimizer.clip_grad_norm_(1.0)
