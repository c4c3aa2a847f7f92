"""The segment table: many parameters, groups and step counts in one call."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from emulated_backend import is_emulated
from kernel_tools import ADAM, ADAMW, each_dtype, running_on, tables_of, ways_to_run
from oracles import adam_reference_, arrays_of, same_bits, same_state

from fusedshard.kernels import adam_
from fusedshard.layout import Segment
from fusedshard.native import AdamState
from fusedshard.tables import GroupScalars, StepTables

pytestmark = pytest.mark.usefixtures("each_backend")

GROUPS = [
    ADAM,
    ADAMW._replace(lr=0.3, beta1=0.5, amsgrad=True),
    ADAM._replace(lr=0.1, weight_decay=0.5, maximize=True, eps=1.0),
    ADAMW._replace(beta1=0.99, beta2=0.9, weight_decay=0.7),
]
GUARD = 12345.0


@dataclass
class Shard:
    """Segments with padding between them; every segment is a parameter of its own. ``steps``
    counts the update to come."""

    segments: list[Segment]
    state: AdamState
    grad: torch.Tensor
    active: torch.Tensor
    steps: torch.Tensor
    groups: torch.Tensor

    @property
    def itemsize(self) -> int:
        return self.state.param.element_size()

    def tables(self, groups: Sequence[GroupScalars] = GROUPS) -> StepTables:
        """Of the shard, with the gradients in an array beside it."""
        tables = tables_of(self.segments, self.itemsize, groups, self.groups)
        tables.point_at_shards([self.grad])
        tables.set_used(self.active)
        return tables

    def update(self, state: AdamState | None = None, tables: StepTables | None = None) -> AdamState:
        """Run the kernel on ``state``, or on the shard's own."""
        tables = tables or self.tables()
        tables.upload()
        state = state or self.state
        adam_(state, tables.tables[0], self.steps - 1)
        return state

    def expected(self) -> AdamState:
        """By plain torch: each pair of group and step count on a copy of everything, of which
        the segments concerned are kept."""
        result = copy.deepcopy(self.state)
        for group, step in {*zip(self.groups.tolist(), self.steps.tolist(), strict=True)}:
            whole = copy.deepcopy(self.state)
            adam_reference_(whole, self.grad, GROUPS[group], step)
            chosen = (self.groups == group) & (self.steps == step) & (self.active == 1)
            kept = self.elements_of(chosen.nonzero().flatten().tolist())
            for name, array in arrays_of(result).items():
                array[kept] = arrays_of(whole)[name][kept]
        return result

    def elements_of(self, params: Sequence[int]) -> torch.Tensor:
        """A mask of the elements of some parameters."""
        lengths = torch.tensor([s.length for s in self.segments])
        first = torch.tensor([s.shard_start for s in self.segments]) - lengths.cumsum(0) + lengths
        places = torch.arange(int(lengths.sum())) + first.repeat_interleave(lengths)
        params_of = torch.tensor([s.param for s in self.segments]).repeat_interleave(lengths)
        mask = torch.zeros(len(self.grad), dtype=torch.bool)
        wanted = torch.zeros(len(self.active), dtype=torch.bool)
        wanted[torch.tensor(params, dtype=torch.int64)] = True
        mask[places] = wanted[params_of]
        return mask


def make_shard(lengths: Sequence[int], gaps: Sequence[int], dtype: torch.dtype) -> Shard:
    """Segments of these lengths, each followed by padding (lengths of which are repeated) that
    holds GUARD."""
    lengths = lengths[:EMULATED_SEGMENTS] if is_emulated() else lengths
    generator = torch.Generator().manual_seed(len(lengths))
    segments: list[Segment] = []
    end = gaps[-1]
    for param, length in enumerate(lengths):
        segments.append(Segment(param, 0, end, length))
        end += length + gaps[param % len(gaps)]
    arrays = [torch.randn(end, generator=generator, dtype=dtype) for _ in range(5)]
    count = len(lengths)
    shard = Shard(
        segments,
        AdamState(arrays[0], arrays[1], arrays[2].abs(), arrays[3].abs()),
        arrays[4],
        torch.ones(count, dtype=torch.int64),
        torch.randint(1, 4, (count,), generator=generator),
        torch.randint(len(GROUPS), (count,), generator=generator),
    )
    padding = ~shard.elements_of(range(count))
    for array in arrays_of(shard.state).values():
        array[padding] = GUARD
    return shard


