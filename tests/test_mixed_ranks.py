"""Mixed precision on several ranks: the same bits whatever their number and the mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mixed import (
    BF16,
    FORMATS,
    FP32,
    HYPER,
    Formats,
    exact_gradient,
    make_mixed,
    train_mixed,
)
from ranks import Rank, RankPool
from training import MODES, assert_same_bits, backward

import fusedshard

each_mode = pytest.mark.parametrize("mode", MODES)
MASTERED = Formats(None, FP32, True)


@pytest.fixture(scope="module")
def alone() -> dict[Formats, Any]:
    """What one rank gets."""
    return {formats: train_mixed(None, formats) for formats in FORMATS}


# Each of the formats meets both modes and both numbers of ranks, and so do these each other.
PLACES = [
    (formats, mode, 2 + (number + row) % 2)
    for number, formats in enumerate(FORMATS)
    for row, mode in enumerate(MODES)
]


@pytest.mark.parametrize(("formats", "mode", "world_size"), PLACES, ids=str)
def test_bits_do_not_depend_on_the_number_of_ranks(
    ranks: RankPool, alone: dict[Formats, Any], formats: Formats, mode: str, world_size: int
) -> None:
    for outcome in ranks.run(world_size, _train, mode, formats):
        assert_same_bits(outcome, alone[formats])


def _train(rank: Rank, mode: str, formats: Formats) -> Any:
    return train_mixed(rank, formats, mode=mode)


@pytest.mark.parametrize("grad_sync", ["step", "external"])
@pytest.mark.parametrize("reduction", ["ordered", "backend"])
@each_mode
def test_bits_do_not_depend_on_the_way_of_the_gradients(
    ranks: RankPool, alone: dict[Formats, Any], mode: str, reduction: str, grad_sync: str
) -> None:
    for outcome in ranks.run(3, _train_by, mode, reduction, grad_sync):
        assert_same_bits(outcome, alone[MASTERED])


def _train_by(rank: Rank, mode: str, reduction: str, grad_sync: str) -> Any:
    options: dict[str, Any] = {"mode": mode, "reduction": reduction, "grad_sync": grad_sync}
    if grad_sync == "external":  # every rank has the mean
        return _train_on_means(rank, **options)
    return train_mixed(rank, MASTERED, bucket_cap_mb=0.05, **options)


def _train_on_means(rank: Rank, **options: Any) -> Any:
    params = make_mixed(seed=rank.rank)
    optimizer = fusedshard.AdamW(params, process_group=rank.group, **HYPER, **options)
    for step in range(4):
        for index, param in enumerate(params):
            param.grad = exact_gradient(param, step, index, 0, 1)
        optimizer.step()
    return [p.detach().clone() for p in params], optimizer.full_state_dict()


def test_other_random_numbers_for_other_seeds_and_none_without_rounding() -> None:
    formats = Formats(None, BF16, True)
    first, again, other = (train_mixed(None, formats, seed=seed) for seed in (0, 0, 1))
    assert_same_bits(first, again)
    moments = [outcome[1]["state"][0]["exp_avg"] for outcome in (first, other)]
    assert not torch.equal(*moments)
    assert (moments[0] - moments[1]).abs().max() <= moments[0].abs().max() / 50
    nearest = Formats(None, BF16, False)
    assert_same_bits(train_mixed(None, nearest, seed=1), train_mixed(None, nearest, seed=0))


@each_mode
def test_the_mean_is_fp32_and_p_grad_shows_its_rounding(ranks: RankPool, mode: str) -> None:
    """1, 256 and 2: a sum that is rounded to bf16 at every hop loses the 1."""
    for exp_avg, grad in ranks.run(3, _mean, mode):
        assert exp_avg == pytest.approx(0.1 * (1 + 256 + 2) / 3, rel=1e-6)
        assert grad == (86.5 if mode == "replicated" else None)


def _mean(rank: Rank, mode: str) -> tuple[float, float | None]:
    param = torch.nn.Parameter(torch.zeros(3, dtype=BF16))
    optimizer = fusedshard.AdamW([param], mode=mode, process_group=rank.group)
    backward([param], [torch.full((3,), (1.0, 256.0, 2.0)[rank.rank], dtype=BF16)])
    assert param.grad is not None
    grad = param.grad[0].item() if mode == "replicated" else None
    optimizer.step()
    return optimizer.full_state_dict()["state"][0]["exp_avg"][0].item(), grad


EDITS = ["multiplied", "clipped", "replaced", "clipped by us", "by .data", "by numpy"]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_the_mean_counts_in_replicated_mode(ranks: RankPool, edit: str) -> None:
    """That of another parameter stays what bf16 has not: 6.015625, of which ``p.grad`` shows 6."""
    for exp_avg, untouched in ranks.run(2, _edit, edit):
        assert exp_avg == pytest.approx(0.1 * 3, rel=1e-6)
        assert untouched == pytest.approx(0.1 * 6.015625, rel=1e-6)


def _edit(rank: Rank, edit: str) -> tuple[float, float]:
    params = [torch.nn.Parameter(torch.zeros(1, dtype=BF16)) for _ in range(2)]
    optimizer = fusedshard.AdamW(params, mode="replicated", process_group=rank.group)
    param, own = params[0], torch.tensor([(6.0, 6.03125)[rank.rank]], dtype=BF16)
    backward(params, [own, own])
    assert param.grad is not None and param.grad.item() == 6.0
    if edit == "multiplied":
        param.grad.mul_(0.5)
    elif edit == "clipped":
        torch.nn.utils.clip_grad_norm_([param], 3.0)
    elif edit == "replaced":
        param.grad = torch.full_like(param, 3.0)
    elif edit == "by .data":
        param.grad.data.mul_(0.5)
    elif edit == "by numpy":
        param.grad.view(torch.int16).numpy()[:] = torch.tensor([3.0], dtype=BF16).view(torch.int16)
    else:
        optimizer.clip_grad_norm_(3.0, parameters=[param])
        assert param.grad.item() == 3.0
    optimizer.step()
    state = optimizer.full_state_dict()["state"]
    return state[0]["exp_avg"].item(), state[1]["exp_avg"].item()


@pytest.mark.parametrize(
    ("mode", "reduction", "wanted"),
    [
        ("sharded", "ordered", {"all_to_all": 2, "all_gather": 2}),
        ("sharded", "backend", {"reduce_scatter": 4, "all_gather": 2}),
        ("replicated", "ordered", {"all_to_all": 2, "all_gather": 4}),
        ("replicated", "backend", {"all_reduce": 8}),
    ],
)
def test_bytes_on_the_wire(
    ranks: RankPool, mode: str, reduction: str, wanted: dict[str, int]
) -> None:
    """Of each bf16 parameter, to N - 1 of N ranks: 16-bit gradients, but fp32 means, and fp32 where
    a backend adds."""
    numel = 3 << 16
    for sent in ranks.run(3, _sent, mode, reduction, numel):
        assert sent == {name: size * numel * 2 // 3 for name, size in wanted.items()}


def _sent(rank: Rank, mode: str, reduction: str, numel: int) -> dict[str, int]:
    param = torch.nn.Parameter(torch.ones(numel, dtype=BF16))
    optimizer = fusedshard.AdamW([param], mode=mode, reduction=reduction, process_group=rank.group)
    optimizer.stats.reset()
    backward([param], [torch.ones_like(param)])
    optimizer.step()
    sent = optimizer.stats.sent_bytes
    return {name: count for name, count in sent.items() if name not in ("status", "broadcast")}


def test_what_changes_no_bit_of_the_mean_on_one_rank(ranks: RankPool) -> None:
    """Replicas must not part."""
    first, second = ranks.run(2, _one_rank_edits)
    assert_same_bits(second, first)
    assert first[1]["state"][0]["exp_avg"].item() == pytest.approx(0.6015625)


def _one_rank_edits(rank: Rank) -> Any:
    param = torch.nn.Parameter(torch.zeros(1, dtype=BF16))
    optimizer = fusedshard.AdamW([param], mode="replicated", process_group=rank.group)
    backward([param], [torch.tensor([(6.0, 6.03125)[rank.rank]], dtype=BF16)])
    assert param.grad is not None
    if rank.rank == 0:
        param.grad.nan_to_num_()
    optimizer.step()
    return param.detach().clone(), optimizer.full_state_dict()


@each_mode
def test_gradients_of_other_strides_than_the_parameter(ranks: RankPool, mode: str) -> None:
    """The mean is written into them by way of a copy."""
    outcomes = [outcome for m in ("sharded", mode) for outcome in ranks.run(2, _other_strides, m)]
    for outcome in outcomes[1:]:
        assert_same_bits(outcome, outcomes[0])


def _other_strides(rank: Rank, mode: str) -> Any:
    generator = torch.Generator().manual_seed(rank.rank)
    start = torch.ones(4, 3, 5, 5, dtype=BF16).contiguous(memory_format=torch.channels_last)
    param = torch.nn.Parameter(start)
    param.grad = torch.zeros(4, 3, 5, 5, dtype=BF16)
    optimizer = fusedshard.AdamW([param], mode=mode, process_group=rank.group)
    backward([param], [torch.randn(4, 3, 5, 5, generator=generator).to(BF16)])
    assert param.grad.is_contiguous()
    optimizer.step()
    return param.detach().clone(), optimizer.full_state_dict()


def test_clipping_after_torchs_unscale(ranks: RankPool) -> None:
    """Which changes ``p.grad`` without a trace: the norm is that of the unscaled gradient."""
    for norm, exp_avg in ranks.run(2, _unscale_and_clip):
        assert norm == pytest.approx(3.5, rel=1e-6)
        assert exp_avg == pytest.approx(0.1 * 1.75 / 3.5, rel=1e-5)


def _unscale_and_clip(rank: Rank) -> tuple[float, float]:
    param = torch.nn.Parameter(torch.zeros(4, dtype=BF16))
    optimizer = fusedshard.AdamW([param], mode="replicated", process_group=rank.group)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    backward([param], [torch.full_like(param, (1.5, 2.0)[rank.rank])], 1024.0)
    scaler.unscale_(optimizer)
    norm = optimizer.clip_grad_norm_(1.0).item()
    scaler.step(optimizer)
    return norm, optimizer.full_state_dict()["state"][0]["exp_avg"][0].item()
