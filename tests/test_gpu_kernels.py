"""The CUDA kernels give the bits of the CPU's, wherever their arrays lie."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from gpu_tools import DEVICE, equal_on_host, on_host, placed, placed_state, require_gpu
from kernel_tools import (
    ADAM,
    ADAMW,
    chunks_of_all_scales,
    each_dtype,
    each_group,
    tables_of,
    update,
)
from oracles import same_bits
from test_kernel_bits import odd_state, odd_values
from test_segment_table import GROUPS, LENGTHS, Shard, make_shard

from fusedshard.kernels import adam_, count_steps_, found_inf_, mean_, square_sum
from fusedshard.layout import Segment
from fusedshard.native import BACKENDS, AdamState
from fusedshard.tables import GroupScalars, StepTables, gradient_addresses, integers

require_gpu()
pytestmark = pytest.mark.gpu

SIZES = [0, 1, 3, 7, 4095, 4096, 4097, 17 * 257, 100_003]
# Several levels of partial sums, and more blocks than a card holds at once.
LARGE_SIZES = [4096 * 4096, 4096 * 4096 + 5]
# Of the parameter and the three moments, in elements: alike and unlike.
ALIKE = [(i, i, i, i) for i in range(4)]
UNLIKE = [(0, 1, 2, 3), (1, 0, 0, 0), (0, 0, 0, 2), (3, 3, 1, 3)]


def updated(
    start: AdamState,
    grad: torch.Tensor,
    group: GroupScalars,
    device: str,
    offsets: Sequence[int] = (0, 0, 0, 0),
    grad_offset: int = 0,
) -> AdamState:
    """A copy of a state after its third step."""
    state = placed_state(start, device, offsets)
    update(state, placed(grad, device, grad_offset), group, 3, 0.5)
    return state


@each_dtype
@each_group
def test_update_of_odd_values(group: GroupScalars, dtype: torch.dtype) -> None:
    for numel in SIZES:
        start, grad = odd_state(numel, dtype), odd_values(numel, dtype)
        if not group.amsgrad:
            start = start._replace(max_exp_avg_sq=None)
        ours = updated(start, grad, group, DEVICE)
        assert equal_on_host(ours, updated(start, grad, group, "cpu")), numel


@pytest.mark.parametrize("grad_offset", range(4))
@pytest.mark.parametrize("offsets", [*ALIKE, *UNLIKE], ids=str)
@each_dtype
def test_update_at_any_address(
    dtype: torch.dtype, offsets: tuple[int, ...], grad_offset: int
) -> None:
    group = ADAMW._replace(amsgrad=True)
    for numel in (1, 3, 4, 4097, 17 * 257):
        start, grad = odd_state(numel, dtype), odd_values(numel, dtype)
        ours = updated(start, grad, group, DEVICE, offsets, grad_offset)
        assert equal_on_host(ours, updated(start, grad, group, "cpu")), numel


def update_shard(
    shard: Shard,
    device: str,
    groups: Sequence[GroupScalars] = GROUPS,
    *,
    own_gradients_at: int | None = None,
    grad_scale: float | torch.Tensor = 1.0,
    found_inf: torch.Tensor | None = None,
) -> AdamState:
    """A copy of the shard's state after its update.

    Gradients lie in an array beside the shard, or each in memory of its own, so many elements
    behind an aligned address; there those of inactive parameters do not exist.
    """
    state = placed_state(shard.state, device)
    tables = tables_of(shard.segments, shard.itemsize, groups, shard.groups, device)
    tables.set_used(shard.active)
    if own_gradients_at is None:
        beside = placed(shard.grad, device)
        tables.point_at_shards([beside])
    else:
        grads = gradients_of(shard, device, own_gradients_at)
        tables.point_at_params(gradient_addresses(grads))
    tables.upload()
    adam_(state, tables.tables[0], (shard.steps - 1).to(device), grad_scale, found_inf)
    return on_host(state)


def gradients_of(shard: Shard, device: str, offset: int) -> list[torch.Tensor | None]:
    return [
        placed(shard.grad[s.shard_start :][: s.length], device, offset) if active else None
        for s, active in zip(shard.segments, shard.active.tolist(), strict=True)
    ]


@pytest.mark.parametrize("own_gradients_at", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("gaps", [[0], [0, 3, 31, 1]], ids=["packed", "padded"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@each_dtype
def test_segment_tables(
    lengths: list[int], gaps: list[int], dtype: torch.dtype, own_gradients_at: int | None
) -> None:
    if own_gradients_at is not None:
        lengths = lengths[:2000]  # each is an allocation
    shard = make_shard(lengths, gaps, dtype)
    shard.active[::3] = 0
    shard.steps[1::5] = 1_000_003
    ours, theirs = (
        update_shard(shard, device, own_gradients_at=own_gradients_at) for device in (DEVICE, "cpu")
    )
    assert equal_on_host(ours, theirs)


def test_an_empty_table() -> None:
    tables = tables_of([], 4, [], device=DEVICE)
    tables.point_at_params(integers([]))
    tables.upload()
    empty = torch.zeros(0, device=DEVICE)
    adam_(AdamState(empty, empty, empty, None), tables.tables[0], integers([]).to(DEVICE))


def test_tables_are_brought_up_to_date_step_by_step() -> None:
    """Some of the words change between uploads: used parameters, addresses, hyperparameters."""
    shard = make_shard(LENGTHS["mixed"], [0, 3], torch.float32)
    states, all_tables, grads = {}, {}, {}
    for device in (DEVICE, "cpu"):
        states[device] = placed_state(shard.state, device)
        all_tables[device] = tables_of(shard.segments, 4, GROUPS, shard.groups, device)
        grads[device] = [placed(shard.grad * factor, device) for factor in (1, -2, 0.5)]
    for step in range(6):
        groups = [group._replace(lr=0.1 / (step // 2 + 1)) for group in GROUPS]
        used = (torch.arange(len(shard.segments)) + step) % 3 != 0
        for device, tables in all_tables.items():
            tables.point_at_shards([grads[device][step % 3]])
            tables.set_used(used.long())
            tables.set_groups(groups)
            tables.upload()
            adam_(states[device], tables.tables[0], (shard.steps + step).to(device))
        assert equal_on_host(states[DEVICE], states["cpu"]), step


def test_hyperparameters_in_tensors_on_the_device() -> None:
    shard = make_shard(LENGTHS["mixed"], [3], torch.float32)
    tensors = {
        "lr": [0.3],
        "beta1": 0.85,
        "beta2": 0.97,
    }  # of one element, in one dimension or none
    on_device = {name: torch.tensor(value, device=DEVICE) for name, value in tensors.items()}
    ours = [*GROUPS[:2], GROUPS[2]._replace(**on_device), GROUPS[3]._replace(lr=on_device["lr"])]  # type: ignore[arg-type]
    numbers = {name: value.item() for name, value in on_device.items()}
    theirs = [*GROUPS[:2], GROUPS[2]._replace(**numbers), GROUPS[3]._replace(lr=numbers["lr"])]  # type: ignore[arg-type]
    want = update_shard(shard, "cpu", theirs)
    assert equal_on_host(update_shard(shard, DEVICE, ours), want)
    for tensor in on_device.values():
        tensor.mul_(0.5)
    halved = [
        group._replace(**{name: getattr(group, name) * 0.5 for name in names})
        for group, names in zip(theirs, [(), (), tuple(tensors), ("lr",)], strict=True)
    ]
    assert equal_on_host(update_shard(shard, DEVICE, ours), update_shard(shard, "cpu", halved))


@each_dtype
def test_gradient_scale_and_found_inf(dtype: torch.dtype) -> None:
    shard = make_shard(LENGTHS["mixed"], [0, 3], dtype)
    for scale, found in itertools.product(
        (1.0, 0.37, float("inf")), (None, 0.0, 1.0, float("nan"))
    ):
        results = []
        for device in (DEVICE, "cpu"):
            found_inf = None if found is None else torch.tensor(found, device=device)
            on_device = torch.tensor([scale], dtype=torch.float64, device=device)
            for grad_scale in (scale, on_device):
                state = update_shard(shard, device, grad_scale=grad_scale, found_inf=found_inf)
                results.append(state)
        assert all(equal_on_host(state, results[-1]) for state in results), (scale, found)
        assert equal_on_host(results[0], shard.state) == (found not in (None, 0.0))


@pytest.mark.parametrize("found", [None, 0.0, 1.0])
@pytest.mark.parametrize("count", [0, 1, 255, 100_003])
def test_count_steps(count: int, found: float | None) -> None:
    used = (torch.arange(count) % 3 != 0).long()
    start = torch.arange(count) + 2**24  # from there fp32 rounds
    results = []
    for device in (DEVICE, "cpu"):
        steps, mirror = placed(start, device), placed(start.float(), device)
        found_inf = None if found is None else torch.tensor([found], device=device)
        count_steps_(steps, mirror, used.to(device), found_inf)
        results.append((steps.cpu(), mirror.cpu()))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def chunks_of(values: Sequence[torch.Tensor], stride: int, offset: int) -> list[torch.Tensor]:
    """The same chunks in one buffer on the device, ``stride`` elements apart."""
    numel = len(values[0])
    room = torch.zeros(offset + stride * len(values), dtype=values[0].dtype, device=DEVICE)
    chunks = [room[offset + i * stride :][:numel] for i in range(len(values))]
    for chunk, value in zip(chunks, values, strict=True):
        chunk.copy_(value)
    return chunks


@pytest.mark.parametrize("gap", [0, 1, 3, 32])
@pytest.mark.parametrize("count", range(1, 6))
@each_dtype
def test_mean(dtype: torch.dtype, count: int, gap: int) -> None:
    for numel, offset in itertools.product(SIZES, (0, 1)):
        values = [*chunks_of_all_scales(count - 1, numel, dtype), odd_values(numel, dtype)]
        want = torch.empty(numel, dtype=dtype)
        mean_(want, values)
        chunks = chunks_of(values, numel + gap, offset)
        for out_offset in range(2):
            out = placed(torch.full((numel,), 7.0, dtype=dtype), DEVICE, out_offset)
            mean_(out, chunks)
            assert same_bits(out.cpu(), want), (numel, offset, out_offset)


@each_dtype
def test_mean_over_one_of_its_chunks_and_backwards(dtype: torch.dtype) -> None:
    values = chunks_of_all_scales(4, 4097, dtype)
    for aliased, order in itertools.product(range(4), (1, -1)):
        want = torch.empty(4097, dtype=dtype)
        mean_(want, values[::order])
        chunks = chunks_of(values, 4100, 0)[::order]
        mean_(chunks[aliased], chunks)
        assert same_bits(chunks[aliased].cpu(), want), (aliased, order)


def test_mean_of_scattered_chunks_is_refused() -> None:
    room = torch.zeros(64, device=DEVICE)
    with pytest.raises(ValueError, match="chunks: got scattered ones, wanted equal distances"):
        mean_(room[:8].clone(), [room[:8], room[8:16], room[17:25]])


@pytest.mark.parametrize("numel", [*SIZES, *LARGE_SIZES])
@each_dtype
def test_square_sum(dtype: torch.dtype, numel: int) -> None:
    (x,) = chunks_of_all_scales(1, numel, dtype)
    want = square_sum(x)
    for offset in (0, 1, 2, 3, 0):
        assert same_bits(square_sum(placed(x, DEVICE, offset)).cpu(), want), offset


@pytest.mark.parametrize("numel", SIZES)
@each_dtype
def test_found_inf(dtype: torch.dtype, numel: int) -> None:
    finite = odd_values(numel, dtype).nan_to_num()
    for before, offset in itertools.product((0.0, 1.0, 7.0), range(4)):
        x = placed(finite, DEVICE, offset)
        found_inf = torch.tensor(before, device=DEVICE)
        found_inf_(found_inf, x)
        assert found_inf.item() == before
    for place, value in itertools.product({0, numel // 2, numel - 1}, ("inf", "-inf", "nan")):
        if 0 <= place < numel:
            x = placed(finite, DEVICE, 1)
            x[place] = float(value)
            found_inf = torch.zeros(1, device=DEVICE)
            found_inf_(found_inf, x)
            assert found_inf.item() == 1.0, (place, value)


def packing(
    grads: Sequence[torch.Tensor | None], lengths: Sequence[int], itemsize: int, device: str
) -> tuple[StepTables, int]:
    """Tables of gradients with gaps of all kinds between them, and the elements of the buffer."""
    segments, end = [], 5
    for index, length in enumerate(lengths):
        segments.append(Segment(index, 0, end, length))
        end += length + (0, 1, 32, 4099)[index % 4]
    tables = tables_of(segments, itemsize, device=device)
    tables.point_at_params(gradient_addresses(grads))
    tables.upload()
    return tables, end + 77


@pytest.mark.parametrize("offset", range(4))
@pytest.mark.parametrize("send_offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_pack_and_unpack(dtype: torch.dtype, send_offset: int, offset: int) -> None:
    """By the backends: `pack_` and `unpack_` take only what the update takes."""
    lengths = [*SIZES[1:], 2, 5, 8]
    values: list[torch.Tensor | None] = [
        torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in lengths
    ]
    values[0] = values[5] = None
    results = []
    for device in (DEVICE, "cpu"):
        backend = BACKENDS[torch.device(device).type]
        grads = [None if value is None else placed(value, device, offset) for value in values]
        tables, numel = packing(grads, lengths, dtype.itemsize, device)
        send = placed(torch.full((numel,), 7.0, dtype=dtype), device, send_offset)
        backend.pack(send, tables.tables[0])
        packed = send.cpu()
        backend.unpack(send.neg_(), tables.tables[0])
        results.append([packed, *(grad.cpu() for grad in grads if grad is not None)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_packing_nothing_clears_the_buffer() -> None:
    tables = tables_of([], 4, device=DEVICE)
    tables.upload()
    send = torch.ones(5000, device=DEVICE)
    BACKENDS["cuda"].pack(send, tables.tables[0])
    assert not send.any()
    BACKENDS["cuda"].unpack(send, tables.tables[0])


def test_kernels_of_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    start, grad = odd_state(4097, torch.float32), odd_values(4097, torch.float32)
    want = updated(start, grad, ADAM, "cpu")
    with torch.cuda.device(1):
        state, gradient = placed_state(start), placed(grad)
        tables = tables_of([Segment(0, 0, 0, 4097)], 4, [ADAM], device=DEVICE)
        tables.point_at_shards([gradient])
        tables.upload()
        adam_(state, tables.tables[0], integers([2]).to(DEVICE), 0.5)
        assert same_bits(square_sum(gradient).cpu(), square_sum(grad))
        assert torch.cuda.current_device() == 1
    assert equal_on_host(state, want)
