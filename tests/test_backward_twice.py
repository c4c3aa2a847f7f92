"""A backward beside another one, and one after another that went wrong."""

from __future__ import annotations

import threading

import pytest
import torch
from ranks import Rank, RankPool
from scenarios import Net, Turn, loss

import fusedshard


def test_two_threads_run_backward_at_once(ranks: RankPool) -> None:
    """Buckets are sent once, whichever thread fills them; as one after the other."""
    assert ranks.run(2, _two_threads) == [True] * 2


def _two_threads(rank: Rank) -> bool:
    nets = [Net(), Net()]
    pairs = []
    for net in nets:
        optimizer = fusedshard.AdamW(net.parameters(), lr=0.1, eps=1.0, process_group=rank.group)
        pairs.append((net, optimizer))
    for step in range(5):
        for (net, optimizer), at_once in zip(pairs, (True, False), strict=True):
            optimizer.zero_grad()
            losses = [loss(Turn(net, rank.rank, step), number) for number in range(2)]
            threads = [threading.Thread(target=value.backward) for value in losses]
            for thread in threads:
                thread.start()
                if not at_once:
                    thread.join()
            for thread in threads:
                thread.join()
            optimizer.step()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    return True


def test_an_error_of_gradients_that_were_dropped_is_forgotten(ranks: RankPool) -> None:
    assert ranks.run(2, _drop_sparse) == [1.0] * 2


def _drop_sparse(rank: Rank) -> float:
    table = torch.nn.Embedding(20, 8, sparse=True)
    optimizer = fusedshard.AdamW(table.parameters(), process_group=rank.group)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.zero_grad()
    table.sparse = False
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    return float(optimizer.state[table.weight]["step"])
