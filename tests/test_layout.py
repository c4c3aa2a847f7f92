"""Where elements live: properties of every layout, and the layouts of real models."""

from __future__ import annotations

import dataclasses
import itertools
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedshard.layout import (
    ALIGNMENT_BYTES,
    MIN_SHARD_BYTES,
    Layout,
    ParamSpec,
    build_layout,
    iterate_buckets,
    owned_ranges,
)

MIB = 1 << 20
KINDS = {"float32@cpu": 4, "float64@cpu": 8, "bfloat16@cpu": 2, "float32@cuda:0": 4}
AWKWARD = [0, 1, 7, 31, 32, 33, 17 * 257, MIN_SHARD_BYTES // 4]


def specs_of(numels: list[int], kind: str = "float32@cpu") -> list[ParamSpec]:
    return [ParamSpec(i, numel, kind, KINDS[kind]) for i, numel in enumerate(numels)]


numels = st.one_of(
    st.sampled_from(AWKWARD), st.integers(0, 1000), st.integers(0, MIB), st.integers(MIB, 20 * MIB)
)
several_specs = st.lists(st.tuples(numels, st.sampled_from(sorted(KINDS))), max_size=12).map(
    lambda rows: [ParamSpec(i, numel, kind, KINDS[kind]) for i, (numel, kind) in enumerate(rows)]
)
few_ranks = st.integers(1, 20)
many_ranks = st.one_of(few_ranks, st.sampled_from([63, 1000, 1024, 16384]))
caps = st.one_of(st.integers(1, MIB), st.integers(MIB, 64 * MIB))
fewer_examples = settings(max_examples=50, deadline=None)


def padding_bytes(layout: Layout, specs: list[ParamSpec]) -> int:
    padded = sum(flat.numel * flat.itemsize for flat in layout.flats)
    return padded - sum(spec.numel * spec.itemsize for spec in specs)


@settings(deadline=None)
@given(several_specs, many_ranks, caps)
def test_every_parameter_has_one_aligned_slot_among_its_kind(
    specs: list[ParamSpec], world_size: int, cap: int
) -> None:
    layout = build_layout(specs, world_size, cap)
    placed = [slot.param for flat in layout.flats for slot in flat.slots]
    assert sorted(placed) == [spec.index for spec in specs if spec.numel > 0]
    for flat in layout.flats:
        end = 0
        for slot in flat.slots:
            spec = specs[slot.param]
            assert (spec.kind, spec.itemsize, spec.numel) == (flat.kind, flat.itemsize, slot.numel)
            assert slot.start * flat.itemsize % ALIGNMENT_BYTES == 0
            assert slot.start >= end
            end = slot.start + slot.numel
        assert end <= flat.numel


@settings(deadline=None)
@given(several_specs, many_ranks, caps)
def test_buckets_fill_their_buffer_with_equal_aligned_shards(
    specs: list[ParamSpec], world_size: int, cap: int
) -> None:
    layout = build_layout(specs, world_size, cap)
    largest = max(cap, 2 * world_size * MIN_SHARD_BYTES) + world_size * ALIGNMENT_BYTES
    for flat in layout.flats:
        end = 0
        for bucket in flat.buckets:
            assert bucket.start == end
            assert 0 < bucket.numel == bucket.shard_numel * world_size
            assert bucket.numel * flat.itemsize <= largest or world_size == 1
            assert bucket.shard_numel * flat.itemsize % ALIGNMENT_BYTES == 0
            assert bucket.shard_start(world_size - 1) + bucket.shard_numel == end + bucket.numel
            end += bucket.numel
        assert end == flat.numel
    assert layout.bucket_count == len(list(iterate_buckets(layout)))
    assert layout.padded_numel == sum(bucket.numel for _, bucket in iterate_buckets(layout))


@fewer_examples
@given(several_specs, few_ranks, caps)
def test_ranks_own_every_element_once(specs: list[ParamSpec], world_size: int, cap: int) -> None:
    check_ownership(build_layout(specs, world_size, cap), specs)


def check_ownership(layout: Layout, specs: list[ParamSpec]) -> None:
    """All ranks' ranges of a parameter adjoin, from its first element to its last."""
    found: dict[int, list[tuple[int, int]]] = {}
    for rank in range(layout.world_size):
        for param, ranges in owned_ranges(layout, rank).items():
            found.setdefault(param, []).extend(ranges)
    assert found.keys() == {spec.index for spec in specs if spec.numel > 0}
    for param, ranges in found.items():
        ranges.sort()
        assert ranges[0][0] == 0 and ranges[-1][1] == specs[param].numel
        assert all(a < b for a, b in ranges)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))


