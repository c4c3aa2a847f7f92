"""`consolidate_state_dict` and `full_state_dict`: which rank has the whole, where, and how long."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from ranks import Rank, RankPool
from training import MODES, Job, assert_same_bits, gradient, make_params

import fusedshard
from fusedshard.moments import STRIDE
from fusedshard.precision import decode, join_master
from fusedshard.sharded_state import ShardedState


@pytest.mark.parametrize("to", [0, 1, 2])
def test_consolidated_state_dict(ranks: RankPool, to: int) -> None:
    """On the rank that was named the whole, as long as nothing changes; on the others shards."""
    for rank, (kinds, consolidated, whole) in enumerate(ranks.run(3, _consolidate, to)):
        tensor = torch.Tensor if rank == to else ShardedState
        # At once; again; after a step, a load, a new group; consolidated once more.
        assert kinds == [tensor, tensor, ShardedState, ShardedState, ShardedState, tensor]
        if rank == to:
            assert_same_bits(consolidated, whole)


def _consolidate(rank: Rank, to: int) -> Any:
    job, kinds = Job(rank, "sharded"), []
    job.steps(range(2))
    optimizer = job.optimizer

    def note() -> dict[str, Any]:
        found = optimizer.state_dict()
        kinds.append(type(found["state"][0]["exp_avg"]))
        return found

    optimizer.consolidate_state_dict(to)
    optimizer.param_groups[0]["lr"] *= 0.5  # as a scheduler does after the step
    consolidated, whole = note(), optimizer.full_state_dict()
    if rank.rank == to:
        torch.save(note(), io.BytesIO())
    else:
        note()
    job.steps(range(2, 3))
    note()
    for change in (
        lambda: optimizer.load_state_dict(whole),
        lambda: optimizer.add_param_group({"params": make_params([(5,)])}),
    ):
        optimizer.consolidate_state_dict(to)
        change()
        note()
    optimizer.consolidate_state_dict(to=to)
    note()
    return kinds, (consolidated if rank.rank == to else None), whole


@pytest.mark.parametrize("mode", MODES)
def test_consolidating_on_no_rank_or_on_several(ranks: RankPool, mode: str) -> None:
    wrong = "to: got 2, wanted a rank from 0 to 1"
    for rank, (first, second, third) in enumerate(ranks.run(2, _consolidate_wrongly, mode)):
        assert first == wrong
        assert second == (wrong if rank == 1 else f"on rank 1: {wrong}")
        assert third == "to: the ranks name different ones: 0, 1"


def _consolidate_wrongly(rank: Rank, mode: str) -> list[str]:
    job = Job(rank, mode)
    job.steps(range(1))
    texts = []
    for to in (2, 2 * rank.rank, rank.rank):
        before = job.optimizer.state_dict()["state"][0]["exp_avg"]
        with pytest.raises(ValueError) as caught:
            job.optimizer.consolidate_state_dict(to)
        texts.append(str(caught.value))
        assert type(job.optimizer.state_dict()["state"][0]["exp_avg"]) is type(before)
    return texts


def test_consolidating_where_every_rank_has_all(ranks: RankPool) -> None:
    for found, whole in [*ranks.run(2, _consolidate_whole), *ranks.run(1, _consolidate_whole)]:
        assert_same_bits(found, whole)


def _consolidate_whole(rank: Rank) -> Any:
    job = Job(rank, "replicated" if rank.world_size > 1 else "sharded")
    job.steps(range(1))
    job.optimizer.consolidate_state_dict(to=0)
    return job.optimizer.state_dict(), job.optimizer.full_state_dict()


@pytest.mark.parametrize("mode", MODES)
def test_full_state_dict_where_the_parameters_are(ranks: RankPool, mode: str) -> None:
    """Copies, too, where that is the host."""
    for here, whole, after in ranks.run(2, _full_here, mode):
        assert_same_bits(here, whole)
        assert_same_bits(whole, after)


def _full_here(rank: Rank, mode: str) -> Any:
    job = Job(rank, mode)
    job.steps(range(1))
    here, whole = job.optimizer.full_state_dict(cpu=False), job.optimizer.full_state_dict()
    kept = copy.deepcopy(here)
    for state in here["state"].values():
        state["exp_avg"].fill_(7.0)
        state["exp_avg_sq"].fill_(7.0)
    return kept, whole, job.optimizer.full_state_dict()


def test_conversions_of_more_than_is_converted_at_a_time() -> None:
    """Codes, and masters of which a block does not count any more, as if all were converted at
    once."""
    param = torch.nn.Parameter(torch.linspace(-2, 2, 2 * STRIDE + 77).to(torch.bfloat16))
    optimizer = fusedshard.AdamW([param], state_dtype=torch.uint8, lr=0.01)
    for step in range(2):
        param.grad = gradient(param, step, 0, 0)
        optimizer.step()
    shown = optimizer.state[param]
    masters = join_master(param.detach(), shown["master_weights"])
    edited = slice(STRIDE + 128, STRIDE + 256)
    with torch.no_grad():
        param[STRIDE + 130] = 3.0
    masters[edited] = param.detach()[edited].float()
    full = optimizer.full_state_dict()["state"][0]
    assert_same_bits(full["master_weights"], masters)
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        expected = decode(shown[name], shown[f"{name}_exponents"], signed=signed)
        assert_same_bits(full[name], expected)
