"""A compiled model, whose gradients come in whatever strides the compiler likes, and our optimizer
as it is."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import RankPool
from sides import HYPER, Side, check_against_torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from training import Variant, each_variant

STEPS = 5
links = pytest.mark.skipif(
    " " in torch.__file__, reason="torch.compile does not quote torch's folder for the linker"
)


@pytest.fixture(scope="module")
def compiled_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the compiler keeps what it has made, for all tests here."""
    return tmp_path_factory.mktemp("compiled")


@links
@each_variant
@pytest.mark.parametrize("memory_format", ["contiguous_format", "channels_last"])
def test_cmp_01_a_compiled_model(
    ranks: RankPool, compiled_code: Path, variant: Variant, memory_format: str
) -> None:
    check_against_torch(ranks, 2, variant, _cmp_01, memory_format, compiled_code)


def _cmp_01(side: Side, memory_format: str, compiled_code: Path) -> list[Any]:
    torch.manual_seed(side.number)
    wide, narrow = torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 5, 1)
    for layer in (wide, narrow):
        layer.weight.data = layer.weight.data.contiguous(
            memory_format=getattr(torch, memory_format)
        )
    model = torch.nn.Sequential(wide, torch.nn.ReLU(), narrow)
    optimizer = side.build(model.parameters(), **HYPER)
    if not side.ours:
        return [_train(side, model, optimizer)]
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(compiled_code)}
    with (
        mock.patch.dict(os.environ, environment),
        # In this process: a pool of compilers would outlive the test.
        inductor_config.patch(compile_threads=1),
    ):
        counters.clear()
        compiled = torch.compile(model)
        outcome = _train(side, compiled, optimizer)
        assert counters["stats"]["unique_graphs"] > 0
        torch._dynamo.reset()
    return [outcome]


def _train(side: Side, model: Any, optimizer: Any) -> Any:
    for step in range(STEPS):
        optimizer.zero_grad()
        side.descend(partial(_loss, model, step))
        optimizer.step()
    params, state = side.outcome(optimizer)
    return [param.contiguous() for param in params], state


def _loss(model: Any, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(97 * step + rank)
    loss: torch.Tensor = model(torch.randn(2, 3, 6, 6, generator=generator)).square().mean()
    return loss
