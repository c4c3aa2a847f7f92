"""A drop-in for torch.optim's Adam and AdamW without torch.distributed: acceptance cases."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from training import Variant, each_kind_and_mode

import fusedshard


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values, dtype=dtype))


def test_arguments_have_torchs_names_order_and_defaults() -> None:
    for kind in ("Adam", "AdamW"):
        ours = getattr(fusedshard, kind)([parameter(1.0)])
        theirs = getattr(torch.optim, kind)([parameter(1.0)])
        assert ours.defaults.items() >= theirs.defaults.items()
        positional = list(inspect.signature(getattr(torch.optim, kind)).parameters)[:6]
        assert list(inspect.signature(getattr(fusedshard, kind)).parameters)[:6] == positional


@each_kind_and_mode
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_num_01_eps_is_added_after_root_and_correction(
    variant: Variant, dtype: torch.dtype
) -> None:
    p = parameter(0.0, dtype=dtype)
    p.grad = torch.tensor([1e-3], dtype=dtype)
    variant.ours([p], lr=1.0, eps=1e-2, weight_decay=0.0).step()
    assert p.item() == pytest.approx(-0.0909091, abs=1e-7)


@each_kind_and_mode
def test_num_02_decay_of_adam_and_adamw(variant: Variant) -> None:
    value, exp_avg, default = (1.9, 0.02, 0) if variant.kind == "Adam" else (1.98, 0.0, 0.01)
    p = parameter(2.0)
    p.grad = torch.zeros(1)
    optimizer = variant.ours([p], lr=0.1, weight_decay=0.1)
    optimizer.step()
    assert p.item() == pytest.approx(value, abs=1e-6)
    assert optimizer.state[p]["exp_avg"].item() == pytest.approx(exp_avg, abs=1e-8)
    assert variant.ours([parameter(1.0)]).param_groups[0]["weight_decay"] == default


@each_kind_and_mode
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
def test_num_03_step_count_ignores_the_default_dtype(variant: Variant, name: str) -> None:
    torch.set_default_dtype(getattr(torch, name))
    try:
        p = parameter(1.0, 1.0, 1.0, 1.0)
        optimizer = variant.ours([p], lr=1e-3, weight_decay=0.0)
        for _ in range(1000):
            p.grad = torch.full((4,), 0.1, dtype=torch.float32)
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    step = optimizer.state[p]["step"]
    assert step == 1000 and step.dtype == torch.float32 and step.dim() == 0
    torch.testing.assert_close(p.detach(), torch.full((4,), 1.0e-5), rtol=0, atol=2e-6)


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


@pytest.mark.parametrize("start", [torch.ones(1, 4).expand(3, 4), torch.ones(8)[::2]])
@each_kind_and_mode
def test_shp_07_elements_that_overlap_or_leave_gaps(variant: Variant, start: torch.Tensor) -> None:
    good = parameter(1.0, 2.0)
    address = good.data_ptr()
    with pytest.raises(ValueError, match=r"parameter 1: got shape .* with strides"):
        variant.ours([good, torch.nn.Parameter(start)])
    assert good.data_ptr() == address and good.tolist() == [1.0, 2.0]


@each_kind_and_mode
def test_lif_08_schedulers_warn_only_of_a_wrong_order(variant: Variant) -> None:
    p = parameter(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = variant.ours([p])
        scheduler = StepLR(optimizer, 1)
        for _ in range(3):
            p.grad = torch.ones(1)
            optimizer.step()
            scheduler.step()
    too_early = StepLR(variant.ours([parameter(1.0)]), 1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        too_early.step()


@pytest.mark.parametrize(
    ("name", "value", "label"),
    [
        ("lr", "0.1", "lr"),
        ("lr", None, "lr"),
        ("eps", [1e-8], "eps"),
        ("weight_decay", None, "weight_decay"),
        ("betas", None, "betas"),
        ("betas", (0.9, "0.99"), r"betas\[1\]"),
    ],
)
def test_what_is_no_number_is_refused_by_name(name: str, value: Any, label: str) -> None:
    wanted = "two numbers" if label == "betas" else "a number"
    with pytest.raises(TypeError, match=f"^{label}: got .*, wanted {wanted}$"):
        fusedshard.AdamW([parameter(1.0)], **{name: value})


def test_numbers_of_other_libraries_are_taken() -> None:
    values: list[Any] = [np.float32(0.1), np.array(0.1), 1]
    betas: Any = [np.float64(0.9), 0.99]
    for value in values:
        p = parameter(1.0)
        p.grad = torch.ones(1)
        fusedshard.AdamW([p], lr=value, betas=betas, weight_decay=0.0).step()
        assert p.item() == pytest.approx(1.0 - float(value), abs=1e-6)
