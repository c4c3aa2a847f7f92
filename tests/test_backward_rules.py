"""What holds between backward and step: p.grad, edits of it, and who may be waiting for whom."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, RankPool
from scenarios import WIDTH, Net, Turn, loss
from torch.nn.parallel import DistributedDataParallel
from training import assert_same_bits, backward, make_params

import fusedshard
from fusedshard import exchange

MODES = ("sharded", "replicated")
each_mode = pytest.mark.parametrize("mode", MODES)


def make(rank: Rank, params: Any, mode: str, **options: Any) -> fusedshard.AdamW:
    hyper = {"lr": 0.1, "eps": 1.0, **options}
    return fusedshard.AdamW(params, process_group=rank.group, mode=mode, **hyper)


def test_the_first_bucket_is_sent_while_backward_goes_on(ranks: RankPool) -> None:
    """Two layers of a bucket each: the second's is on its way when backward reaches the first."""
    assert ranks.run(2, _count_exchanges) == [[0, 1, 2]] * 2


def _count_exchanges(rank: Rank) -> list[int]:
    layers = [torch.nn.Linear(300, 300, bias=False) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    optimizer = make(rank, model.parameters(), "sharded", bucket_cap_mb=0.3)
    counts = []

    def count(*_: Any) -> None:
        counts.append(optimizer.stats.calls["all_to_all"])

    hidden = layers[0](torch.randn(2, 300))
    hidden.register_hook(count)  # when layers[1] is done, and layers[0] not begun
    value = layers[1](hidden).sum()
    optimizer.stats.reset()
    count()
    value.backward()
    optimizer.step()
    count()
    assert len(optimizer.stats.exchanges) == 2
    assert all(started <= arrived for started, arrived in optimizer.stats.exchanges)
    return counts


@each_mode
def test_what_p_grad_holds_after_backward(ranks: RankPool, mode: str) -> None:
    """In replicated mode the mean, as under DDP, also where only another rank has a gradient; and
    nothing where none has."""
    for rank, grads in enumerate(ranks.run(2, _gradients_after_backward, mode)):
        own = [[1.0 + rank] * 3, [7.0] * 3 if rank else None, None]
        assert grads == (own if mode == "sharded" else [[1.5] * 3, [3.5] * 3, None])


def _gradients_after_backward(rank: Rank, mode: str) -> list[list[float] | None]:
    params = make_params([(3,)] * 3)
    optimizer = make(rank, params, mode)
    backward(
        params,
        [torch.full((3,), 1.0 + rank.rank), torch.full((3,), 7.0) if rank.rank else None, None],
    )
    grads = [None if p.grad is None else p.grad.tolist() for p in params]
    optimizer.step()
    assert params[2] not in optimizer.state
    return grads


EDITS: dict[str, Any] = {
    "clipped by torch": lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.01),
    "halved": lambda ps: ps[1].grad.mul_(0.5),
    "a row zeroed": lambda ps: ps[1].grad[0].zero_(),
    "replaced": lambda ps: setattr(ps[1], "grad", ps[1].grad * 3),
}


@pytest.mark.parametrize("edit", EDITS)
def test_lif_12_edits_after_sharded_backward_raise_everywhere(ranks: RankPool, edit: str) -> None:
    """On one rank suffices; all name the parameter and the remedy, and go on after zero_grad."""
    for rank, (text, same, recovered) in enumerate(ranks.run(3, _edit_late, edit)):
        assert text.startswith("" if rank == 1 else "on rank 1: ")
        assert "parameter " in text and "optimizer.clip_grad_norm_" in text
        assert 'grad_sync="step"' in text and same and recovered


def _edit_late(rank: Rank, edit: str) -> tuple[str, bool, bool]:
    params, twins = (make_params([(4, 5), (6, 2)]) for _ in range(2))
    optimizer, twin = (make(rank, ps, "sharded") for ps in (params, twins))
    grads = [torch.full_like(p, 1.0 + rank.rank + i) for i, p in enumerate(params)]
    before = [p.detach().clone() for p in params]
    backward(params, grads)
    if rank.rank == 1:
        EDITS[edit](params)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    same = all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    same = same and not optimizer.state
    optimizer.zero_grad()
    for ps, chosen in ((params, optimizer), (twins, twin)):
        backward(ps, grads)
        chosen.step()
    recovered = all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))
    return str(caught.value), same, recovered


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(("mode", "grad_sync"), [("replicated", "backward"), ("sharded", "step")])
def test_lif_12_edits_are_honoured_elsewhere(
    ranks: RankPool, mode: str, grad_sync: str, edit: str
) -> None:
    results = ranks.run(2, _edit_and_step, mode, grad_sync, edit)
    params = make_params([(4, 5), (6, 2)])
    optimizer = torch.optim.AdamW(params, lr=0.1, eps=1.0)
    edited = []
    for rank in range(2):
        for index, param in enumerate(params):
            mean, own = 1.5 + index, 1.0 + rank + index
            param.grad = torch.full_like(param, mean if mode == "replicated" else own)
        EDITS[edit](params)
        edited.append([param.grad.clone() for param in params if param.grad is not None])
    for param, first, second in zip(params, *edited, strict=True):
        param.grad = (first + second) / 2
    optimizer.step()
    for ours in results:
        assert_same_bits(ours, results[0])
        for a, b in zip(ours, params, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=0, atol=1e-6)


