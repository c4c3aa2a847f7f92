"""A drop-in for torch.optim's Adam and AdamW without torch.distributed: acceptance cases."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from training import assert_same_bits, gradient, make_params

import fusedshard

each_kind = pytest.mark.parametrize("kind", ["Adam", "AdamW"])
each_mode = pytest.mark.parametrize("mode", ["sharded", "replicated"])


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values, dtype=dtype))


class Pair:
    """The same parameters and gradients for ours and for torch's."""

    def __init__(self, kind: str, params: list[torch.nn.Parameter], **options: Any) -> None:
        self.theirs = [torch.nn.Parameter(p.detach().clone()) for p in params]
        self.ours = params
        self.reference = getattr(torch.optim, kind)(self.theirs, **options)
        self.optimizer = getattr(fusedshard, kind)(self.ours, **options)

    def step(
        self, count: int = 1, grads: Callable[[torch.Tensor, int, int], Any] | None = None
    ) -> None:
        for step in range(count):
            for index, (ours, theirs) in enumerate(zip(self.ours, self.theirs, strict=True)):
                grad = (grads or (lambda p, t, i: gradient(p, t, i, 0)))(ours, step, index)
                ours.grad, theirs.grad = grad, grad
            self.optimizer.step()
            self.reference.step()

    def check(self, atol: float = 1e-6) -> None:
        torch.testing.assert_close(self.ours, self.theirs, rtol=0, atol=atol)
        state, reference = (o.state_dict()["state"] for o in (self.optimizer, self.reference))
        assert state.keys() == reference.keys()
        for index, expected in reference.items():
            torch.testing.assert_close(state[index], expected, rtol=0, atol=atol)


def test_arguments_have_torchs_names_order_and_defaults() -> None:
    for kind in ("Adam", "AdamW"):
        ours = getattr(fusedshard, kind)([parameter(1.0)])
        theirs = getattr(torch.optim, kind)([parameter(1.0)])
        assert ours.defaults.items() >= theirs.defaults.items()
        positional = list(inspect.signature(getattr(torch.optim, kind)).parameters)[:6]
        assert list(inspect.signature(getattr(fusedshard, kind)).parameters)[:6] == positional


@each_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_num_01_eps_is_added_after_root_and_correction(mode: str, dtype: torch.dtype) -> None:
    p = parameter(0.0, dtype=dtype)
    p.grad = torch.tensor([1e-3], dtype=dtype)
    fusedshard.Adam([p], lr=1.0, eps=1e-2, mode=mode).step()
    assert p.item() == pytest.approx(-1 / 11, abs=1e-7)


@each_mode
def test_num_02_decay_of_adam_and_adamw(mode: str) -> None:
    for kind, value, exp_avg in ((fusedshard.Adam, 1.9, 0.02), (fusedshard.AdamW, 1.98, 0.0)):
        p = parameter(2.0)
        p.grad = torch.zeros(1)
        optimizer = kind([p], lr=0.1, weight_decay=0.1, mode=mode)
        optimizer.step()
        assert p.item() == pytest.approx(value, abs=1e-6)
        assert optimizer.state[p]["exp_avg"].item() == pytest.approx(exp_avg, abs=1e-8)
    assert fusedshard.Adam([parameter(1.0)]).param_groups[0]["weight_decay"] == 0
    assert fusedshard.AdamW([parameter(1.0)]).param_groups[0]["weight_decay"] == 0.01


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
def test_num_03_step_count_ignores_the_default_dtype(name: str) -> None:
    torch.set_default_dtype(getattr(torch, name))
    try:
        p = parameter(1.0, 1.0, 1.0, 1.0)
        optimizer = fusedshard.Adam([p], lr=1e-3)
        for _ in range(1000):
            p.grad = torch.full((4,), 0.1, dtype=torch.float32)
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    step = optimizer.state[p]["step"]
    assert step == 1000 and step.dtype == torch.float32 and step.dim() == 0
    torch.testing.assert_close(p.detach(), torch.full((4,), 1.0e-5), rtol=0, atol=2e-6)


