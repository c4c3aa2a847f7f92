"""Every way to move buckets, with CPU tensors: what NCCL is given, and what goes by way of host
memory, runs on gloo alike."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, RankPool
from training import AWKWARD, assert_close, assert_same_bits, train_ours, train_reference
from transports import WAYS, moving_by

from fusedshard.comm import Communicator
from fusedshard.stats import Stats
from fusedshard.transport import (
    Channel,
    GlooPairs,
    GroupCollectives,
    StagedPairs,
    choose_transport,
)

each_way = pytest.mark.parametrize("way", WAYS)
each_world_size = pytest.mark.parametrize("world_size", [2, 3, 4])
PART = 7


def values(rank: int, world_size: int) -> torch.Tensor:
    """Other integers for every rank and place."""
    return torch.arange(PART * world_size) * 2.0 + 100.0 * rank


@each_way
@each_world_size
def test_collectives(ranks: RankPool, world_size: int, way: str) -> None:
    sent = [values(rank, world_size) for rank in range(world_size)]
    parts = [send.split(PART) for send in sent]
    for rank, got in enumerate(ranks.run(world_size, _collectives, way)):
        assert_same_bits(got["chunks"], [peer[rank] for peer in parts])
        assert_same_bits(got["reduced"], sum(peer[rank] for peer in parts))
        assert_same_bits(got["gathered"], torch.cat([parts[r][r] for r in range(world_size)]))
        assert_same_bits(got["all_reduced"], sum(sent))
        assert_same_bits(got["broadcast"], sent[0])
        assert_same_bits(got["send"], sent[rank])


def _collectives(rank: Rank, way: str) -> dict[str, Any]:
    with moving_by(way):
        comm, device = Communicator(rank.group, Stats()), torch.device("cpu")
        send = values(rank.rank, rank.world_size)
        receive = torch.full((PART * comm.received_chunks(device),), torch.nan)
        chunks, pending = comm.exchange_chunks(send, receive)
        pending.wait()
        got: dict[str, Any] = {"chunks": [chunk.clone() for chunk in chunks]}
        got["reduced"] = torch.full((PART,), torch.nan)
        comm.reduce_scatter(send, got["reduced"]).wait()
        got["gathered"] = torch.full_like(send, torch.nan)
        mine = slice(PART * rank.rank, PART * (rank.rank + 1))
        got["gathered"][mine] = send[mine]
        comm.all_gather_(got["gathered"]).wait()
        got["all_reduced"] = send.clone()
        comm.all_reduce_(got["all_reduced"]).wait()
        got["broadcast"] = send.clone()
        comm.broadcast_(got["broadcast"])
        return {**got, "send": send}


@each_way
@pytest.mark.parametrize("reduction", ["ordered", "backend"])
@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_training_is_the_same_by_every_way(
    ranks: RankPool, mode: str, reduction: str, way: str
) -> None:
    """Several buckets in flight, awkward sizes, eps=1 so that a wrong scale shows."""
    shapes = (*AWKWARD, (40_000,), (70_001,))
    options = {"mode": mode, "reduction": reduction, "bucket_cap_mb": 0.1, "eps": 1.0, "lr": 0.1}
    results = ranks.run(3, _train, way, shapes, options)
    want = train_reference(3, "AdamW", shapes, 4, eps=1.0, lr=0.1)
    for result in results:
        assert_close(result, want)
        assert_same_bits(result, results[0])
    if reduction == "ordered":
        assert_same_bits(results, ranks.run(3, _train, "pairs", shapes, options))


def _train(rank: Rank, way: str, shapes: Any, options: dict[str, Any]) -> Any:
    with moving_by(way):
        return train_ours(rank, "AdamW", shapes, 4, **options)


@pytest.mark.parametrize(
    ("way", "reduction", "calls"),
    [
        ("pairs", "auto", {"all_to_all", "all_gather"}),
        ("collectives", "auto", {"reduce_scatter", "all_gather"}),
        ("collectives", "ordered", {"all_to_all", "all_gather"}),
    ],
)
def test_auto_adds_as_the_transport_is_fast(
    ranks: RankPool, way: str, reduction: str, calls: set[str]
) -> None:
    assert ranks.run(2, _collectives_of_a_step, way, reduction) == [calls] * 2


def _collectives_of_a_step(rank: Rank, way: str, reduction: str) -> set[str]:
    import fusedshard

    with moving_by(way):
        param = torch.nn.Parameter(torch.ones(5))
        optimizer = fusedshard.Adam([param], process_group=rank.group, reduction=reduction)
        optimizer.stats.reset()
        param.grad = torch.ones(5)
        optimizer.step()
        return set(optimizer.stats.calls) - {"status"}


class FakeGroup:
    """A process group as far as the choice of a transport looks at it."""

    def __init__(self, backends: dict[str, str]) -> None:
        self._backends = backends

    def _get_backend(self, device: torch.device) -> Any:
        if device.type not in self._backends:
            raise RuntimeError(f"No backend type associated with device type {device}")
        return mock.Mock(**{"name.return_value": self._backends[device.type]})


@pytest.mark.parametrize(
    ("backends", "device", "chosen"),
    [
        ({"cpu": "gloo", "cuda": "gloo"}, "cpu", GlooPairs),
        ({"cpu": "gloo", "cuda": "gloo"}, "cuda", StagedPairs),
        ({"cpu": "gloo", "cuda": "nccl"}, "cuda", GroupCollectives),
        ({"cuda": "nccl"}, "cuda", GroupCollectives),
        ({"cuda": "nccl"}, "cpu", GlooPairs),
        ({"cpu": "gloo"}, "cuda", StagedPairs),
    ],
)
def test_choice(backends: dict[str, str], device: str, chosen: type) -> None:
    gloo = mock.Mock(**{"rank.return_value": 1, "size.return_value": 2})
    channel = Channel(gloo, 0)
    with (
        mock.patch.object(dist, "get_rank", return_value=1),
        mock.patch.object(dist, "get_world_size", return_value=2),
    ):
        group: Any = FakeGroup(backends)
        transport = choose_transport(group, channel, torch.device(device))
    assert type(transport) is chosen


def test_renamed_functions_are_those_that_do_not_warn(ranks: RankPool) -> None:
    assert ranks.run(2, _warnings) == [[]] * 2


def _warnings(rank: Rank) -> list[str]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _collectives(rank, "collectives")
    return [str(warning.message) for warning in caught]