def _edit_and_step(rank: Rank, mode: str, grad_sync: str, edit: str) -> list[torch.Tensor]:
    params = make_params([(4, 5), (6, 2)])
    optimizer = make(rank, params, mode, grad_sync=grad_sync)
    backward(params, [torch.full_like(p, 1.0 + rank.rank + i) for i, p in enumerate(params)])
    EDITS[edit](params)
    optimizer.step()
    return [p.detach() for p in params]


def test_users_hooks_behind_ours_count_in_replicated_mode(ranks: RankPool) -> None:
    for grads in ranks.run(2, _hooks_behind_ours):
        assert grads == [15.0] * 6


def _hooks_behind_ours(rank: Rank) -> list[float]:
    params = make_params([(8, 8)] * 6)
    optimizer = make(rank, params, "replicated")

    def scale(param: Any) -> None:
        param.grad.mul_(10.0)

    for param in params:
        param.register_post_accumulate_grad_hook(scale)
    backward(params, [torch.full_like(p, 1.0 + rank.rank) for p in params])
    grads = [p.grad[0, 0].item() for p in params if p.grad is not None]
    optimizer.step()
    return grads


def test_a_new_tensor_is_not_taken_for_an_old_one() -> None:
    """Though it may get its number and its memory."""
    for numel in (40, 200, 1000):
        grad = torch.ones(numel)
        mark = exchange.mark_of(grad)
        assert exchange.is_marked(mark, grad)
        for _ in range(3):
            grad = grad * 0.1
            assert not exchange.is_marked(mark, grad)


@each_mode
def test_a_compiled_training_step(ranks: RankPool, mode: str) -> None:
    """With backward and step inside the function that is compiled."""
    assert ranks.run(2, _compiled_step, mode) == [True] * 2


def _compiled_step(rank: Rank, mode: str) -> bool:
    nets = [Net(), Net()]
    optimizers = [make(rank, net.parameters(), mode) for net in nets]

    def train(x: torch.Tensor, net: Net, optimizer: torch.optim.Optimizer) -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    compiled = torch.compile(train, backend="eager")
    for step in range(3):
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(7 * step + rank.rank))
        compiled(x, nets[0], optimizers[0])
        train(x, nets[1], optimizers[1])
    pairs = zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


EXIT = """
import os, sys, torch, torch.distributed as dist, fusedshard
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
model = torch.nn.Sequential(*[torch.nn.Linear(400, 400) for _ in range(4)])
optimizer = fusedshard.AdamW(model.parameters(), bucket_cap_mb=0.5)
model(torch.ones(2, 400)).sum().backward()
assert optimizer.stats.calls["all_to_all"] > 0
"""