@each_kind
@each_mode
def test_num_05_building_is_no_step_and_one_step_is_one(kind: str, mode: str) -> None:
    params = make_params([(5,), (17, 257), (1,)])
    before = [p.detach().clone() for p in params]
    pair = Pair(kind, params, weight_decay=0.1)
    assert_same_bits([p.detach() for p in params], before)
    assert not pair.optimizer.state
    pair.step(2)
    pair.check()
    assert [pair.optimizer.state[p]["step"].item() for p in params] == [2.0, 2.0, 2.0]


def test_num_06_a_late_parameter_counts_its_own_steps() -> None:
    a, b = parameter(1.0), parameter(1.0)
    optimizer = fusedshard.Adam([a, b], lr=0.1)
    for step in range(5):
        a.grad = torch.full((1,), 0.5)
        b.grad = torch.full((1,), 0.5) if step == 4 else None
        optimizer.step()
        assert (b in optimizer.state) == (step == 4)
    assert b.item() == pytest.approx(0.9, abs=1e-6)
    assert (optimizer.state[a]["step"], optimizer.state[b]["step"]) == (5, 1)


@each_kind
@pytest.mark.parametrize("shape", [(), (1,)])
def test_num_07_lr_as_a_tensor(kind: str, shape: tuple[int, ...]) -> None:
    params = make_params([(5, 3)])
    pair = Pair(kind, params, lr=0.25)
    pair.optimizer = getattr(fusedshard, kind)(params, lr=torch.full(shape, 0.25))
    pair.step(3)
    pair.check()
    pair.optimizer.param_groups[0]["lr"].fill_(0.5)
    pair.reference.param_groups[0]["lr"] = 0.5
    pair.step(1)
    pair.optimizer.param_groups[0]["lr"] = pair.reference.param_groups[0]["lr"] = 0.125
    pair.step(1)
    pair.check()


def test_num_07_lr_as_a_tensor_of_two_elements() -> None:
    with pytest.raises(ValueError, match=r"lr: got a tensor of shape \(2,\), wanted one element"):
        fusedshard.Adam([parameter(1.0)], lr=torch.ones(2))


def test_num_07_scheduler_of_a_tensor_lr() -> None:
    p = parameter(1.0)
    optimizer = fusedshard.Adam([p], lr=torch.tensor(1.0))
    scheduler = LambdaLR(optimizer, lambda _: 0.5)
    for _ in range(4):
        p.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.5
    assert p.item() == pytest.approx(-1.0, abs=1e-5)


@each_kind
@pytest.mark.parametrize("name", ["StepLR", "ReduceLROnPlateau"])
def test_num_07_schedulers_act_at_the_next_step_on_each_group(kind: str, name: str) -> None:
    params = make_params([(5,), (7,)])
    pair = Pair(kind, params[:1], lr=0.1)
    pair.optimizer.add_param_group({"params": params[1:], "lr": 0.3})
    pair.theirs.append(torch.nn.Parameter(params[1].detach().clone()))
    pair.reference.add_param_group({"params": pair.theirs[1:], "lr": 0.3})
    pair.ours = params
    optimizers = (pair.optimizer, pair.reference)
    step_lr = [StepLR(o, step_size=1, gamma=0.5) for o in optimizers]
    plateau = [ReduceLROnPlateau(o, factor=0.5, patience=0) for o in optimizers]
    for _ in range(4):
        pair.step()
        for scheduler in step_lr if name == "StepLR" else []:
            scheduler.step()
        for reducer in plateau if name == "ReduceLROnPlateau" else []:
            reducer.step(1.0)
        pair.check()
    assert pair.optimizer.param_groups[1]["lr"] < 0.1


@each_mode
@pytest.mark.parametrize("betas", [(0.0, 0.9), (0.9, 0.0)])
def test_num_08_betas_of_zero(mode: str, betas: tuple[float, float]) -> None:
    p = parameter(1.0)
    p.grad = torch.full((1,), 0.5)
    fusedshard.Adam([p], lr=0.1, betas=betas, mode=mode).step()
    assert p.item() == pytest.approx(0.9, abs=1e-6)


@each_kind
def test_num_08_lr_of_zero_moves_the_moments_alone(kind: str) -> None:
    (p,) = make_params([(17, 257)])
    before = p.detach().clone()
    pair = Pair(kind, [p], lr=0.0, weight_decay=0.1)
    pair.step(3)
    assert_same_bits(p.detach(), before)
    pair.check()
    assert pair.optimizer.state[p]["exp_avg"].all() and pair.optimizer.state[p]["step"] == 3


