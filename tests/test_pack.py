"""Gradients into a send buffer and back: every element once, zero elsewhere."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import running_on, tables_of

from fusedshard import _C
from fusedshard.kernels import pack_, unpack_
from fusedshard.layout import Segment
from fusedshard.tables import gradient_addresses

pytestmark = pytest.mark.usefixtures("each_backend")


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pack_and_unpack(threads: int, dtype: torch.dtype) -> None:
    # Gaps in front, between and behind; borders of threads inside and between the rows.
    lengths, starts = [5, 700_001, 1, 299_999], [3, 32, 700_040, 700_064]
    numel = 1_000_100
    grads: list[torch.Tensor | None] = [
        torch.arange(1.0, n + 8, dtype=dtype) * (i + 1) for i, n in enumerate(lengths)
    ]
    grads[2] = None
    # Each row begins at element 7 of its parameter.
    segments = [Segment(i, 7, starts[i], lengths[i]) for i in range(4)]
    tables = tables_of(segments, dtype.itemsize)
    tables.point_at_params(gradient_addresses(grads))
    tables.upload()
    (table,) = tables.tables
    expected = torch.zeros(numel, dtype=dtype)
    for start, length, grad in zip(starts, lengths, grads, strict=True):
        if grad is not None:
            expected[start : start + length] = grad[7:]
    send = torch.full((numel,), torch.nan, dtype=dtype)
    with running_on(_C.cpu_variant(), threads):
        pack_(send, table)
        assert torch.equal(send, expected)
        unpack_(-send, table)
    for index, grad in enumerate(grads):
        if grad is not None:
            whole = torch.arange(1.0, lengths[index] + 8, dtype=dtype) * (index + 1)
            assert torch.equal(grad[:7], whole[:7]) and torch.equal(grad[7:], -whole[7:])


def test_a_table_past_the_buffer_is_refused() -> None:
    (table,) = tables_of([Segment(0, 0, 4, 3)], 4).tables
    for function in (pack_, unpack_):
        with pytest.raises(ValueError, match="table: ends at 7, wanted at most 6"):
            function(torch.zeros(6), table)


def test_gaps_beside_empty_rows_are_cleared() -> None:
    """In front, behind, and one after another."""
    lengths, starts = [0, 3, 0, 0, 2, 0], [2, 4, 9, 11, 14, 18]
    grads = [torch.full((length,), float(i)) for i, length in enumerate(lengths)]
    segments = [Segment(i, 0, starts[i], length) for i, length in enumerate(lengths)]
    tables = tables_of(segments, 4)
    tables.point_at_params(gradient_addresses(grads))
    tables.upload()
    send = torch.full((20,), torch.nan)
    pack_(send, tables.tables[0])
    assert send.tolist() == [0.0] * 4 + [1.0] * 3 + [0.0] * 7 + [4.0] * 2 + [0.0] * 4
