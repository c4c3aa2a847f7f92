"""Empty, tiny, odd, strided and tied parameters beside torch's, without torch.distributed and on
ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from ranks import RankPool
from sides import Side, check_against_torch
from training import Shapes, Variant, assert_same_bits, backward, each_variant, each_variant_on

ODD: Shapes = [(5,), (7,), (1,), (13,)]


def steps(side: Side, optimizer: Any, params: Any, numbers: range) -> None:
    for step in numbers:
        optimizer.zero_grad()
        side.backward(params, step)
        optimizer.step()


def restored(side: Side, params: Any, state: Any, **options: Any) -> Any:
    """New parameters of the same values, and their optimizer with a loaded state."""
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer = side.build(copies, **options)
    optimizer.load_state_dict(state)
    return copies, optimizer


@each_variant_on(2, 1)
@pytest.mark.parametrize(
    "groups",
    [
        [[(1,), (1,), (0,), (1,), (0,)]],
        [[(4,), (0, 3)]],
        [[(0, 3), (4,)]],
        [[(0,), (0, 3)]],
        [[(4,), (3,)], [(0,), (0, 3)]],
    ],
    ids=str,
)
def test_shp_01_empty_parameters(
    ranks: RankPool, world_size: int, variant: Variant, groups: list[Shapes]
) -> None:
    check_against_torch(ranks, world_size, variant, _shp_01, groups)


def _shp_01(side: Side, shapes: list[Shapes]) -> list[Any]:
    groups = [{"params": side.params(group)} for group in shapes]
    params = [p for group in groups for p in group["params"]]
    optimizer = side.build(groups, amsgrad=True, lr=0.1, eps=1.0)
    steps(side, optimizer, params, range(2))
    assert [p.shape for p in params] == [torch.Size(s) for group in shapes for s in group]
    saved = side.full_state(optimizer)
    again = side.build([{"params": side.params(group)} for group in shapes], amsgrad=True)
    again.load_state_dict(saved)
    assert_same_bits(side.full_state(again)["state"], saved["state"])
    return [side.outcome(optimizer)]


@each_variant
def test_shp_02_an_empty_parameter_at_every_place(ranks: RankPool, variant: Variant) -> None:
    """On a GPU the lists of pointers of a launch end at some of them."""
    for count, places in ((80, range(23, 41)), (120, range(100, 116))):
        for place in places:
            shapes = [(7,)] * count
            shapes[place] = (0,)
            check_against_torch(ranks, 1, variant, _one_step, shapes)


def _one_step(side: Side, shapes: Shapes) -> list[Any]:
    params = side.params(shapes)
    optimizer = side.build(params, lr=0.1, eps=1.0)
    steps(side, optimizer, params, range(1))
    return [side.outcome(optimizer)]


@each_variant
@pytest.mark.parametrize("shape", [(), (1,), (3,)], ids=str)
def test_shp_03_more_ranks_than_elements(
    ranks: RankPool, variant: Variant, shape: tuple[int, ...]
) -> None:
    check_against_torch(ranks, 4, variant, _shp_03, shape)


def _shp_03(side: Side, shape: tuple[int, ...]) -> list[Any]:
    params = side.params([shape])
    optimizer = side.build(params, lr=0.1, eps=1.0)
    norms, outcomes = [], []
    for step in range(5):
        if step == 3:
            state = side.full_state(optimizer)
            params, optimizer = restored(side, params, state, lr=0.1, eps=1.0)
        optimizer.zero_grad()
        side.backward(params, step)
        norms.append(side.clip(optimizer, params, 0.3))
        optimizer.step()
        outcomes.append(side.outcome(optimizer))
    return [*outcomes, torch.stack(norms).double()]


@each_variant_on(2, 1)
@pytest.mark.parametrize("empty_first", [False, True])
def test_shp_04_a_group_with_nothing_on_a_rank(
    ranks: RankPool, world_size: int, variant: Variant, empty_first: bool
) -> None:
    check_against_torch(ranks, world_size, variant, _shp_04, empty_first)


def _shp_04(side: Side, empty_first: bool) -> list[Any]:
    params = side.params([(10,), (2,)])
    groups = [
        {"params": params[:1], "lr": 0.1, "weight_decay": 0.0},
        {"params": params[1:], "lr": 0.01, "weight_decay": 0.5},
    ]
    optimizer = side.build([{"params": []}, *groups] if empty_first else groups, eps=1.0)
    steps(side, optimizer, params, range(3))
    return [side.outcome(optimizer)]


@each_variant_on(3, 4)
def test_shp_05_sizes_that_do_not_divide(
    ranks: RankPool, world_size: int, variant: Variant
) -> None:
    check_against_torch(ranks, world_size, variant, _shp_05, ODD, 25)
    # Buckets this small are there only once there is enough to fill more than one.
    for shapes in (ODD, [*ODD, (300_007,)]):
        check_against_torch(ranks, world_size, variant, _shp_05, shapes, 1e-6)


def _shp_05(side: Side, shapes: Shapes, bucket_cap_mb: float) -> list[Any]:
    params = side.params(shapes)
    groups = [{"params": params[::2], "lr": 0.1}, {"params": params[1::2], "lr": 0.01}]
    optimizer = side.build(groups, eps=1.0, bucket_cap_mb=bucket_cap_mb)
    if side.ours:
        assert (optimizer.layout.bucket_count > 1) == (len(shapes) > len(ODD))
    steps(side, optimizer, params, range(5))
    return [side.outcome(optimizer)]


def strided(layout: str) -> torch.Tensor:
    """0, 1, 2, ... by index, whatever the order in memory."""
    if layout == "transposed":
        return torch.arange(15.0).reshape(3, 5).t()
    values = torch.arange(48.0).reshape(4, 3, 2, 2)
    return values.contiguous(memory_format=getattr(torch, layout))


LAYOUTS = [
    ("channels_last", "channels_last"),
    ("channels_last", "contiguous_format"),
    ("contiguous_format", "channels_last"),
    ("transposed", "transposed"),
]


@each_variant_on(2, 1)
@pytest.mark.parametrize("assigned", [False, True], ids=["backward", "assigned"])
def test_shp_06_every_element_by_index(
    ranks: RankPool, world_size: int, variant: Variant, assigned: bool
) -> None:
    """Autograd gives gradients their parameters' strides; assigned ones keep their own."""
    ((_, state),) = check_against_torch(ranks, world_size, variant, _shp_06, assigned)
    mean = torch.arange(48.0).reshape(4, 3, 2, 2) * (1.5 if world_size == 2 else 1.0)
    for index in range(3):
        torch.testing.assert_close(state["state"][index]["exp_avg"], mean * 0.1)


