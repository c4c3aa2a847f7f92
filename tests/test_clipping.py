"""clip_grad_norm_ and synchronize, beside torch's clip of the mean gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import Rank, RankPool, RanksFailed
from training import (
    AWKWARD,
    Shapes,
    assert_same_bits,
    gradient,
    make_params,
    mean_gradient,
    backward,
)

import fusedshard

MODES = ("sharded", "replicated")
each_mode = pytest.mark.parametrize("mode", MODES)
WORLDS = [(1, "sharded"), *((n, mode) for n in (2, 3, 4) for mode in MODES)]
each_world = pytest.mark.parametrize(("world_size", "mode"), WORLDS)
SHAPES = (*AWKWARD, (5_000,))
STEPS = 3


def clip_and_train(
    rank: Rank, shapes: Shapes, clip: dict[str, Any], chosen: list[int] | None, options: Any
) -> Any:
    """Norms, parameters and moments after some clipped steps on this rank's own gradients."""
    params = make_params(shapes, dtype=options.pop("dtype", torch.float32))
    external = options.get("grad_sync") == "external"
    optimizer = fusedshard.AdamW(params, lr=0.1, eps=1.0, process_group=rank.group, **options)
    norms = []
    for step in range(STEPS):
        grads = []
        for i, param in enumerate(params):
            mean = mean_gradient(param, step, i, rank.world_size)
            grads.append(mean if external else gradient(param, step, i, rank.rank))
            param.grad = None
        backward(params, grads)
        some = None if chosen is None else [params[i] for i in chosen]
        norms.append(optimizer.clip_grad_norm_(parameters=some, **clip))
        optimizer.step()
    return norms, [p.detach() for p in params], optimizer.full_state_dict()["state"]


def clip_and_train_torch(
    world_size: int, shapes: Shapes, clip: dict[str, Any], chosen: list[int] | None, dtype: Any
) -> Any:
    params = make_params(shapes, dtype=dtype)
    optimizer = torch.optim.AdamW(params, lr=0.1, eps=1.0)
    norms = []
    for step in range(STEPS):
        for i, param in enumerate(params):
            param.grad = mean_gradient(param, step, i, world_size)
        # torch has no infinity norm of an empty tensor.
        numbers = range(len(params)) if chosen is None else chosen
        some = [params[i] for i in numbers if params[i].numel()]
        torch.nn.utils.clip_grad_norm_(some, **clip)
        # Its own sum in fp32 is not always good to 1e-6.
        means = [mean_gradient(p, step, i, world_size) for i, p in enumerate(params)]
        exact = [means[i].double().flatten() for i in numbers] + [torch.zeros(1).double()]
        norm = torch.linalg.vector_norm(torch.cat(exact), clip.get("norm_type", 2.0))
        norms.append(norm.to(dtype))
        optimizer.step()
    return norms, [p.detach() for p in params], optimizer.state_dict()["state"]


def check_like_torch(
    ranks: RankPool,
    world_size: int,
    shapes: Shapes,
    clip: dict[str, Any],
    chosen: list[int] | None = None,
    **options: Any,
) -> None:
    dtype = options.get("dtype", torch.float32)
    want = clip_and_train_torch(world_size, shapes, clip, chosen, dtype)
    results = ranks.run(world_size, clip_and_train, shapes, clip, chosen, options)
    for ours in results:
        torch.testing.assert_close(ours[0], want[0], rtol=1e-6, atol=0)
        torch.testing.assert_close(ours[1:], want[1:], rtol=1e-6, atol=1e-6)
        assert_same_bits(ours, results[0])


