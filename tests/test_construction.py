"""What ranks must agree on when they build an optimizer, and how they hear that they do not."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from ranks import Rank, RankPool
from training import Variant, assert_same_bits, each_kind_and_mode, make_params

import fusedshard

DEFAULT = Variant("AdamW", "sharded", "step")


def build(rank: Rank, params: Any, variant: Variant = DEFAULT, **options: Any) -> tuple[str, str]:
    """Kind and text of the error, on this rank; no parameter may have changed."""
    tensors = [p for p in params if isinstance(p, torch.nn.Parameter)]
    before = [(p.detach().clone(), p.data_ptr()) for p in tensors]
    start = time.monotonic()
    with pytest.raises((ValueError, TypeError)) as caught:
        variant.ours(params, rank, **options)
    assert time.monotonic() - start < 20, "the error must not wait for the group's timeout"
    for param, (value, address) in zip(tensors, before, strict=True):
        assert torch.equal(param, value) and param.data_ptr() == address
    return type(caught.value).__name__, str(caught.value)


@each_kind_and_mode
@pytest.mark.parametrize("world_size", [2, 3])
def test_dst_02_another_number_of_parameters(
    ranks: RankPool, world_size: int, variant: Variant
) -> None:
    last = world_size - 1
    for kind, text in ranks.run(world_size, _dst_02_longer, last, variant):
        assert kind == "ValueError"
        assert "3 parameters" in text and "2 on rank 0" in text and "(9, 9)" in text
    for kind, text in ranks.run(world_size, _dst_02_empty, last, variant):
        assert kind == "ValueError" and "empty parameter list" in text
    for kind, text in ranks.run(world_size, _dst_02_frozen, last, variant):
        assert kind == "ValueError" and "parameter 1" in text and "requires_grad=False" in text


def _dst_02_longer(rank: Rank, odd_one: int, variant: Variant) -> Any:
    shapes = [(2, 3), (4,)] + ([(9, 9)] if rank.rank == odd_one else [])
    return build(rank, make_params(shapes), variant)


def _dst_02_empty(rank: Rank, odd_one: int, variant: Variant) -> Any:
    return build(rank, [] if rank.rank == odd_one else make_params([(2, 3)]), variant)


def _dst_02_frozen(rank: Rank, odd_one: int, variant: Variant) -> Any:
    params = make_params([(2, 3), (4,)])
    params[1].requires_grad_(rank.rank != odd_one)
    return build(rank, params, variant)


@each_kind_and_mode
@pytest.mark.parametrize(
    ("on_rank_0", "on_rank_1", "named"),
    [
        ([(2, 3), (4,)], [(4,), (2, 3)], "parameter 0"),
        ([(4,), (2, 3)], [(4,), (3, 2)], "parameter 1"),
    ],
    ids=["order", "shape"],
)
def test_dst_03_another_order_or_shape(
    ranks: RankPool, variant: Variant, on_rank_0: Any, on_rank_1: Any, named: str
) -> None:
    for kind, text in ranks.run(2, _dst_03, variant, on_rank_0, on_rank_1):
        assert kind == "ValueError"
        assert named in text
        assert str(on_rank_0[int(named[-1])]) in text and str(on_rank_1[int(named[-1])]) in text


def _dst_03(rank: Rank, variant: Variant, on_rank_0: Any, on_rank_1: Any) -> Any:
    return build(rank, make_params(on_rank_1 if rank.rank == 1 else on_rank_0), variant)


@each_kind_and_mode
def test_dst_03_groups_swapped(ranks: RankPool, variant: Variant) -> None:
    for kind, text in ranks.run(2, _dst_03_groups, variant):
        assert kind == "ValueError" and "parameter 0" in text


def _dst_03_groups(rank: Rank, variant: Variant) -> Any:
    a, b = make_params([(2, 3), (4,)])
    groups = [{"params": [a]}, {"params": [b]}]
    return build(rank, groups if rank.rank == 0 else groups[::-1], variant)


def test_another_dtype_on_one_rank(ranks: RankPool) -> None:
    for kind, text in ranks.run(2, _other_dtype):
        assert kind == "ValueError" and "parameter 1" in text
        assert "float64, shape (4,)" in text and "float32, shape (4,)" in text


def _other_dtype(rank: Rank) -> Any:
    params = make_params([(2, 3), (4,)])
    if rank.rank == 1:
        params[1] = torch.nn.Parameter(params[1].detach().double())
    return build(rank, params)


def test_names_are_used_in_messages(ranks: RankPool) -> None:
    for kind, text in ranks.run(2, _named):
        assert kind == "ValueError" and "'1.bias'" in text and "(5,)" in text and "(6,)" in text


def _named(rank: Rank) -> Any:
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(3, 5 + rank.rank))
    named = [("1.bias", dict(model.named_parameters())["1.bias"])]
    with pytest.raises(ValueError) as caught:
        fusedshard.AdamW(named, process_group=rank.group)
    return "ValueError", str(caught.value)


@each_kind_and_mode
@pytest.mark.parametrize("in_group", [False, True])
def test_dst_04_a_set_has_no_order(ranks: RankPool, variant: Variant, in_group: bool) -> None:
    for kind, text in ranks.run(2, _dst_04, variant, in_group):
        assert kind == "TypeError" and "set" in text


def _dst_04(rank: Rank, variant: Variant, in_group: bool) -> Any:
    params = set(make_params([(2,), (3,)]))
    return build(rank, [{"params": params}] if in_group else params, variant)


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
        ({"grad_sync": "later"}, "grad_sync: got 'later', wanted one of"),
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


@each_kind_and_mode
def test_shp_07_overlapping_elements(ranks: RankPool, variant: Variant) -> None:
    for kind, text in ranks.run(2, _shp_07, variant):
        assert kind == "ValueError" and "parameter 1" in text and "(0, 1)" in text


def _shp_07(rank: Rank, variant: Variant) -> Any:
    expanded = torch.nn.Parameter(torch.ones(1, 4).expand(3, 4))
    return build(rank, [*make_params([(2,)]), expanded], variant)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn], ids=["e5m2", "e4m3"])
def test_unsupported_dtype_on_one_rank(ranks: RankPool, dtype: torch.dtype) -> None:
    for kind, text in ranks.run(2, _dtype, dtype):
        assert kind == "TypeError" and str(dtype) in text and "torch.float32" in text


def _dtype(rank: Rank, dtype: torch.dtype) -> Any:
    kind = dtype if rank.rank == 1 else torch.float32
    return build(rank, [torch.nn.Parameter(torch.zeros(3, dtype=kind))])


@each_kind_and_mode
@pytest.mark.parametrize(
    ("two_groups", "message"), [(False, "twice"), (True, "more than one parameter group")]
)
def test_shp_10_repeated_parameters(
    ranks: RankPool, variant: Variant, two_groups: bool, message: str
) -> None:
    for kind, text in ranks.run(2, _shp_10, variant, two_groups):
        assert kind == "ValueError" and message in text


def _shp_10(rank: Rank, variant: Variant, two_groups: bool) -> Any:
    (param,) = make_params([(2,)])
    groups = [{"params": [param]}, {"params": [param]}]
    return build(rank, groups if two_groups else [param, param], variant)


def test_a_device_without_kernels_is_refused() -> None:
    param = torch.nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match=r"parameter 0: got device meta, wanted cpu"):
        fusedshard.AdamW([param])


def test_process_group_of_a_wrong_kind() -> None:
    with pytest.raises(TypeError, match="process_group: got str"):
        wrong: Any = "world"
        fusedshard.AdamW(make_params([(2,)]), process_group=wrong)


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


def test_dst_01_frozen_parameters_are_the_first_ranks_too(ranks: RankPool) -> None:
    """Of any dtype and order of strides; those without memory of their own stay."""
    first, *others = ranks.run(3, _frozen_of_all_kinds)
    for other in others:
        assert_same_bits(other, first)


def _frozen_of_all_kinds(rank: Rank) -> list[torch.Tensor]:
    trains = torch.nn.Parameter(torch.ones(2))
    values = torch.arange(12).view(3, 4) + 100 * rank.rank
    frozen = [
        torch.nn.Parameter(values.to(dtype), requires_grad=False)
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.complex64)
    ]
    frozen.append(torch.nn.Parameter(values.float().t(), requires_grad=False))
    frozen.append(torch.nn.Parameter(torch.empty(3, device="meta"), requires_grad=False))
    frozen.append(torch.nn.Parameter(torch.empty(0), requires_grad=False))
    fusedshard.AdamW([trains, *frozen], process_group=rank.group)
    return [p.detach() for p in frozen if p.device.type != "meta"]
