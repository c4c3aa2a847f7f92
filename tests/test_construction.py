"""What ranks must agree on when they build an optimizer, and how they hear that they do not."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from ranks import Rank, RankPool
from training import make_params

import fusedshard


def build(rank: Rank, params: Any, **options: Any) -> tuple[str, str]:
    """Kind and text of the error, on this rank; no parameter may have changed."""
    tensors = [p for p in params if isinstance(p, torch.nn.Parameter)]
    before = [(p.detach().clone(), p.data_ptr()) for p in tensors]
    start = time.monotonic()
    with pytest.raises((ValueError, TypeError)) as caught:
        fusedshard.AdamW(params, process_group=rank.group, **options)
    assert time.monotonic() - start < 20, "the error must not wait for the group's timeout"
    for param, (value, address) in zip(tensors, before, strict=True):
        assert torch.equal(param, value) and param.data_ptr() == address
    return type(caught.value).__name__, str(caught.value)


def test_dst_01_all_ranks_start_from_the_first_ranks_weights(ranks: RankPool) -> None:
    for mode in ("sharded", "replicated"):
        for params in ranks.run(3, _dst_01, mode):
            for param, expected in zip(params, make_params([(5, 7), (3,)], seed=0), strict=True):
                assert torch.equal(param, expected)


def _dst_01(rank: Rank, mode: str) -> list[torch.Tensor]:
    params = make_params([(5, 7), (3,)], seed=rank.rank)
    fusedshard.AdamW(params, mode=mode, process_group=rank.group)
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("world_size", [2, 3])
def test_dst_02_another_number_of_parameters(ranks: RankPool, world_size: int) -> None:
    last = world_size - 1
    for kind, text in ranks.run(world_size, _dst_02_longer, last):
        assert kind == "ValueError"
        assert "3 parameters" in text and "2 on rank 0" in text and "(9, 9)" in text
    for kind, text in ranks.run(world_size, _dst_02_empty, last):
        assert kind == "ValueError" and "empty parameter list" in text
    for kind, text in ranks.run(world_size, _dst_02_frozen, last):
        assert kind == "ValueError" and "parameter 1" in text and "requires_grad=False" in text


def _dst_02_longer(rank: Rank, odd_one: int) -> Any:
    shapes = [(2, 3), (4,)] + ([(9, 9)] if rank.rank == odd_one else [])
    return build(rank, make_params(shapes))


def _dst_02_empty(rank: Rank, odd_one: int) -> Any:
    return build(rank, [] if rank.rank == odd_one else make_params([(2, 3)]))


def _dst_02_frozen(rank: Rank, odd_one: int) -> Any:
    params = make_params([(2, 3), (4,)])
    params[1].requires_grad_(rank.rank != odd_one)
    return build(rank, params)


@pytest.mark.parametrize(
    ("on_rank_0", "on_rank_1", "named"),
    [
        ([(2, 3), (4,)], [(4,), (2, 3)], "parameter 0"),
        ([(4,), (2, 3)], [(4,), (3, 2)], "parameter 1"),
    ],
    ids=["order", "shape"],
)
def test_dst_03_another_order_or_shape(
    ranks: RankPool, on_rank_0: Any, on_rank_1: Any, named: str
) -> None:
    for kind, text in ranks.run(2, _dst_03, on_rank_0, on_rank_1):
        assert kind == "ValueError"
        assert named in text
        assert str(on_rank_0[int(named[-1])]) in text and str(on_rank_1[int(named[-1])]) in text


def _dst_03(rank: Rank, on_rank_0: Any, on_rank_1: Any) -> Any:
    return build(rank, make_params(on_rank_1 if rank.rank == 1 else on_rank_0))


def test_dst_03_groups_swapped(ranks: RankPool) -> None:
    for kind, text in ranks.run(2, _dst_03_groups):
        assert kind == "ValueError" and "parameter 0" in text


def _dst_03_groups(rank: Rank) -> Any:
    a, b = make_params([(2, 3), (4,)])
    groups = [{"params": [a]}, {"params": [b]}]
    return build(rank, groups if rank.rank == 0 else groups[::-1])


def test_names_are_used_in_messages(ranks: RankPool) -> None:
    for kind, text in ranks.run(2, _named):
        assert kind == "ValueError" and "'1.bias'" in text and "(5,)" in text and "(6,)" in text


def _named(rank: Rank) -> Any:
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(3, 5 + rank.rank))
    named = [("1.bias", dict(model.named_parameters())["1.bias"])]
    with pytest.raises(ValueError) as caught:
        fusedshard.AdamW(named, process_group=rank.group)
    return "ValueError", str(caught.value)


def test_dst_04_a_set_has_no_order(ranks: RankPool) -> None:
    for kind, text in [*ranks.run(2, _dst_04, False), *ranks.run(2, _dst_04, True)]:
        assert kind == "TypeError" and "set" in text


def _dst_04(rank: Rank, in_group: bool) -> Any:
    params = set(make_params([(2,), (3,)]))
    return build(rank, [{"params": params}] if in_group else params)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lr": -1.0}, "learning rate: -1.0"),
        ({"lr": float("nan")}, "learning rate: nan"),
        ({"lr": torch.tensor([0.1, 0.2])}, "(2,)"),
        ({"betas": (1.0, 0.9)}, "index 0: 1.0"),
        ({"betas": (0.9, -0.1)}, "index 1: -0.1"),
        ({"eps": -1.0}, "epsilon value: -1.0"),
        ({"weight_decay": -1.0}, "weight_decay value: -1.0"),
        ({"mode": "zero3"}, "mode: got 'zero3', wanted one of 'sharded', 'replicated'"),
        ({"reduction": "tree"}, "reduction: got 'tree'"),
        ({"grad_sync": "backward"}, "grad_sync: got 'backward', wanted one of"),
        ({"betas": (0.9,)}, "betas: got (0.9,), wanted two numbers"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb: got 0"),
        ({"bucket_cap_mb": "big"}, "bucket_cap_mb: got 'big'"),
        ({"differentiable": True}, "differentiable: got True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_options_on_one_rank_raise_on_all(
    ranks: RankPool, options: dict[str, Any], named: str
) -> None:
    for kind, text in ranks.run(2, _one_rank_options, options):
        assert kind == "ValueError" and named in text


def _one_rank_options(rank: Rank, options: dict[str, Any]) -> Any:
    return build(rank, make_params([(2, 3)]), **(options if rank.rank == 1 else {}))


@pytest.mark.parametrize(
    "options",
    [{"mode": "replicated"}, {"lr": 0.5}, {"amsgrad": True}, {"bucket_cap_mb": 1}],
    ids=lambda value: next(iter(value)),
)
def test_differing_options_raise_on_all(ranks: RankPool, options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    for kind, text in ranks.run(2, _one_rank_options, options):
        named = (
            f"{name}={value!r}" if name in ("mode", "bucket_cap_mb") else f"['{name}']={value!r}"
        )
        assert kind == "ValueError" and named in text and len(text) < 200


def test_shp_07_overlapping_elements(ranks: RankPool) -> None:
    for kind, text in ranks.run(2, _shp_07):
        assert kind == "ValueError" and "parameter 1" in text and "(0, 1)" in text


def _shp_07(rank: Rank) -> Any:
    expanded = torch.nn.Parameter(torch.ones(1, 4).expand(3, 4))
    return build(rank, [*make_params([(2,)]), expanded])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_unsupported_dtype_on_one_rank(ranks: RankPool, dtype: torch.dtype) -> None:
    for kind, text in ranks.run(2, _dtype, dtype):
        assert kind == "TypeError" and str(dtype) in text and "torch.float32" in text


def _dtype(rank: Rank, dtype: torch.dtype) -> Any:
    kind = dtype if rank.rank == 1 else torch.float32
    return build(rank, [torch.nn.Parameter(torch.zeros(3, dtype=kind))])


def test_shp_10_repeated_parameters(ranks: RankPool) -> None:
    for kind, text in ranks.run(2, _shp_10, False):
        assert kind == "ValueError" and "twice" in text
    for kind, _ in ranks.run(2, _shp_10, True):
        assert kind == "ValueError"


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def _shp_10(rank: Rank, two_groups: bool) -> Any:
    (param,) = make_params([(2,)])
    return build(rank, [{"params": [param]}, {"params": [param]}] if two_groups else [param, param])


def test_a_device_without_kernels_is_refused() -> None:
    param = torch.nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match=r"parameter 0: got device meta, wanted cpu"):
        fusedshard.AdamW([param])


def test_process_group_of_a_wrong_kind() -> None:
    with pytest.raises(TypeError, match="process_group: got str"):
        wrong: Any = "world"
        fusedshard.AdamW(make_params([(2,)]), process_group=wrong)


def test_dst_08_groups_without_global_rank_0(ranks: RankPool) -> None:
    results = ranks.run(4, _dst_08)
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    for first, steps in ((0, 3), (1, 5)):
        param = torch.nn.Parameter(torch.full((5,), float(first)))
        optimizer = torch.optim.AdamW([param], lr=0.1, eps=1.0)
        for step in range(steps):
            param.grad = torch.full((5,), first + 1.0 + step)  # mean of first, first + 2
            optimizer.step()
        torch.testing.assert_close(results[first], param.detach(), rtol=0, atol=1e-6)


def _dst_08(rank: Rank) -> torch.Tensor:
    groups = [torch.distributed.new_group(members) for members in ([0, 2], [1, 3])]
    group = groups[rank.rank % 2]
    param = torch.nn.Parameter(torch.full((5,), float(rank.rank)))
    optimizer = fusedshard.AdamW([param], lr=0.1, eps=1.0, process_group=group)
    for step in range(3 if rank.rank % 2 == 0 else 5):
        param.grad = torch.full((5,), float(rank.rank + step))
        optimizer.step()
    state = optimizer.full_state_dict()
    optimizer.load_state_dict(state)
    return param.detach().clone()


def test_a_rank_outside_the_group(ranks: RankPool) -> None:
    outside = "process_group: this rank is not a member of it"
    assert ranks.run(4, _outside) == [None, outside, outside, outside]


def _outside(rank: Rank) -> str | None:
    only_first = torch.distributed.new_group([0])
    try:
        fusedshard.AdamW(make_params([(2,)]), process_group=only_first)
    except ValueError as error:
        return str(error)
    return None
