"""Complex parameters with state dicts, clipping and loss scaling, and what is refused of them."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from ranks import Rank, RankPool
from test_complex import C64, C128, F32, HYPER, MIXED, each_world, make, train_torch
from training import assert_close, assert_same_bits, gradient, mean_gradient, train

import fusedshard


@each_world
@pytest.mark.parametrize("amsgrad", [False, True])
def test_state_dicts_go_to_torch_and_back(
    ranks: RankPool, world_size: int, mode: str, amsgrad: bool
) -> None:
    options = {**HYPER, "amsgrad": amsgrad}
    start = train_torch(1, "Adam", MIXED, 3, **options)
    want = resume(torch.optim.Adam, start, lambda p, t, i: mean_gradient(p, t, i, world_size))
    for given, ours in ranks.run(world_size, _resume, mode, start):
        assert_same_bits(given, start[1]["state"])
        assert_close(ours, want)
        back = resume(torch.optim.Adam, ours, lambda p, t, i: gradient(p, t, i, 0))
        again = resume(fusedshard.Adam, ours, lambda p, t, i: gradient(p, t, i, 0))
        assert_close(again, back)


def resume(kind: Any, saved: Any, grad: Any, **options: Any) -> Any:
    """A new optimizer, with other hyperparameters at first, goes on for two steps."""
    params = [torch.nn.Parameter(p.clone()) for p in saved[0]]
    optimizer = kind(params, **options)
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    train(optimizer, params, range(3, 5), grad)
    return [p.detach() for p in params], optimizer.state_dict()


def _resume(rank: Rank, mode: str, start: Any) -> Any:
    params = [torch.nn.Parameter(p.clone()) for p in start[0]]
    optimizer = fusedshard.Adam(params, process_group=rank.group, mode=mode)
    optimizer.load_state_dict(start[1])
    given = optimizer.full_state_dict()["state"]
    train(optimizer, params, range(3, 5), lambda p, t, i: gradient(p, t, i, rank.rank))
    return given, ([p.detach() for p in params], optimizer.full_state_dict())


def test_state_of_the_other_kind_is_refused() -> None:
    """torch would drop imaginary parts with no more than a warning, or fail at the next step."""
    for here, there in ((F32, C64), (C64, F32)):
        saved = train_torch(1, "Adam", [((3,), there)], 1)[1]
        optimizer = fusedshard.Adam(make([((3,), here)]))
        with pytest.raises(ValueError, match=f"parameter 0: exp_avg is {there} in the state dict"):
            optimizer.load_state_dict(saved)


@each_world
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("chosen", [None, [0, 4, 6]], ids=str)
def test_clipping_counts_absolute_values(
    ranks: RankPool, world_size: int, mode: str, norm_type: float, chosen: list[int] | None
) -> None:
    params = make(MIXED)
    optimizer = torch.optim.AdamW(params, **HYPER)
    norms = []
    for step in range(3):
        means = [mean_gradient(p, step, i, world_size) for i, p in enumerate(params)]
        some = [i for i in chosen or range(len(params)) if params[i].numel()]
        exact = torch.cat([means[i].to(C128).abs().flatten() for i in some])
        norms.append(torch.linalg.vector_norm(exact, norm_type))
        for param, mean in zip(params, means, strict=True):
            param.grad = mean
        torch.nn.utils.clip_grad_norm_([params[i] for i in some], 0.5, norm_type)
        optimizer.step()
    results = ranks.run(world_size, _clip, mode, norm_type, chosen)
    for ours in results:
        torch.testing.assert_close(ours[0], norms, rtol=1e-6, atol=0)
        torch.testing.assert_close(ours[1], [p.detach() for p in params], rtol=0, atol=1e-6)
        torch.testing.assert_close(ours[2], optimizer.state_dict()["state"], rtol=0, atol=1e-6)
        assert_same_bits(ours, results[0])


def _clip(rank: Rank, mode: str, norm_type: float, chosen: list[int] | None) -> Any:
    params = make(MIXED)
    optimizer = fusedshard.AdamW(params, process_group=rank.group, mode=mode, **HYPER)
    norms = []
    for step in range(3):
        for index, param in enumerate(params):
            param.grad = gradient(param, step, index, rank.rank)
        some = None if chosen is None else [params[i] for i in chosen]
        norms.append(optimizer.clip_grad_norm_(0.5, norm_type, parameters=some))
        optimizer.step()
    return norms, [p.detach() for p in params], optimizer.full_state_dict()["state"]


def test_the_norms_dtype_is_torchs() -> None:
    for dtype in (C64, C128):
        (param,) = make([((3,), dtype)])
        param.grad = torch.ones(3, dtype=dtype)
        norm = fusedshard.Adam([param]).clip_grad_norm_(1.0)
        assert norm.dtype == torch.nn.utils.clip_grad_norm_([param], 1.0).dtype == dtype.to_real()


@each_world
def test_an_infinite_imaginary_part_skips_the_step_everywhere(
    ranks: RankPool, world_size: int, mode: str
) -> None:
    """torch's scaler has no complex gradients; its optimizer gets the steps that count."""
    params = make(MIXED)
    optimizer = torch.optim.AdamW(params, **HYPER)
    for step in (1, 2):
        train(
            optimizer,
            params,
            range(step, step + 1),
            lambda p, t, i: mean_gradient(p, t, i, world_size),
        )
    for scale, ours in ranks.run(world_size, _scale, mode):
        assert scale == 512.0
        assert_close(ours, ([p.detach() for p in params], optimizer.state_dict()))


def _scale(rank: Rank, mode: str) -> Any:
    params = make(MIXED)
    optimizer = fusedshard.AdamW(params, process_group=rank.group, mode=mode, **HYPER)
    scaler = fusedshard.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        factor = scaler.scale(torch.ones(()))
        for index, param in enumerate(params):
            param.grad = gradient(param, step, index, rank.rank) * factor
        if step == 0 and rank.rank == rank.world_size - 1:
            assert params[6].grad is not None
            torch.view_as_real(params[6].grad)[-1, 1] = math.inf
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), ([p.detach() for p in params], optimizer.full_state_dict())


def test_a_rank_with_reals_instead(ranks: RankPool) -> None:
    """Half as many numbers of one kind are as many bytes as of the other."""
    for text in ranks.run(2, _reals_on_one):
        assert "complex64, shape (4,)" in text and "float32, shape (8,)" in text


def _reals_on_one(rank: Rank) -> str:
    params = make([((8,), F32)] if rank.rank else [((4,), C64)])
    with pytest.raises(ValueError) as caught:
        fusedshard.AdamW(params, process_group=rank.group)
    return str(caught.value)


@pytest.mark.parametrize("replace", [torch.conj, torch._neg_view])
def test_memory_that_shows_other_values_now_is_noticed(replace: Any) -> None:
    (param,) = make([((3,), C64)])
    optimizer = fusedshard.AdamW([param])
    param.data = replace(param.data)
    param.grad = torch.ones(3, dtype=C64)
    before = param.detach().clone()
    with pytest.raises(RuntimeError, match="parameter 0: moved after the optimizer was built"):
        optimizer.step()
    assert torch.equal(param, before)
