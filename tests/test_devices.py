"""One device an optimizer, the same kind on every rank. Meta tensors stand for those of a GPU."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Rank, RankPool
from training import make_params

import fusedshard
from fusedshard.comm import _timeout_of
from fusedshard.native import BACKENDS


@pytest.fixture
def second_device() -> Iterator[None]:
    """A kind of device beside the CPU, as far as checks look at it."""
    with mock.patch.dict(BACKENDS, meta=BACKENDS["cpu"]):
        yield


def on_meta(numel: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(numel, device="meta"))


@pytest.mark.usefixtures("second_device")
def test_parameters_on_two_devices_are_refused() -> None:
    params = [*make_params([(3,)]), on_meta(4)]
    with pytest.raises(ValueError, match="parameter 1: got device meta, wanted cpu as the others"):
        fusedshard.AdamW(params)


@pytest.mark.usefixtures("second_device")
def test_a_late_group_on_another_device_is_refused() -> None:
    optimizer = fusedshard.AdamW(make_params([(3,)]))
    with pytest.raises(ValueError, match="parameter 1: got device meta, wanted cpu"):
        optimizer.add_param_group({"params": [on_meta(4)]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.usefixtures("second_device")
def test_frozen_parameters_may_lie_elsewhere_until_they_thaw() -> None:
    (param,), frozen = make_params([(3,)]), on_meta(4).requires_grad_(False)
    optimizer = fusedshard.AdamW([param, frozen])
    param.grad = torch.ones(3)
    optimizer.step()
    frozen.requires_grad_(True)
    frozen.grad = torch.empty(4, device="meta")
    before = param.detach().clone()
    with pytest.raises(ValueError, match="parameter 1: got device meta, wanted cpu"):
        optimizer.step()
    assert torch.equal(param, before)


def test_the_first_parameters_that_train_choose_the_device() -> None:
    """Even where they come late: until then step counts are on the CPU."""
    (param,) = make_params([(3,)])
    param.requires_grad_(False)
    optimizer = fusedshard.AdamW([param])
    engine = optimizer._built
    assert engine.device is None and engine.steps.device.type == "cpu"
    param.requires_grad_(True)
    param.grad = torch.ones(3)
    optimizer.step()
    assert engine.device == torch.device("cpu") and engine.steps.tolist() == [1]


def test_ranks_on_different_kinds_of_devices_are_refused(ranks: RankPool) -> None:
    messages = ranks.run(2, _mixed_ranks)
    for message in messages:
        assert "on meta, shape (3,)" in message and "rank 1 has parameter 0" in message


def _mixed_ranks(rank: Rank) -> str:
    params = make_params([(3,)]) if rank.rank == 0 else [on_meta(3)]
    with (
        mock.patch.dict(BACKENDS, meta=BACKENDS["cpu"]),
        pytest.raises(ValueError, match="different optimizers") as error,
    ):
        fusedshard.AdamW(params, process_group=rank.group)
    return str(error.value)


class GpuGroup:
    """An NCCL group as far as its timeout is asked for."""

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cpu":
            raise RuntimeError("No backend type associated with device type cpu")
        return mock.Mock(**{"options._timeout": datetime.timedelta(seconds=7)})


def test_the_timeout_of_a_group_without_a_cpu_backend_is_kept() -> None:
    assert _timeout_of(GpuGroup()) == datetime.timedelta(seconds=7)


def test_capture_needs_capturable() -> None:
    """torch's own check is asked at each step."""
    (param,) = make_params([(3,)])
    optimizer = fusedshard.AdamW([param])
    param.grad = torch.ones(3)
    before = param.detach().clone()
    refusal = RuntimeError("Attempting CUDA graph capture of step()")
    with (
        mock.patch("fusedshard.averaging._check_capture", side_effect=refusal),
        pytest.raises(RuntimeError, match="Attempting CUDA graph capture"),
    ):
        optimizer.step()
    assert torch.equal(param, before)