def close_or_equal(ours: AdamState, theirs: AdamState) -> bool:
    if ours.param.dtype == torch.float32:
        return same_state(ours, theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    return True


# Neighbours on both sides of every vector, cache line and thread border. All but the last have
# enough elements for three threads.
LENGTHS = {
    "single elements": [1] * 99_001,
    "large between single": [1, 1, 1, 40_000, 1, 1, 30_000, 1, 1, 1, 33_000],
    "borders of three threads": [32_703, 1, 63, 1, 1, 32_703, 1, 64, 1, 33_000],
    "mixed": [1, 2, 3, 5, 17, 64, 127, 128, 129, 0, 1, 1000, 1, 15, 16] * 12,
}
each_shard = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
EMULATED_SEGMENTS = 600  # at most, as each costs an emulated block's work
each_gap = pytest.mark.parametrize("gaps", [[0], [0, 3, 31, 1]], ids=["packed", "padded"])


@each_gap
@each_shard
@each_dtype
def test_every_segment_takes_its_own_scalars(
    lengths: list[int], gaps: list[int], dtype: torch.dtype
) -> None:
    shard = make_shard(lengths, gaps, dtype)
    want, tables = shard.expected(), shard.tables()
    for variant, threads in ways_to_run():
        state = copy.deepcopy(shard.state)
        with running_on(variant, threads):
            shard.update(state, tables)
        assert close_or_equal(state, want), (variant, threads)


@each_gap
@each_shard
def test_inactive_segments_and_padding_keep_their_bits(lengths: list[int], gaps: list[int]) -> None:
    shard = make_shard(lengths, gaps, torch.float32)
    shard.active[::3] = 0
    want = shard.expected()
    idle = ~shard.elements_of(shard.active.nonzero().flatten().tolist())
    shard.grad[idle] = float("nan")
    before = copy.deepcopy(shard.state)
    shard.update()
    assert same_state(shard.state, want)
    for name, array in arrays_of(shard.state).items():
        assert same_bits(array[idle], arrays_of(before)[name][idle]), name
    assert not torch.equal(shard.state.param, before.param)


def test_nothing_active_changes_nothing() -> None:
    shard = make_shard([5, 1, 7], [0], torch.float32)
    shard.active.zero_()
    tables = shard.tables()
    tables.rows[:, 2] = 0  # gradients that must not be read
    before = copy.deepcopy(shard.state)
    shard.update(tables=tables)
    assert same_state(shard.state, before)


def test_empty_table() -> None:
    tables = tables_of([], 4, [])
    tables.point_at_params(torch.zeros(0, dtype=torch.int64))
    tables.upload()
    empty = torch.zeros(0)
    state = AdamState(empty, empty.clone(), empty.clone(), None)
    adam_(state, tables.tables[0], torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize("offset", range(4))
@each_dtype
def test_gradients_in_separate_tensors_at_any_alignment(dtype: torch.dtype, offset: int) -> None:
    shard = make_shard(LENGTHS["mixed"], [0, 3], dtype)
    want = shard.expected()
    grads = []
    for s in shard.segments:
        room = torch.full((s.length + 4,), float("nan"), dtype=dtype)
        grads.append(room[offset : offset + s.length])
        grads[-1].copy_(shard.grad[s.shard_start : s.shard_start + s.length])
    tables = shard.tables()
    tables.point_at_params(torch.tensor([grad.data_ptr() for grad in grads]))
    assert close_or_equal(shard.update(tables=tables), want)


@each_dtype
def test_a_shard_that_begins_within_a_parameter(dtype: torch.dtype) -> None:
    """Two pieces of parameter 1 and one of parameter 0, as a shard of a later bucket has them."""
    shard = make_shard([6, 9, 4], [2], dtype)
    starts = [s.shard_start for s in shard.segments]
    pieces = [(1, 100, 6), (0, 7, 9), (1, 31, 4)]
    shard.segments = [
        Segment(param, param_start, start, length)
        for start, (param, param_start, length) in zip(starts, pieces, strict=True)
    ]
    shard.active, shard.steps = torch.ones(2, dtype=torch.int64), torch.tensor([1, 3])
    shard.groups = torch.tensor([1, 2])
    want = shard.expected()
    grads = [torch.full((120,), float("nan"), dtype=dtype) for _ in range(2)]
    for s in shard.segments:
        stretch = shard.grad[s.shard_start : s.shard_start + s.length]
        grads[s.param][s.param_start : s.param_start + s.length] = stretch
    tables = shard.tables()
    tables.point_at_params(torch.tensor([grad.data_ptr() for grad in grads]))
    assert close_or_equal(shard.update(tables=tables), want)


def test_merged_segments_have_the_bits_of_separate_ones() -> None:
    """Neighbours of one group and step run as one loop where their gradients adjoin, and as many
    where these lie elsewhere or the group is a twin."""
    lengths = LENGTHS["borders of three threads"]
    shard = make_shard(lengths, [0], torch.float32)
    shard.steps.fill_(2)
    shard.groups.fill_(1)
    merged, twins, scattered = (copy.deepcopy(shard.state) for _ in range(3))
    shard.update(merged)
    shard.groups[::2] = len(GROUPS)
    shard.update(twins, shard.tables([*GROUPS, GROUPS[1]]))
    shard.groups.fill_(1)
    tables = shard.tables()
    copies = [grad.clone() for grad in shard.grad.split(lengths)]
    tables.point_at_params(torch.tensor([grad.data_ptr() for grad in copies]))
    shard.update(scattered, tables)
    assert same_state(twins, merged)
    assert same_state(scattered, merged)


@pytest.mark.parametrize("field", ["step", "group", "active", "gradient", "gap"])
def test_one_difference_separates_neighbours(field: str) -> None:
    """Each thing that keeps two segments from running as one."""
    shard = make_shard([5, 6], [1 if field == "gap" else 0], torch.float32)
    shard.steps.fill_(2)
    shard.groups.fill_(1)
    if field == "step":
        shard.steps[1] = 1
    if field == "group":
        shard.groups[1] = 3
    if field == "active":
        shard.active[1] = 0
    first, second = (shard.grad[s.shard_start :][: s.length] for s in shard.segments)
    swapped = field == "gradient"
    packed = torch.cat([second, first] if swapped else [first, second])
    places = torch.tensor([6, 0] if swapped else [0, 5])
    tables = shard.tables()
    tables.point_at_params(packed.data_ptr() + places * shard.itemsize)
    want = shard.expected()
    assert same_state(shard.update(tables=tables), want)


def test_what_was_set_acts_after_the_next_upload() -> None:
    shard = make_shard([40, 1, 3], [0], torch.float32)
    tables = shard.tables()
    shard.update(tables=tables)
    for active in ([1, 0, 1], [0, 1, 1]):
        shard.steps += 1
        shard.active = torch.tensor(active)
        shard.grad = shard.grad.flip(0).contiguous()
        want = shard.expected()
        tables.point_at_shards([shard.grad])
        tables.set_used(shard.active)
        assert same_state(shard.update(tables=tables), want)


def test_hyperparameters_are_read_at_each_upload() -> None:
    shard = make_shard([40], [0], torch.float32)
    frozen = [group._replace(lr=0.0, weight_decay=0.0) for group in GROUPS]
    before = shard.state.param.clone()
    tables = shard.tables(frozen)
    shard.update(tables=tables)
    assert torch.equal(shard.state.param, before)
    tables.set_groups(GROUPS)
    shard.update(tables=tables)
    assert not torch.equal(shard.state.param, before)


def test_several_shards_share_their_tables() -> None:
    """Rows, used parameters and groups of three buckets, refreshed together; one is empty."""
    shards = [make_shard([9, 1, 30], [2], torch.float32), make_shard([4], [0], torch.float32)]
    parts = [shards[0].segments, [], [Segment(3, 0, 0, 4)]]
    group_of = torch.cat([shard.groups for shard in shards])
    steps = torch.cat([shard.steps for shard in shards])
    tables = StepTables([(part, 4) for part in parts], group_of, len(GROUPS), torch.device("cpu"))
    tables.point_at_shards([shards[0].grad, torch.empty(0), shards[1].grad])
    tables.set_used(torch.ones_like(group_of))
    tables.set_groups(GROUPS)
    tables.upload()
    for shard, table in zip(shards, tables.tables[::2], strict=True):
        want = shard.expected()
        adam_(shard.state, table, steps - 1)
        assert same_state(shard.state, want)


def test_group_scalars_have_the_order_of_the_extension() -> None:
    """Each field alone changes the result as it does in plain torch."""
    changes = {"lr": 0.5, "beta1": 0.7, "beta2": 0.5, "eps": 0.3, "weight_decay": 0.2}
    switches = {"decoupled": True, "amsgrad": True, "maximize": True}
    assert {*changes, *switches} == {*GroupScalars._fields}
    start = make_shard([50], [0], torch.float32)
    start.groups.zero_()
    for name, value in {**changes, **switches}.items():
        group = ADAM._replace(weight_decay=0.1)._replace(**{name: value})  # type: ignore[arg-type]
        ours, theirs = copy.deepcopy(start.state), copy.deepcopy(start.state)
        start.update(ours, start.tables([group]))
        adam_reference_(theirs, start.grad, group, int(start.steps[0]))
        assert same_state(ours, theirs), name
