"""What formats take in memory, and which arguments there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mixed import BF16, CODED, FP16, STATES
from ranks import Rank, RankPool
from training import MODES

import fusedshard

each_mode = pytest.mark.parametrize("mode", MODES)
NUMELS = {"fp32": 4, "bf16": 2, "codes": 1 + 1 / 128}


@pytest.mark.parametrize(("state", "dtype"), list(zip(NUMELS, STATES, strict=True)))
@each_mode
def test_bytes_of_a_rank(ranks: RankPool, mode: str, state: str, dtype: torch.dtype) -> None:
    """8, 4 or 2 bytes a parameter, and 2 or 4 for its master; all of it over N when sharded. Each
    block of 128 takes a byte for a moment's exponent, and 4 for a check of its remainders."""
    numel = 2 * 128 * 1024
    for found in ranks.run(2, _bytes, mode, dtype, numel):
        share = numel // (2 if mode == "sharded" else 1)
        for memory, master in zip(found, (2, 4, 4, 0), strict=True):
            assert memory["moments"] == 2 * NUMELS[state] * share
            assert memory["masters"] == (master + (1 / 32 if master == 2 else 0)) * share


def _bytes(rank: Rank, mode: str, state_dtype: torch.dtype, numel: int) -> list[dict[str, int]]:
    found = []
    for dtype, master in ((BF16, None), (BF16, True), (FP16, None), (BF16, False)):
        param = torch.nn.Parameter(torch.ones(numel, dtype=dtype))
        optimizer = fusedshard.AdamW(
            [param],
            mode=mode,
            process_group=rank.group,
            state_dtype=state_dtype,
            master_weights=master,
        )
        found.append(optimizer.memory())
    return found


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "master_weights": ({"master_weights": 0}, "got 0, wanted None, True or False"),
    "state_dtype": (
        {"state_dtype": FP16},
        "got torch.float16, wanted one of torch.float32, torch.bfloat16, torch.uint8",
    ),
    "stochastic_rounding": ({"stochastic_rounding": None}, "got None, wanted True or False"),
    "seed": ({"seed": 1 << 63}, "got 9223372036854775808, wanted an integer of 64 bits"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_are_checked_on_every_rank(ranks: RankPool, name: str) -> None:
    options, message = WRONG[name]
    for text in ranks.run(2, _refused, options):
        assert f"{name}: {message}" in text
    for text in ranks.run(2, _unlike, {name: {"seed": 5, "state_dtype": CODED}.get(name, False)}):
        assert "the ranks build different optimizers" in text and f"{name}=" in text


def _refused(rank: Rank, options: dict[str, Any]) -> str:
    return _failure(rank, options if rank.rank == 1 else {})


def _unlike(rank: Rank, options: dict[str, Any]) -> str:
    return _failure(rank, options if rank.rank == 0 else {})


def _failure(rank: Rank, options: dict[str, Any]) -> str:
    param = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError) as error:
        fusedshard.AdamW([param], process_group=rank.group, **options)
    return str(error.value)
