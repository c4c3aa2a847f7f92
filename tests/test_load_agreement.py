"""What a rank cannot load, or has not loaded, is loaded on none."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
from ranks import Rank, RankPool
from training import MODES, Job, assert_same_bits

from fusedshard.sharded_state import ShardedState


def _without_numbers(state: dict[str, Any]) -> None:
    last = state["state"][max(state["state"])]
    last["exp_avg"] = last["exp_avg"].to("meta")


def _uncopyable_group(state: dict[str, Any]) -> None:
    state["param_groups"][0]["mine"] = threading.Lock()


def _uncopyable_state(state: dict[str, Any]) -> None:
    """torch moves it to the parameter's device."""
    state["state"][0]["mine"] = state["state"][0]["exp_avg"].to("meta")


SPOILT: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no numbers": (_without_numbers, "exp_avg is on the meta device in the state dict"),
    "a group": (_uncopyable_group, "cannot pickle '_thread.lock' object"),
    "a state": (_uncopyable_state, "meta"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", SPOILT)
def test_what_one_rank_cannot_load(ranks: RankPool, mode: str, what: str) -> None:
    for rank, (text, before, after) in enumerate(ranks.run(2, _load, mode, what)):
        assert SPOILT[what][1] in text
        assert text.startswith("on rank 1: ") == (rank == 0)
        assert_same_bits(before, after)


def _load(rank: Rank, mode: str, what: str) -> Any:
    job = Job(rank, mode)
    job.steps(range(2))
    given = copy.deepcopy(job.optimizer.full_state_dict())
    job.steps(range(2, 4))
    before = job.whole()
    if rank.rank == 1:
        SPOILT[what][0](given)
    with pytest.raises(Exception) as caught:  # of rank 1's kind
        job.optimizer.load_state_dict(given)
    after = job.whole()
    job.steps(range(4, 5))  # and the ranks go on together
    return str(caught.value), before, after


def test_what_one_rank_has_not_loaded(ranks: RankPool) -> None:
    for text, before, after in ranks.run(2, _load_on_one):
        assert text == "state_dict: the ranks bring different ones"
        assert_same_bits(before, after)


def _load_on_one(rank: Rank) -> Any:
    job = Job(rank, "sharded")
    job.steps(range(2))
    before, given = job.whole(), job.optimizer.state_dict()
    for state in given["state"].values():
        for value in state.values():
            if isinstance(value, ShardedState):
                value.is_loaded = rank.rank == 0
    with pytest.raises(ValueError) as caught:
        job.optimizer.load_state_dict(given)
    return str(caught.value), before, job.whole()