def _shp_06(side: Side, assigned: bool) -> list[Any]:
    starts = [strided(weight) for weight, _ in LAYOUTS]
    params = [torch.nn.Parameter(start.clone()) for start in starts]
    optimizer = side.build(params, lr=0.1, eps=1.0)
    factor = side.own([1.0, 2.0][: side.world_size])
    grads = [strided(layout) * factor for _, layout in LAYOUTS]
    if assigned:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
    else:
        backward(params, grads)
    optimizer.step()
    assert [p.stride() for p in params] == [start.stride() for start in starts]
    params_now, state = side.outcome(optimizer)
    return [([p.contiguous() for p in params_now], state)]


class Tied(torch.nn.Module):
    """An embedding whose weight is the output layer's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.output = torch.nn.Linear(3, 5)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.output(self.embedding(tokens))
        return logits


@each_variant_on(2, 1)
def test_shp_10_tied_weights_are_one_parameter(
    ranks: RankPool, world_size: int, variant: Variant
) -> None:
    check_against_torch(ranks, world_size, variant, _shp_10)


def _shp_10(side: Side) -> list[Any]:
    torch.manual_seed(side.number)
    model = Tied()
    params = list(model.parameters())
    assert len(params) == 2
    optimizer = side.build(model.parameters(), lr=0.1, eps=1.0)
    norms = []
    for tokens in torch.tensor([[[0, 1], [4, 1]], [[1, 2], [0, 2]]]):
        optimizer.zero_grad()
        side.descend(partial(_squares, model, tokens))
        norms.append(side.clip(optimizer, params, 1.0))
        optimizer.step()
    assert model.output.weight is model.embedding.weight
    assert len(optimizer.state) == 2
    return [side.outcome(optimizer), torch.stack(norms).double()]


def _squares(model: torch.nn.Module, tokens: torch.Tensor, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(tokens[rank]).square().sum()
    return loss