@fewer_examples
@given(several_specs, few_ranks, caps)
def test_segments_name_the_same_element_three_ways(
    specs: list[ParamSpec], world_size: int, cap: int
) -> None:
    layout = build_layout(specs, world_size, cap)
    for flat, bucket in iterate_buckets(layout):
        slots = {slot.param: slot for slot in flat.slots}
        for rank in range(world_size):
            first, end = bucket.shard_start(rank), 0
            for segment in flat.segments(first, bucket.shard_numel):
                slot = slots[segment.param]
                assert first + segment.shard_start == slot.start + segment.param_start
                assert end <= segment.shard_start < segment.shard_start + segment.length
                assert segment.param_start + segment.length <= slot.numel
                end = segment.shard_start + segment.length
            assert end <= bucket.shard_numel


@settings(deadline=None)
@given(several_specs, many_ranks, caps)
def test_padding_is_bounded_by_slots_and_shards(
    specs: list[ParamSpec], world_size: int, cap: int
) -> None:
    layout = build_layout(specs, world_size, cap)
    slots = sum(len(flat.slots) for flat in layout.flats)
    most = (slots + world_size * layout.bucket_count) * ALIGNMENT_BYTES
    assert 0 <= padding_bytes(layout, specs) <= most


@settings(deadline=None)
@given(several_specs, many_ranks, caps)
def test_same_arguments_give_the_same_layout(
    specs: list[ParamSpec], world_size: int, cap: int
) -> None:
    before = list(specs)
    layout = build_layout(specs, world_size, cap)
    again = [dataclasses.replace(spec) for spec in specs]
    assert build_layout(tuple(again), world_size, cap) == layout
    assert hash(layout) == hash(build_layout(specs, world_size, cap))
    assert specs == before


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 100, 16384])
@pytest.mark.parametrize("numels", [[1], [3], AWKWARD, [1, 0], [0, 1], [5, 7, 1, 13]], ids=str)
def test_more_ranks_than_elements(numels: list[int], world_size: int) -> None:
    specs = specs_of(numels)
    check_ownership(build_layout(specs, world_size, 1), specs)


@pytest.mark.parametrize("numels", [[], [0], [0, 0, 0]], ids=str)
def test_nothing_to_place(numels: list[int]) -> None:
    layout = build_layout(specs_of(numels), 3, MIB)
    assert layout == Layout(3, ())
    assert (layout.bucket_count, layout.padded_numel, owned_ranges(layout, 2)) == (0, 0, {})


def test_layouts_are_frozen() -> None:
    layout = build_layout(specs_of([5]), 2, MIB)
    parts = [layout, layout.flats[0], layout.flats[0].slots[0], layout.flats[0].buckets[0]]
    for part in parts:
        field = dataclasses.fields(part)[0].name  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, field, None)


def test_last_parameters_come_first() -> None:
    layout = build_layout(specs_of([100_000] * 10), 2, MIB)
    order = [slot.param for flat in layout.flats for slot in flat.slots]
    assert len(layout.flats) > 1 and order == sorted(order, reverse=True)


def test_kinds_fill_buffers_of_their_own() -> None:
    specs = [ParamSpec(i, 1000, kind, KINDS[kind]) for i, kind in enumerate([*KINDS] * 5)]
    layout = build_layout(specs, 2, MIB)
    assert sorted(flat.kind for flat in layout.flats) == sorted(KINDS)


def test_small_parameters_share_a_bucket_up_to_the_cap() -> None:
    tensor = 64 * 1024  # elements of 256 KiB
    layout = build_layout(specs_of([tensor] * 9), 2, MIB)
    assert [len(flat.slots) for flat in layout.flats] == [4, 4, 1]
    assert [flat.numel for flat in layout.flats] == [4 * tensor, 4 * tensor, tensor]


