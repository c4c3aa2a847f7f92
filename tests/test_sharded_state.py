"""ShardedState, as a tensor and in state dicts. Values are worked out by hand, or those of
`full_state_dict`."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from ranks import MAX_RANKS, Rank, RankPool
from training import Job, assert_same_bits, make_params

import fusedshard
from fusedshard.sharded_state import ShardedState, Stretch

REMEDY = "call full_state_dict() on every rank and save what it returns"


def shard(memory: torch.Tensor, start: int, dtype: torch.dtype = torch.float32) -> ShardedState:
    """Of a (4, 3) tensor whose columns lie one behind the other, the elements from ``start``."""
    stretch = Stretch(start, len(memory), lambda: memory)
    return ShardedState((4, 3), (1, 4), dtype, torch.device("cpu"), [stretch])


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.arange(2.0, 9.0)


@pytest.fixture
def state(memory: torch.Tensor) -> ShardedState:
    return shard(memory, 2)


def contents(state: ShardedState) -> dict[tuple[int, ...], float]:
    """Elements by index, as torch.distributed.checkpoint would save them."""
    found = {}
    for item in state.__create_write_items__("name", None):
        box = state.__get_tensor_shard__(item.index)
        assert box.untyped_storage().nbytes() == box.nbytes  # else torch would copy it to save it
        for index in numpy.ndindex(*box.shape):
            place = tuple(a + b for a, b in zip(item.index.offset or (), index, strict=True))
            assert place not in found
            found[place] = box[index].item()
    return found


# The second column's first element is the fifth in memory.
CONTENTS = {
    **{(2, 0): 2.0, (3, 0): 3.0},
    **{(0, 1): 4.0, (1, 1): 5.0, (2, 1): 6.0, (3, 1): 7.0, (0, 2): 8.0},
}


def test_it_has_form_and_no_values(state: ShardedState) -> None:
    assert isinstance(state, torch.Tensor) and isinstance(state, fusedshard.ShardedState)
    assert state.shape == (4, 3) and state.stride() == (1, 4) and state.numel() == 12
    assert state.dtype == torch.float32 and state.device.type == "cpu"
    assert not state.requires_grad and not state.is_contiguous()
    assert contents(state) == CONTENTS
    expected = "ShardedState(shape=(4, 3), dtype=torch.float32, device=cpu, elements here: [2:9])"
    assert repr(state) == str(state) == f"{state}" == expected
    assert str({"exp_avg": [state]}) == f"{{'exp_avg': [{expected}]}}"


def test_it_shows_what_the_memory_holds_and_its_copies_do_not(
    state: ShardedState, memory: torch.Tensor
) -> None:
    ways: list[Callable[[], Any]] = [
        state.clone,
        lambda: copy.deepcopy(state),
        lambda: copy.deepcopy({"a": [state]})["a"][0],
        lambda: state.to("cpu", copy=True),
    ]
    copies = [way() for way in ways]
    views: list[Any] = [
        state.detach(),
        state.data,
        state.to("cpu"),
        state.float(),
        torch.as_tensor(state),
    ]
    memory += 100
    for copied in copies:
        assert type(copied) is ShardedState and copied.stride() == (1, 4)
        assert contents(copied) == CONTENTS
    for view in (state, *views):
        assert contents(view) == {index: value + 100 for index, value in CONTENTS.items()}


def test_what_is_saved_is_the_memory_itself(state: ShardedState, memory: torch.Tensor) -> None:
    items = state.__create_write_items__("name", None)
    places = [state.__get_tensor_shard__(item.index).data_ptr() for item in items]
    assert places == [memory[i:].data_ptr() for i in (0, 2, 6)]  # where the columns begin


def test_deepcopy_keeps_identity(state: ShardedState) -> None:
    first, second = copy.deepcopy([state, state])
    assert first is second and first is not state


def test_meta_device_has_the_form_alone(state: ShardedState) -> None:
    moved = state.to("meta")
    assert moved.device.type == "meta" and moved.shape == (4, 3) and moved.stride() == (1, 4)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "sum": lambda s: s + 1,
    "sum with a plain tensor": lambda s: torch.zeros(4, 3) + s,
    "in place": lambda s: s.add_(1),
    "into a plain tensor": lambda s: torch.zeros(4, 3).copy_(s),
    "from a plain tensor": lambda s: s.copy_(torch.zeros(4, 3)),
    "out": lambda s: torch.mul(torch.zeros(4, 3), 2, out=s),
    "comparison": lambda s: s == s,
    "torch.equal": lambda s: torch.equal(torch.zeros(4, 3), s),
    "allclose": lambda s: torch.allclose(s, s),
    "norm": lambda s: s.norm(),
    "isnan": lambda s: torch.isnan(s),
    "matmul": lambda s: s.t() @ s,
    "cat": lambda s: torch.cat([torch.zeros(4, 3), s]),
    "stack": lambda s: torch.stack([s, s]),
    "foreach": lambda s: torch._foreach_add([s], 1),
    "index": lambda s: s[0],
    "assignment": lambda s: s.__setitem__(0, 1.0),
    "iteration": list,
    "reshape": lambda s: s.reshape(-1),
    "view of bytes": lambda s: s.view(torch.uint8),
    "as_strided": lambda s: s.as_strided((2,), (1,)),
    "resize": lambda s: s.resize_(3),
    "zeros_like": torch.zeros_like,
    "contiguous": lambda s: s.contiguous(),
    "clone in other strides": lambda s: s.clone(memory_format=torch.contiguous_format),
    "another dtype": lambda s: s.double(),
    "another dtype by to": lambda s: s.to("cpu", torch.bfloat16),
    "another shape": lambda s: s.new_empty(3),
    "numpy": lambda s: s.numpy(),
    "numpy.asarray": numpy.asarray,
    "tolist": lambda s: s.tolist(),
    "dlpack": torch.utils.dlpack.from_dlpack,
    "shared memory": lambda s: s.share_memory_(),
}


@pytest.mark.parametrize("way", REFUSED)
def test_all_else_is_refused_with_the_remedy(
    state: ShardedState, memory: torch.Tensor, way: str
) -> None:
    before = memory.clone()
    with pytest.raises(RuntimeError) as caught:
        REFUSED[way](state)
    assert "of shape (4, 3)" in str(caught.value) and REMEDY in str(caught.value)
    assert_same_bits(memory, before)


def test_what_has_one_element_has_no_value_either() -> None:
    memory = torch.ones(1)
    single = ShardedState(
        (), (), torch.float32, torch.device("cpu"), [Stretch(0, 1, lambda: memory)]
    )
    assert contents(single) == {(): 1.0}
    for way in (lambda: single.item(), lambda: float(single), lambda: bool(single)):
        with pytest.raises(RuntimeError, match=r"of shape \(\)"):
            way()


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_it_cannot_be_pickled(state: ShardedState, protocol: int) -> None:
    for write in (
        lambda: pickle.dumps({"a": state}, protocol),
        lambda: torch.save({"a": state}, io.BytesIO(), pickle_protocol=protocol),
    ):
        with pytest.raises(TypeError, match="call full_state_dict"):
            write()


def moments(state_dict: dict[str, Any]) -> Iterator[tuple[int, str, Any]]:
    for index, values in state_dict["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            yield index, name, values[name]


def check_shards(state_dict: dict[str, Any], whole: dict[str, Any]) -> int:
    """Every element that this rank has of the moments is that of the whole; how many it has."""
    count = 0
    for index, name, value in moments(state_dict):
        assert type(value) is ShardedState
        expected = whole["state"][index][name]
        assert value.shape == expected.shape and value.dtype == expected.dtype
        found = contents(value)
        assert found == {place: expected[place].item() for place in found}
        count += len(found)
    return count


def test_each_element_of_a_state_dict_is_on_one_rank(ranks: RankPool) -> None:
    counts = ranks.run(3, _of_a_job)
    assert sum(counts) == 2 * (17 * 257 + 5) and min(counts) > 0


def _of_a_job(rank: Rank) -> int:
    job = Job(rank, "sharded")
    job.steps(range(2))
    state_dict, whole = job.optimizer.state_dict(), job.optimizer.full_state_dict()
    assert list(state_dict["state"]) == list(whole["state"]) == [0, 1]  # as torch goes through it
    return check_shards(state_dict, whole)


def test_hooks_of_state_dicts(ranks: RankPool) -> None:
    """Those of `state_dict` see shards, and what they return is returned; those of
    `load_state_dict` see shards, too, may mend the dict, and then see what was loaded."""
    for seen, extra, before, after in ranks.run(2, _hooks):
        assert seen == ["saved", ShardedState, "to load", ShardedState, "loaded", 7]
        assert extra == "mine"
        before["state"][0]["step"] = torch.tensor(7.0)
        assert_same_bits(before, after)


def _hooks(rank: Rank) -> Any:
    job, seen = Job(rank, "sharded"), []
    job.steps(range(3))
    optimizer, before = job.optimizer, job.whole()[1]

    def saved(_: Any, packed: dict[str, Any]) -> dict[str, Any]:
        seen.extend(["saved", type(packed["state"][0]["exp_avg"])])
        return {**packed, "extra": "mine"}

    def to_load(_: Any, packed: dict[str, Any]) -> None:
        seen.extend(["to load", type(packed["state"][0]["exp_avg"])])
        packed["state"][0]["step"] = torch.tensor(7.0)

    def loaded(self: Any) -> None:
        seen.extend(["loaded", int(self.state[job.params[0]]["step"])])

    with optimizer.register_state_dict_post_hook(saved):
        state_dict = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(to_load)
    optimizer.register_load_state_dict_post_hook(loaded)
    optimizer.load_state_dict(state_dict)
    return seen, state_dict["extra"], before, job.whole()[1]


def test_its_own_state_dict_changes_nothing(ranks: RankPool) -> None:
    """Given back at once, and as it was three steps before: it shows what is there now, a copy of
    it what was there then."""
    for results in ranks.run(2, _reload):
        now, then, expected_now, expected_then = results
        assert_same_bits(now, expected_now)
        assert_same_bits(then, expected_then)


def _reload(rank: Rank) -> Any:
    job = Job(rank, "sharded")
    job.steps(range(2))
    shown, then = job.optimizer.state_dict(), job.whole()[1]
    kept = copy.deepcopy(shown)
    job.steps(range(2, 5))
    expected = job.whole()[1]
    job.optimizer.load_state_dict(job.optimizer.state_dict())
    now = job.whole()[1]
    assert check_shards(shown, now) == check_shards(kept, then) > 0
    job.optimizer.load_state_dict(kept)
    return now, job.whole()[1], expected, then


def trained(params: list[torch.nn.Parameter], group: Any) -> dict[str, Any]:
    optimizer = fusedshard.AdamW(params, process_group=group)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer.state_dict()


def of_another_rank(rank: Rank, pair: Any) -> dict[str, Any]:
    found = trained(make_params(Job.SHAPES), pair)
    for state in found["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            own = state[name]
            state[name] = ShardedState(
                own.size(),
                own.stride(),
                own.dtype,
                own.device,
                [Stretch(s.start + 1, s.length, s.read) for s in own.stretches],
            )
    return found


def of_another_optimizer(rank: Rank, pair: Any) -> dict[str, Any]:
    """Which has one more parameter before these."""
    found = trained(make_params([(3000,), *Job.SHAPES]), pair)
    found["state"] = {index - 1: state for index, state in found["state"].items() if index}
    found["param_groups"][0]["params"].pop()
    return found


# Called on two ranks, with their group.
DONORS = {"another rank": of_another_rank, "another optimizer": of_another_optimizer}


@pytest.mark.parametrize("on_all", [True, False], ids=["all", "one"])
@pytest.mark.parametrize("mode", ["sharded", "replicated"])
@pytest.mark.parametrize("donor", [*DONORS, "more ranks"])
def test_shards_of_others_are_refused_on_every_rank(
    ranks: RankPool, mode: str, donor: str, on_all: bool
) -> None:
    results = ranks.run(MAX_RANKS, _refuse, mode, donor, on_all)[:2]
    for (text, before, after), has_it in zip(results, (on_all, True), strict=True):
        assert text.startswith("parameter " if has_it else "on rank 1: parameter ")
        assert "exp_avg is of another rank, or of another number of ranks: got elements" in text
        assert "torch.distributed.checkpoint" in text
        assert_same_bits(before, after)


def _refuse(rank: Rank, mode: str, donor: str, on_all: bool) -> Any:
    pair, foreign = dist.new_group([0, 1]), {}
    if donor == "more ranks":
        foreign = trained(make_params(Job.SHAPES), rank.group)
    if rank.rank > 1:
        return None
    job = Job(rank, mode, pair)
    job.steps(range(2))
    foreign = foreign or DONORS[donor](rank, pair)
    before = job.whole()
    with pytest.raises(ValueError) as caught:
        given = foreign if on_all or rank.rank == 1 else job.optimizer.state_dict()
        job.optimizer.load_state_dict(given)
    return str(caught.value), before, job.whole()
