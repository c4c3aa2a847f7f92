"""Ways to run backward, on ranks with our optimizer and in one process for torch's.

A scenario is called once a step on every rank. It runs any number of backwards through `Net`, and
leaves gradients that may differ between ranks, or be missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

WIDTH = 24


class Net(torch.nn.Module):
    """Five branches of which a scenario uses some; each is a bucket and more when buckets are
    small."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.first = torch.nn.Linear(WIDTH, WIDTH)
            self.twice = torch.nn.Linear(WIDTH, WIDTH)
            self.norm = torch.nn.LayerNorm(WIDTH)
            self.branch = torch.nn.Linear(WIDTH, WIDTH, bias=False)
            self.last = torch.nn.Linear(WIDTH, 1)

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.twice(torch.relu(self.first(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.branch(self.trunk(x)))


class Turn(NamedTuple):
    """Whose turn it is: a scenario's arguments.

    Attributes:
        no_sync: the optimizer's, or what has no effect.
        zero_grad: the optimizer's.
    """

    net: Net
    rank: int
    step: int
    no_sync: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    zero_grad: Callable[[], None] = lambda: None

    def data(self, number: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10_007 * self.step + 101 * self.rank + number)
        return torch.randn(5, WIDTH, generator=generator)


def trunk(turn: Turn) -> torch.Tensor:
    return turn.net.trunk(turn.data())


def loss(turn: Turn, number: int = 0) -> torch.Tensor:
    return turn.net(turn.data(number)).square().mean()


def everything(turn: Turn) -> None:
    loss(turn).backward()


def accumulated(turn: Turn) -> None:
    for number in range(3):
        with turn.no_sync() if number < 2 else contextlib.nullcontext():
            loss(turn, number).backward()


def synced_each_time(turn: Turn) -> None:
    for number in range(3):
        loss(turn, number).backward()


def never_synced(turn: Turn) -> None:
    with turn.no_sync():
        loss(turn).backward()
        loss(turn, 1).backward()


def synced_then_not(turn: Turn) -> None:
    loss(turn).backward()
    with turn.no_sync():
        loss(turn, 1).backward()


def synced_on_other_ranks_only(turn: Turn) -> None:
    with turn.no_sync() if turn.rank == turn.step % 2 else contextlib.nullcontext():
        loss(turn).backward()


def retained(turn: Turn) -> None:
    value = loss(turn)
    value.backward(retain_graph=True)
    value.backward()


def module_used_twice(turn: Turn) -> None:
    net = turn.net
    net.last(net.twice(torch.relu(net.twice(turn.data())))).mean().backward()


def two_losses_in_other_orders(turn: Turn) -> None:
    net = turn.net
    losses = [net.last(net.first(turn.data())).mean(), net.branch(turn.data(1)).square().mean()]
    for value in losses if turn.rank == 0 else reversed(losses):
        value.backward()


def used_on_one_rank(turn: Turn) -> None:
    """A branch that another rank has at each step; and at every third nobody."""
    hidden = trunk(turn)
    if turn.step % 3 and turn.rank == turn.step % 2:
        hidden = turn.net.branch(hidden)
    turn.net.last(hidden).square().mean().backward()


def used_late(turn: Turn) -> None:
    """The last layer, whose bucket is the first, not before the third step."""
    hidden = turn.net.branch(trunk(turn))
    (turn.net.last(hidden) if turn.step >= 2 else hidden).square().mean().backward()


def nothing_on_one_rank(turn: Turn) -> None:
    if turn.rank != turn.step % 2:
        loss(turn).backward()


def frozen_for_a_while(turn: Turn) -> None:
    turn.net.branch.requires_grad_(turn.step not in (1, 2))
    turn.net.first.requires_grad_(turn.step < 3)
    loss(turn).backward()
    turn.net.branch.requires_grad_(True)


def some_inputs(turn: Turn) -> None:
    """Only the parameters that are named get a gradient."""
    value = loss(turn)
    value.backward(inputs=[turn.net.last.weight, turn.net.first.bias], retain_graph=True)
    value.backward(inputs=[turn.net.branch.weight, turn.net.first.bias])


def checkpointed(turn: Turn, *, reentrant: bool) -> None:
    net = turn.net

    def twice(hidden: torch.Tensor) -> torch.Tensor:
        return net.branch(net.norm(net.twice(hidden)))

    hidden = net.first(turn.data())
    for _ in range(2):
        hidden = checkpoint(twice, hidden, use_reentrant=reentrant)
    net.last(hidden).mean().backward()


def checkpointed_reentrantly(turn: Turn) -> None:
    checkpointed(turn, reentrant=True)


def checkpointed_as_advised(turn: Turn) -> None:
    checkpointed(turn, reentrant=False)


def failed_and_repeated(turn: Turn) -> None:
    """Out of memory in the middle of backward, on one rank; and once more from the beginning."""
    if turn.rank == turn.step % 2:
        hidden = trunk(turn)

        def fail(_: torch.Tensor) -> None:
            raise MemoryError("as if")

        hidden.register_hook(fail)
        with contextlib.suppress(MemoryError):
            turn.net.last(turn.net.branch(hidden)).mean().backward()
        turn.net.zero_grad()
    loss(turn).backward()


def failed_everywhere(turn: Turn) -> None:
    """The same on all ranks at once, with some buckets full."""

    def fail(_: torch.Tensor) -> None:
        raise MemoryError("as if")

    hidden = trunk(turn)
    hidden.register_hook(fail)
    with contextlib.suppress(MemoryError):
        (100 * turn.net.last(turn.net.branch(hidden)).mean()).backward()
    turn.zero_grad()
    loss(turn).backward()


def inside_and_outside_a_checkpoint(turn: Turn) -> None:
    """A weight that has its gradient, and gets another one from a backward within backward."""
    net = turn.net
    hidden = net.first(turn.data())
    hidden = checkpoint(net.branch, hidden, use_reentrant=True)
    net.last(net.branch(hidden)).square().mean().backward()


def thrown_away(turn: Turn) -> None:
    """A backward whose gradients are not used, on all ranks or on one."""
    if turn.step % 2 or turn.rank == 0:
        loss(turn, 7).backward()
        turn.zero_grad()
    loss(turn).backward()


def changed_by_hooks(turn: Turn) -> None:
    """Of the user's, on tensors and after the accumulation."""
    net = turn.net
    handles = [
        net.first.weight.register_hook(lambda grad: grad * 2),
        net.branch.weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1)),
    ]
    loss(turn).backward()
    for handle in handles:
        handle.remove()


def second_order(turn: Turn) -> None:
    """A gradient penalty: autograd.grad touches no p.grad, and backward records itself."""
    net = turn.net
    value = loss(turn)
    (slope,) = torch.autograd.grad(value, net.first.weight, create_graph=True)
    (value + slope.square().mean()).backward(create_graph=True)
    for param in net.parameters():
        if param.grad is not None:
            param.grad.detach_()


SCENARIOS: dict[str, Callable[[Turn], Any]] = {
    function.__name__: function
    for function in (
        everything,
        accumulated,
        synced_each_time,
        never_synced,
        synced_then_not,
        synced_on_other_ranks_only,
        retained,
        module_used_twice,
        two_losses_in_other_orders,
        used_on_one_rank,
        used_late,
        nothing_on_one_rank,
        frozen_for_a_while,
        some_inputs,
        checkpointed_reentrantly,
        checkpointed_as_advised,
        failed_and_repeated,
        failed_everywhere,
        inside_and_outside_a_checkpoint,
        thrown_away,
        changed_by_hooks,
        second_order,
    )
}
