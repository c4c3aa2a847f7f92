"""The collectives below the optimizer, on real ranks."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, RankPool, RanksFailed

from fusedshard import comm as comm_module
from fusedshard.comm import Communicator
from fusedshard.stats import Stats


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_exchange_brings_chunks_in_rank_order(ranks: RankPool, world_size: int) -> None:
    for rank, chunks in enumerate(ranks.run(world_size, _exchange)):
        expected = [[100.0 * peer + rank] * 5 for peer in range(world_size)]
        assert chunks == expected


def _exchange(rank: Rank) -> list[list[float]]:
    comm = Communicator(rank.group, Stats())
    to = [torch.full((5,), 100.0 * rank.rank + peer) for peer in range(rank.world_size)]
    receive = torch.empty(5 * (rank.world_size - 1))
    chunks, pending = comm.exchange_chunks(torch.cat(to), receive)
    pending.wait()
    assert comm.stats.sent_bytes["all_to_all"] == 4 * 5 * (rank.world_size - 1)
    return [chunk.tolist() for chunk in chunks]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_gather_in_place(ranks: RankPool, world_size: int) -> None:
    expected = [float(rank) for rank in range(world_size) for _ in range(7)]
    assert ranks.run(world_size, _all_gather) == [expected] * world_size


def _all_gather(rank: Rank) -> list[float]:
    comm = Communicator(rank.group, Stats())
    flat = torch.full((7 * rank.world_size,), -1.0)
    flat[7 * rank.rank : 7 * (rank.rank + 1)] = rank.rank
    comm.all_gather_(flat).wait()
    return flat.tolist()


def test_several_in_flight_do_not_mix(ranks: RankPool) -> None:
    assert all(ranks.run(3, _in_flight))


def _in_flight(rank: Rank) -> bool:
    comm = Communicator(rank.group, Stats())
    flights = []
    for round_ in range(20):
        send = torch.full((300,), float(round_ + 1000 * rank.rank))
        receive = torch.empty(200)
        flights.append((*comm.exchange_chunks(send, receive), send, receive))
        if rank.rank == 1:
            time.sleep(0.002)
    for round_, (chunks, pending, _, _) in enumerate(flights):
        pending.wait()
        for peer, chunk in enumerate(chunks):
            assert bool((chunk == round_ + 1000 * peer).all())
    return True


def test_ours_and_the_users_collectives_do_not_mix(ranks: RankPool) -> None:
    assert ranks.run(3, _interleaved) == [True] * 3


def _interleaved(rank: Rank) -> bool:
    """Ranks start the user's collective before or after ours, as they like."""
    comm = Communicator(rank.group, Stats())
    flat = torch.full((3,), float(rank.rank))
    users = torch.ones(1000)
    if rank.rank == 0:
        work = dist.all_reduce(users, group=rank.group, async_op=True)
        rows = comm.gather_rows(flat)
    else:
        rows = comm.gather_rows(flat)
        work = dist.all_reduce(users, group=rank.group, async_op=True)
    work.wait()
    return rows.tolist() == [[r] * 3 for r in (0.0, 1.0, 2.0)] and bool((users == 3).all())


def test_errors_are_shared(ranks: RankPool) -> None:
    results = ranks.run(3, _share)
    assert results == [
        ("ValueError", "on rank 1: bad 1"),
        ("ValueError", "bad 1"),
        ("RuntimeError", "bad 2"),
    ]


def _share(rank: Rank) -> Any:
    comm = Communicator(rank.group, Stats())
    errors = {1: ValueError("bad 1"), 2: RuntimeError("bad 2")}
    comm.raise_everywhere(None)
    try:
        comm.raise_everywhere(errors.get(rank.rank))
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)


def test_the_connection_is_made_once_and_keeps_the_groups_timeout(ranks: RankPool) -> None:
    assert ranks.run(2, _connection) == [(True, 60.0)] * 2


def _connection(rank: Rank) -> tuple[bool, float]:
    first, second = (Communicator(rank.group, Stats())._channel for _ in range(2))
    assert second.number == first.number + 1
    return first.gloo is second.gloo, first.gloo.options._timeout.total_seconds()


def test_optimizers_of_one_group_do_not_mix(ranks: RankPool) -> None:
    """Each rank starts theirs in another order, also where one rank had made more of them."""
    assert ranks.run(2, _two_optimizers) == [True] * 2


def _two_optimizers(rank: Rank) -> bool:
    comm_module._channels[rank.group] = comm_module._channels.get(rank.group, 0) + rank.rank
    comms = [Communicator(rank.group, Stats()) for _ in range(2)]
    works = []
    for number in (0, 1) if rank.rank == 0 else (1, 0):
        send = torch.full((8,), float(number))
        works.append((number, *comms[number].exchange_chunks(send, torch.empty(4)), send))
    for number, chunks, pending, _ in works:
        pending.wait()
        assert all(bool((chunk == number).all()) for chunk in chunks)
    return True


def test_groups_of_one_name_do_not_meet(ranks: RankPool) -> None:
    """As split_group of torch 2.6 names them, and as names come again after their groups ended."""
    everyone = ranks.run(4, _namesakes)
    assert everyone == [[[0, 1]] * 3, [[0, 1]] * 3, [[2, 3]] * 3, [[2, 3]] * 3]


def _namesakes(rank: Rank) -> list[list[int]]:
    met = []
    for _ in range(3):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group: Any = groups[rank.rank // 2]
        group._set_group_name("namesake")
        met.append(Communicator(group, Stats()).gather_objects(rank.rank))
    return met


def test_a_failed_connection_names_the_remedy(ranks: RankPool) -> None:
    for rank, message in enumerate(ranks.run(2, _no_connection)):
        assert f"rank {rank} cannot connect" in message and "GLOO_SOCKET_IFNAME" in message


def _no_connection(rank: Rank) -> str:
    failure = RuntimeError("Connection refused")
    with (
        mock.patch.object(comm_module, "_connections", {}),
        mock.patch.object(dist, "ProcessGroupGloo", side_effect=failure),
        pytest.raises(RuntimeError) as error,
    ):
        Communicator(rank.group, Stats())
    return str(error.value)


def test_without_torch_distributed_the_world_is_one_rank() -> None:
    comm = Communicator(None, Stats())
    assert (comm.rank, comm.world_size) == (0, 1)
    assert comm.gather_objects("x") == ["x"]
    with pytest.raises(ValueError, match="mine"):
        comm.raise_everywhere(ValueError("mine"))


def test_a_dead_rank_fails_the_call_with_its_name(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match="rank 1: the process died"):
        ranks.run(2, _die)


def _die(rank: Rank) -> None:
    if rank.rank == 1:
        os._exit(9)