@each_world
@pytest.mark.parametrize("norm_type", [1, 2, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clp_01_the_norm_of_the_whole(
    ranks: RankPool, world_size: int, mode: str, norm_type: float, max_norm: float
) -> None:
    clip = {"max_norm": max_norm, "norm_type": norm_type}
    check_like_torch(ranks, world_size, SHAPES, clip, mode=mode)


@pytest.mark.parametrize("reduction", ["ordered", "backend"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_clp_01_reductions_and_dtypes(ranks: RankPool, reduction: str, dtype: torch.dtype) -> None:
    """The backend leaves sums, of which the norm is the mean's all the same; several buckets."""
    options: dict[str, Any] = {"reduction": reduction, "dtype": dtype, "bucket_cap_mb": 0.05}
    check_like_torch(ranks, 3, (*SHAPES, (70_000,)), {"max_norm": 1.0}, **options)


@each_mode
@pytest.mark.parametrize("world_size", [2, 4])
def test_clp_02_averaged_gradients_are_counted_once(
    ranks: RankPool, world_size: int, mode: str
) -> None:
    check_like_torch(ranks, world_size, SHAPES, {"max_norm": 1.0}, mode=mode, grad_sync="external")
    norms = ranks.run(world_size, _norm_of_averaged, mode)
    assert norms == [pytest.approx((0.8, 0.8), rel=1e-6)] * world_size


def _norm_of_averaged(rank: Rank, mode: str) -> tuple[float, float]:
    """Of 0.8, with nothing to clip, seen twice."""
    (param,) = make_params([(4,)])
    optimizer = fusedshard.Adam([param], process_group=rank.group, mode=mode, grad_sync="external")
    param.grad = torch.full((4,), 0.4)
    return optimizer.clip_grad_norm_(1.0).item(), optimizer.clip_grad_norm_(1.0).item()


@each_mode
@pytest.mark.parametrize("chosen", [[0], [2, 5], []], ids=str)
@pytest.mark.parametrize("grad_sync", ["backward", "step", "external"])
def test_a_subset_is_counted_and_scaled_alone(
    ranks: RankPool, mode: str, chosen: list[int], grad_sync: str
) -> None:
    options = {"mode": mode, "grad_sync": grad_sync}
    check_like_torch(ranks, 2, SHAPES, {"max_norm": 0.1}, chosen, **options)


@each_world
def test_clp_03_an_infinite_norm(ranks: RankPool, world_size: int, mode: str) -> None:
    """As torch: finite gradients become 0, the infinite one NaN; or an error, and nothing."""
    for messages, moments, unchanged in ranks.run(world_size, _infinite_norm, mode):
        assert "norm of order 2.0 for gradients is inf" in messages
        assert unchanged
        assert moments[:2] == [0.0, 0.0] and math.isnan(moments[2])


def _infinite_norm(rank: Rank, mode: str) -> tuple[str, list[float], bool]:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = fusedshard.Adam([param], process_group=rank.group, mode=mode)
    last = rank.rank == rank.world_size - 1
    param.grad = torch.tensor([1.0, 2.0, math.inf if last else 3.0])
    with pytest.raises(RuntimeError) as error:
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    unchanged = bool((param == 1).all()) and not optimizer.state
    assert optimizer.clip_grad_norm_(1.0).item() == math.inf
    optimizer.step()
    moments = optimizer.full_state_dict()["state"][0]["exp_avg"].tolist()
    return str(error.value), moments, unchanged


@each_mode
def test_clp_05_padding_never_enters_the_norm(ranks: RankPool, mode: str) -> None:
    """Of 5 and 1 elements on 3 ranks, twice, after memory full of NaN was freed."""
    assert ranks.run(3, _padded, mode) == [pytest.approx([math.sqrt(6.0)] * 2, rel=1e-6)] * 3


def _padded(rank: Rank, mode: str) -> list[float]:
    torch.use_deterministic_algorithms(True)
    try:
        del [torch.full((1 << 20,), math.nan) for _ in range(4)][:]
        params = [torch.nn.Parameter(torch.zeros(n)) for n in (5, 1)]
        optimizer = fusedshard.AdamW(params, process_group=rank.group, mode=mode)
        norms = []
        for _ in range(2):
            for param in params:
                param.grad = torch.full_like(param, float(rank.rank))  # mean 1
            norms.append(optimizer.clip_grad_norm_(1.0, norm_type=2.0).double().item())
            optimizer.step()
        assert all(param.isfinite().all() for param in params)
        return norms
    finally:
        torch.use_deterministic_algorithms(False)


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

    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=4))
    (param,) = make_params([(3,)])
    optimizer = fusedshard.AdamW([param], process_group=group)
    param.grad = torch.ones(3)
    if rank.rank == 0:
        optimizer.clip_grad_norm_(1.0)