@pytest.mark.parametrize("kind", KINDS)
def test_large_parameter_is_one_bucket_where_nothing_is_exchanged(kind: str) -> None:
    layout = build_layout(specs_of([10, 10 * MIB + 1, 10], kind), 1, 4 * MIB)
    assert [len(flat.buckets) for flat in layout.flats] == [1] * len(layout.flats)
    assert max(flat.numel for flat in layout.flats) >= 10 * MIB + 1


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_large_parameter_spans_buckets_of_about_equal_size(kind: str, world_size: int) -> None:
    specs = specs_of([10, 10 * MIB + 1, 10], kind)
    layout = build_layout(specs, world_size, 4 * MIB)
    large = next(flat for flat in layout.flats if flat.slots[0].param == 1)
    assert len(large.slots) == 1
    assert len(large.buckets) == -(-specs[1].numel * specs[1].itemsize // (4 * MIB))
    sizes = [bucket.numel * large.itemsize for bucket in large.buckets]
    assert max(sizes) - min(sizes) <= len(sizes) * world_size * ALIGNMENT_BYTES
    check_ownership(layout, specs)


@pytest.mark.parametrize("world_size", [1, 2, 16, 1024, 16384])
def test_shard_of_a_full_bucket_has_a_least_size(world_size: int) -> None:
    """However small the cap: many tensors of 1 KiB fill each bucket but the last."""
    specs = specs_of([256] * max(2000, 300 * min(world_size, 64)))
    layout = build_layout(specs, world_size, 1)
    for flat in layout.flats[:-1]:
        (bucket,) = flat.buckets
        assert bucket.shard_numel * flat.itemsize >= MIN_SHARD_BYTES


def test_a_tensor_just_above_the_cap_is_not_cut_below_the_least_size() -> None:
    for world_size in (1, 8, 1024):
        numel = world_size * MIN_SHARD_BYTES // 4 + 1
        for flat, bucket in iterate_buckets(build_layout(specs_of([numel]), world_size, 1)):
            assert bucket.shard_numel * flat.itemsize >= MIN_SHARD_BYTES


def gpt2() -> list[int]:
    """Of 124 M parameters, biases and norms included."""
    width, layers = 768, 12
    layer = [width, width, width * 3 * width, 3 * width, width * width, width, width, width]
    layer += [width * 4 * width, 4 * width, 4 * width * width, width]
    return [50257 * width, 1024 * width, *layer * layers, width, width]


def llama(width: int, layers: int, key_value: int, feed_forward: int, vocabulary: int) -> list[int]:
    attention = [width * width, key_value * width, key_value * width, width * width]
    layer = [*attention, *[feed_forward * width] * 3, width, width]
    return [vocabulary * width, *layer * layers, width, vocabulary * width]


LLAMA_70B = llama(8192, 80, 1024, 28672, 128256)
MODELS = {"gpt2": gpt2(), "8B": llama(4096, 32, 1024, 14336, 128256), "70B": LLAMA_70B}


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64, 96, 1000, 1024])
@pytest.mark.parametrize("kind", ["float32@cpu", "bfloat16@cpu"])
@pytest.mark.parametrize("model", MODELS)
def test_padding_of_real_models_is_under_one_per_cent(
    model: str, kind: str, world_size: int
) -> None:
    specs = specs_of(MODELS[model], kind)
    layout = build_layout(specs, world_size, 25 * MIB)
    total = sum(spec.numel * spec.itemsize for spec in specs)
    assert padding_bytes(layout, specs) < total / 100


@pytest.mark.parametrize("world_size", [1, 8, 1024, 16384])
def test_70_billion_parameters_on_paper(world_size: int) -> None:
    """Integers only: no memory of the model's size, and buckets in proportion to its bytes."""
    specs = specs_of(LLAMA_70B)
    total = sum(spec.numel for spec in specs)
    assert 70e9 < total < 71e9
    tracemalloc.start()
    layout = build_layout(specs, world_size, 25 * MIB)
    ranges = owned_ranges(layout, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 * MIB
    cap = max(25 * MIB, world_size * MIN_SHARD_BYTES)
    assert layout.bucket_count <= 2 * (total * 4 / cap) + len(specs)
    owned = sum(stop - start for pieces in ranges.values() for start, stop in pieces)
    assert 0.98 * total / world_size < owned <= layout.padded_numel // world_size