def test_num_08_eps_of_zero() -> None:
    p = parameter(2.0, 2.0)
    p.grad = torch.tensor([0.0, 1.0])
    fusedshard.Adam([p], lr=0.1, eps=0.0).step()
    assert p[0].isnan() and p[1].item() == pytest.approx(1.9, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lr", -1.0, "Invalid learning rate: -1.0"),
        ("lr", float("nan"), "Invalid learning rate: nan"),
        ("betas", (1.0, 0.9), "Invalid beta parameter at index 0: 1.0"),
        ("betas", (0.9, -0.1), "Invalid beta parameter at index 1: -0.1"),
        ("eps", -1.0, "Invalid epsilon value: -1.0"),
        ("weight_decay", -1.0, "Invalid weight_decay value: -1.0"),
        ("differentiable", True, "differentiable: got True, wanted False"),
    ],
)
def test_num_08_invalid_values(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fusedshard.Adam([parameter(1.0)], **{name: value})
    with pytest.raises(ValueError, match=message):
        fusedshard.Adam([{"params": [parameter(1.0)], name: value}])


@each_kind
@pytest.mark.parametrize(
    "shapes",
    [[(1,), (1,), (0,), (1,), (0,)], [(4,), (0, 3)], [(0, 3), (4,)], [(0,), (0, 3)]],
    ids=str,
)
def test_shp_01_empty_parameters(kind: str, shapes: list[tuple[int, ...]]) -> None:
    params = make_params(shapes)
    pair = Pair(kind, params, amsgrad=True, lr=0.1)
    pair.step(2)
    pair.check()
    assert [p.shape for p in params] == [torch.Size(s) for s in shapes]
    saved = pair.optimizer.state_dict()
    again = getattr(fusedshard, kind)(make_params(shapes), amsgrad=True)
    again.load_state_dict(saved)
    assert_same_bits(again.state_dict()["state"], saved["state"])


def strided(layout: str) -> torch.Tensor:
    """0, 1, 2, ... by index, whatever the order in memory."""
    if layout == "transposed":
        return torch.arange(15.0).reshape(5, 3).t().contiguous().t()
    values = torch.arange(48.0).reshape(4, 3, 2, 2)
    return values.contiguous(memory_format=getattr(torch, layout))


@each_kind
@pytest.mark.parametrize(
    ("weight", "grad"),
    [
        ("channels_last", "channels_last"),
        ("channels_last", "contiguous_format"),
        ("contiguous_format", "channels_last"),
        ("transposed", "transposed"),
    ],
)
def test_shp_06_every_element_by_index(kind: str, weight: str, grad: str) -> None:
    start = strided(weight)
    pair = Pair(kind, [torch.nn.Parameter(start.clone())], lr=0.1, eps=1.0)
    p = pair.ours[0]
    before = p
    assert p.stride() == start.stride() and torch.equal(p.detach(), start)
    pair.step(3, lambda p, step, index: strided(grad))
    pair.check(atol=1e-5)
    assert p is before and p.stride() == start.stride()
    state = pair.optimizer.state_dict()["state"][0]
    torch.testing.assert_close(state["exp_avg"], strided(grad) * (1 - 0.9**3))


@pytest.mark.parametrize("start", [torch.ones(1, 4).expand(3, 4), torch.ones(8)[::2]])
def test_shp_07_elements_that_overlap_or_leave_gaps(start: torch.Tensor) -> None:
    good = parameter(1.0, 2.0)
    address = good.data_ptr()
    with pytest.raises(ValueError, match=r"parameter 1: got shape .* with strides"):
        fusedshard.Adam([good, torch.nn.Parameter(start)])
    assert good.data_ptr() == address and good.tolist() == [1.0, 2.0]


def test_lif_08_schedulers_warn_only_of_a_wrong_order() -> None:
    p = parameter(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = fusedshard.AdamW([p])
        scheduler = StepLR(optimizer, 1)
        for _ in range(3):
            p.grad = torch.ones(1)
            optimizer.step()
            scheduler.step()
    too_early = StepLR(fusedshard.AdamW([parameter(1.0)]), 1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        too_early.step()
