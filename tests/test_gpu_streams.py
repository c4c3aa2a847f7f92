"""The CUDA kernels run on the current stream, and on arrays of more than 2^31 elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from gpu_tools import DEVICE, equal_on_host, placed, placed_state, require_gpu
from kernel_tools import ADAMW, chunks_of_all_scales, tables_of, update
from oracles import adam_reference_, fresh_state, same_bits
from test_kernel_bits import odd_state, odd_values

from fusedshard.kernels import (
    adam_,
    count_steps_,
    found_inf_,
    mean_,
    pack_,
    square_sum,
    unpack_,
)
from fusedshard.layout import Segment
from fusedshard.native import BACKENDS, AdamState
from fusedshard.tables import SegmentTable, StepTables, gradient_addresses, integers

require_gpu()
pytestmark = pytest.mark.gpu

NUMEL = 4097
PAUSE_TICKS = 50_000_000  # some 25 ms
HUGE = 2**31 + 1001
GIGABYTE = 10**9


@dataclass
class Late:
    """A kernel whose inputs arrive late.

    Attributes:
        arriving: array on the device, and what it holds from then on.
        work: the kernel; returns the results.
        want: what they must be.
    """

    arriving: list[tuple[torch.Tensor, torch.Tensor]]
    work: Callable[[], Sequence[torch.Tensor | None]]
    want: Sequence[torch.Tensor | None]


def late(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An array that holds something else until the values arrive."""
    return torch.full_like(values, 3, device=DEVICE), placed(values)


def table_of(grad: torch.Tensor) -> StepTables:
    """Of one parameter that is the shard."""
    tables = tables_of([Segment(0, 0, 0, grad.numel())], grad.itemsize, [ADAMW], device=DEVICE)
    tables.point_at_params(gradient_addresses([grad]))
    return tables


def uploaded(grad: torch.Tensor) -> SegmentTable:
    tables = table_of(grad)
    tables.upload()
    return tables.tables[0]


Arrays = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def moved_arrays(state: AdamState) -> Arrays:
    return state.param, state.exp_avg, state.exp_avg_sq


def late_adam() -> Late:
    start, grad = odd_state(NUMEL, torch.float32), odd_values(NUMEL, torch.float32)
    arriving = [late(array) for array in (grad, *moved_arrays(start))]
    gradient, param, exp_avg, exp_avg_sq = (target for target, _ in arriving)
    state = AdamState(param, exp_avg, exp_avg_sq, None)
    table, steps = uploaded(gradient), integers([2]).to(DEVICE)

    def work() -> Arrays:
        adam_(state, table, steps)
        return moved_arrays(state)

    update(start, grad, ADAMW, 3)
    return Late(arriving, work, moved_arrays(start))


def late_upload() -> Late:
    """The words on the device are wiped before: what was written too early is lost."""
    start, grad = odd_state(NUMEL, torch.float32), odd_values(NUMEL, torch.float32)
    state, (gradient, arrived) = placed_state(start), late(grad)
    tables, steps = table_of(gradient), integers([2]).to(DEVICE)

    def work() -> Arrays:
        tables.upload()
        adam_(state, tables.tables[0], steps)
        return moved_arrays(state)

    update(start, grad, ADAMW, 3)
    words = tables.device_words
    return Late([(gradient, arrived), (words, torch.zeros_like(words))], work, moved_arrays(start))


def late_mean() -> Late:
    values = chunks_of_all_scales(3, NUMEL, torch.float32)
    room, arrived = late(torch.cat(values))
    out, want = torch.zeros(NUMEL, device=DEVICE), torch.empty(NUMEL)

    def work() -> list[torch.Tensor]:
        mean_(out, room.split(NUMEL))
        return [out]

    mean_(want, values)
    return Late([(room, arrived)], work, [want])


def late_square_sum() -> Late:
    (values,) = chunks_of_all_scales(1, 4096 * 33, torch.float32)
    x, arrived = late(values)
    return Late([(x, arrived)], lambda: [square_sum(x)], [square_sum(values)])


def late_found_inf() -> Late:
    x, arrived = late(torch.full((NUMEL,), torch.nan))
    found_inf = torch.zeros(1, device=DEVICE)

    def work() -> list[torch.Tensor]:
        found_inf_(found_inf, x)
        return [found_inf]

    return Late([(x, arrived)], work, [torch.ones(1)])


def late_pack() -> Late:
    values = torch.arange(1.0, NUMEL + 1)
    grad, arrived = late(values)
    send, table = torch.zeros(NUMEL, device=DEVICE), uploaded(grad)

    def work() -> list[torch.Tensor]:
        pack_(send, table)
        return [send]

    return Late([(grad, arrived)], work, [values])