def test_a_process_may_end_with_an_exchange_on_its_way(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    processes = [
        subprocess.Popen([sys.executable, "-c", EXIT, str(rank), store]) for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]


def test_a_gradient_taken_away_counts_as_none(ranks: RankPool) -> None:
    assert ranks.run(2, _take_away) == [(True, [1.0, 1.5])] * 2


def _take_away(rank: Rank) -> tuple[bool, list[float]]:
    """By all ranks the first, by rank 1 the second."""
    params = make_params([(2,), (2,)])
    before = params[0].detach().clone()
    optimizer = make(rank, params, "sharded")
    backward(params, [torch.ones(2), torch.full((2,), 3.0)])
    params[0].grad = None
    if rank.rank == 1:
        params[1].grad = None
    optimizer.step()
    untouched = torch.equal(params[0], before) and params[0] not in optimizer.state
    state = optimizer.full_state_dict()["state"][1]
    return untouched, [state["step"].item(), round(state["exp_avg"][0].item() * 10, 5)]


@each_mode
def test_two_optimizers_in_one_backward(ranks: RankPool, mode: str) -> None:
    """Whose buckets fill in another order on each rank, and interleave."""
    assert ranks.run(3, _two_optimizers, mode) == [[2.0, 20.0]] * 3


def _two_optimizers(rank: Rank, mode: str) -> list[float]:
    groups = [make_params([(200, 200)] * 3) for _ in range(2)]
    optimizers = [make(rank, params, mode, bucket_cap_mb=0.1) for params in groups]
    value = 1.0 + rank.rank
    grads = [[torch.full_like(p, scale * value) for p in groups[0]] for scale in (1.0, 10.0)]
    order = [(i, j) for j in range(3) for i in ((0, 1) if rank.rank else (1, 0))]
    backward([groups[i][j] for i, j in order], [grads[i][j] for i, j in order])
    for optimizer in optimizers:
        optimizer.step()
    states = [optimizer.full_state_dict()["state"] for optimizer in optimizers]
    return [round(state[2]["exp_avg"][7, 7].item() * 10, 4) for state in states]


def test_collectives_of_the_users_inside_backward(ranks: RankPool) -> None:
    """One rank waits in such a collective while another, whose first buckets are full, must not
    wait for it."""
    assert ranks.run(2, _users_collectives) == [True] * 2


class AllReduceInBackward(torch.autograd.Function):
    """As a SyncBatchNorm has one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _users_collectives(rank: Rank) -> bool:
    params = make_params([(200, 200)] * 6)
    optimizer = make(rank, params, "sharded", bucket_cap_mb=0.1)
    for step in range(3):
        optimizer.zero_grad()
        total: torch.Tensor = params[0].sum()
        total = AllReduceInBackward.apply(total, rank.group)
        # The last parameters fill the first buckets; rank 1 does not use the very last.
        for param in params[1 : 6 - rank.rank]:
            total = total + param.sum()
        total.backward()
        users = torch.tensor([float(step)])
        dist.all_reduce(users, group=rank.group)
        assert users.item() == 2 * step
        optimizer.step()
    state = optimizer.full_state_dict()["state"]
    return state[5]["exp_avg"][0, 0].item() == pytest.approx(0.5 * (1 - 0.9**3)) and state[0][
        "exp_avg"
    ][0, 0].item() == pytest.approx(2 * (1 - 0.9**3))


@each_mode
@pytest.mark.parametrize("as_view", [False, True])
def test_ddp_and_external_forgotten_is_still_the_mean(
    ranks: RankPool, mode: str, as_view: bool
) -> None:
    want = ranks.run(2, _under_ddp, mode, "external", as_view)
    for (params, texts), (expected, quiet) in zip(
        ranks.run(2, _under_ddp, mode, "backward", as_view), want, strict=True
    ):
        for a, b in zip(params, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        assert len(texts) == 1 and 'grad_sync="external"' in texts[0] and not quiet


def _under_ddp(rank: Rank, mode: str, grad_sync: str, as_view: bool) -> Any:
    net = Net()
    optimizer = make(rank, net.parameters(), mode, grad_sync=grad_sync)
    model = DistributedDataParallel(
        net, process_group=rank.group, gradient_as_bucket_view=as_view, bucket_cap_mb=0.001
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            optimizer.zero_grad()
            data = torch.randn(
                5, WIDTH, generator=torch.Generator().manual_seed(7 * step + rank.rank)
            )
            model(data).square().mean().backward()
            optimizer.step()
    texts = [str(w.message) for w in caught if "DistributedDataParallel" in str(w.message)]
    return [p.detach() for p in net.parameters()], texts


@each_mode
def test_nothing_outlives_the_optimizer(ranks: RankPool, mode: str) -> None:
    """Neither hooks nor threads; and its parameters serve the next one."""
    assert ranks.run(2, _rebuild, mode) == [(0, True)] * 2


def _rebuild(rank: Rank, mode: str) -> tuple[int, bool]:
    net = Net()
    first = make(rank, net.parameters(), mode)
    loss(Turn(net, rank.rank, 0)).backward()
    first.step()
    dead = weakref.ref(first)
    second = make(rank, net.parameters(), mode)  # while the first still hears of gradients
    net.zero_grad()
    loss(Turn(net, rank.rank, 1)).backward()
    second.step()
    sent = first.stats.calls["all_to_all"]
    del first
    gc.collect()
    hooks: Any = net.first.weight._post_accumulate_grad_hooks
    return len(hooks) - 1, dead() is None and sent == 1


def test_unequal_backwards_in_replicated_mode_are_told(ranks: RankPool) -> None:
    """As all ranks' p.grad becomes the mean when it ends, one may not run it more often."""
    for text in ranks.run(2, _unequal):
        assert "backward on rank 0, step on rank 1" in text


def _unequal(rank: Rank) -> str:
    (param,) = make_params([(3,)])
    optimizer = make(rank, [param], "replicated")
    for _ in range(2 - rank.rank):
        backward([param], [torch.ones(3)])
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


def test_no_sync_means_nothing_elsewhere() -> None:
    """At world size 1, and it can be nested and left by an exception."""
    (param,) = make_params([(3,)])
    optimizer = fusedshard.AdamW([param])
    with pytest.raises(KeyError), optimizer.no_sync(), optimizer.no_sync():
        raise KeyError
    param.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[param]["step"] == 1
