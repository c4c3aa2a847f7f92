"""Arrays of more than 2^31 elements. Linux maps pages that were never written to one page of
zeros, so these need addresses rather than memory."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import ADAMW, tables_of
from oracles import adam_reference_, fresh_state, same_state

from fusedshard.kernels import adam_, flat_memory, square_sum
from fusedshard.layout import Segment
from fusedshard.native import AdamState
from fusedshard.tables import integers

NUMEL = 2**31 + 1001


def huge() -> torch.Tensor:
    try:
        return flat_memory(NUMEL, torch.float32)
    except RuntimeError as error:
        pytest.skip(f"this machine refuses the addresses: {error}")


def test_square_sum_reaches_the_last_element() -> None:
    x = huge()
    x[0], x[2**31 - 1], x[2**31], x[-1] = 1.0, 2.0, 3.0, 4.0
    assert square_sum(x) == 30.0


@pytest.mark.parametrize("start", [2**31 - 40, NUMEL - 80])
def test_update_behind_element_2_to_the_31(start: int) -> None:
    state = AdamState(huge(), huge(), huge(), None)
    grads = huge()
    places = slice(start, start + 80)
    state.param[places] = torch.linspace(-1, 1, 80)
    grads[places] = torch.linspace(3, -2, 80)
    want = fresh_state(state.param[places])
    adam_reference_(want, grads[places], ADAMW, 1)
    tables = tables_of([Segment(0, 0, start, 80)], 4, [ADAMW])
    tables.point_at_shards([grads])
    tables.upload()
    adam_(state, tables.tables[0], integers([0]))
    ours = state.param[places], state.exp_avg[places], state.exp_avg_sq[places]
    assert same_state(AdamState(*ours, None), want)