def late_unpack() -> Late:
    values = torch.arange(1.0, NUMEL + 1)
    send, arrived = late(values)
    grad = torch.zeros(NUMEL, device=DEVICE)
    table = uploaded(grad)

    def work() -> list[torch.Tensor]:
        unpack_(send, table)
        return [grad]

    return Late([(send, arrived)], work, [values])


def late_count_steps() -> Late:
    steps, arrived = late(integers([5, 7]))
    mirror, used = torch.zeros(2, device=DEVICE), integers([0, 1]).to(DEVICE)

    def work() -> list[torch.Tensor]:
        count_steps_(steps, mirror, used)
        return [mirror]

    return Late([(steps, arrived)], work, [torch.tensor([5.0, 8.0])])


KERNELS = {
    "adam": late_adam,
    "upload": late_upload,
    "mean": late_mean,
    "square_sum": late_square_sum,
    "found_inf": late_found_inf,
    "pack": late_pack,
    "unpack": late_unpack,
    "count_steps": late_count_steps,
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_follow_the_current_stream(kernel: str) -> None:
    case = KERNELS[kernel]()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(PAUSE_TICKS)
        for target, arrived in case.arriving:
            target.copy_(arrived)
        results = case.work()
    stream.synchronize()
    for ours, want in zip(results, case.want, strict=True):
        assert ours is not None and want is not None
        assert same_bits(ours.cpu(), want)


def need_memory(gigabytes: int) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < gigabytes * GIGABYTE:
        pytest.skip(f"{free / GIGABYTE:.0f} GB are free on the device, wanted {gigabytes}")


def test_update_and_sums_behind_element_2_to_the_31() -> None:
    need_memory(60)
    state = fresh_state(torch.zeros(HUGE, device=DEVICE))
    grads = torch.zeros(HUGE, device=DEVICE)
    places = slice(HUGE - 80, HUGE)
    state.param[places] = torch.linspace(-1, 1, 80)
    grads[places] = torch.linspace(3, -2, 80)
    want = fresh_state(state.param[places].cpu())
    adam_reference_(want, grads[places].cpu(), ADAMW, 1)
    tables = tables_of([Segment(0, 0, HUGE - 80, 80)], 4, [ADAMW], device=DEVICE)
    tables.point_at_shards([grads])
    tables.upload()
    adam_(state, tables.tables[0], integers([0]).to(DEVICE))
    param, exp_avg, exp_avg_sq = (array[places].clone() for array in moved_arrays(state))
    ours = AdamState(param, exp_avg, exp_avg_sq, None)
    assert equal_on_host(ours, want)
    assert not state.param[: HUGE - 80].any()
    check_sums(grads, state.param)


def check_sums(x: torch.Tensor, out: torch.Tensor) -> None:
    """The other kernels on arrays that are as large."""
    x.zero_()
    x[0], x[2**31 - 1], x[2**31], x[-1] = 1.0, 2.0, 3.0, 4.0
    assert square_sum(x).item() == 30.0
    mean_(out, [x])
    assert torch.equal(out, x)
    found_inf = torch.zeros(1, device=DEVICE)
    found_inf_(found_inf, x)
    assert found_inf.item() == 0
    x[-1] = torch.nan
    found_inf_(found_inf, x)
    assert found_inf.item() == 1


def test_update_of_more_than_2_to_the_31_elements() -> None:
    """One segment over all of it, against the same update in parts."""
    need_memory(60)
    state = fresh_state(torch.ones(HUGE, device=DEVICE))
    grads = torch.full((HUGE,), 0.25, device=DEVICE)
    grads[-1] = -4.0
    update(state, grads, ADAMW, 1)
    want = fresh_state(torch.ones(2))
    adam_reference_(want, torch.tensor([0.25, -4.0]), ADAMW, 1)
    for ours, theirs in zip(moved_arrays(state), moved_arrays(want), strict=True):
        assert (ours[:-1] == theirs[0].item()).all() and ours[-1].item() == theirs[1].item()


def test_pack_and_unpack_more_than_2_to_the_31_elements() -> None:
    """Of 2 bytes, which the wrapper does not take."""
    need_memory(20)
    grad = torch.empty(HUGE, dtype=torch.bfloat16, device=DEVICE).normal_()
    send = torch.zeros_like(grad)
    table, backend = uploaded(grad), BACKENDS["cuda"]
    backend.pack(send, table)
    assert torch.equal(send, grad)
    backend.unpack(send.neg_(), table)
    assert torch.equal(grad, send)
