"""Small jobs for multi-rank tests: the same gradients for ours and for the torch reference."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import Rank

import fusedshard

Shapes = Sequence[tuple[int, ...]]
# One element, a vector shorter than a SIMD register, odd sizes, empty, 0-dim.
AWKWARD: Shapes = [(1,), (7,), (17, 257), (0,), (3, 5), (), (2, 3, 4)]

KINDS = ("Adam", "AdamW")
MODES = ("sharded", "replicated")
# Ways to average the gradients of an unwrapped model.
GRAD_SYNCS = ("backward", "step")


class Variant(NamedTuple):
    """One of the ways in which every case has to work."""

    kind: str
    mode: str
    grad_sync: str

    def ours(self, params: Any, rank: Rank | None = None, **options: Any) -> fusedshard.Adam:
        """Our optimizer on the ranks of ``rank``, or without torch.distributed."""
        options = {"mode": self.mode, "grad_sync": self.grad_sync, **options}
        group = None if rank is None else rank.group
        optimizer: fusedshard.Adam = getattr(fusedshard, self.kind)(
            params, process_group=group, **options
        )
        return optimizer

    def torchs(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        """torch's optimizer of this kind."""
        optimizer: torch.optim.Optimizer = getattr(torch.optim, self.kind)(params, **options)
        return optimizer


def variants(grad_syncs: Sequence[str]) -> list[Variant]:
    """Every two of a kind, a mode and one of these ``grad_sync`` meet in one of them: the three
    have nothing to do with each other."""
    if len(grad_syncs) == 1:
        return [Variant(*parts) for parts in itertools.product(KINDS, MODES, grad_syncs)]
    return [
        Variant(KINDS[(row + column + 1) % 2], mode, grad_sync)
        for row, grad_sync in enumerate(grad_syncs)
        for column, mode in enumerate(MODES)
    ]


def parametrized(grad_syncs: Sequence[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("variant", variants(grad_syncs), ids="-".join)


def variants_on(world_size: int, *others: int) -> list[tuple[int, Variant]]:
    """Each variant on so many ranks, and on other numbers of ranks those of one kind, which have
    both modes and both grad_syncs."""
    every = variants(GRAD_SYNCS)
    cases = [(world_size, variant) for variant in every]
    for index, other in enumerate(others):
        kind = KINDS[(index + 1) % 2]
        cases += [(other, variant) for variant in every if variant.kind == kind]
    return cases


def each_variant_on(world_size: int, *others: int) -> pytest.MarkDecorator:
    cases = variants_on(world_size, *others)
    ids = ["-".join([str(size), *variant]) for size, variant in cases]
    return pytest.mark.parametrize(("world_size", "variant"), cases, ids=ids)


each_variant = parametrized(GRAD_SYNCS)
# Where gradients are assigned by hand, or their averaging is of no account.
each_kind_and_mode = parametrized(["step"])
each_external_variant = parametrized(["external"])
PATIENCE = 3.0  # seconds, of a group whose ranks may fail


def make_params(
    shapes: Shapes, seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in shapes]


def gradient(param: torch.Tensor, step: int, index: int, rank: int) -> torch.Tensor:
    """A gradient that differs for every step, parameter and rank."""
    generator = torch.Generator().manual_seed(1_000_003 * step + 1009 * index + rank)
    return torch.randn(param.shape, generator=generator, dtype=param.dtype)


def mean_gradient(param: torch.Tensor, step: int, index: int, world_size: int) -> torch.Tensor:
    """The mean over ranks, added in rank order and divided once."""
    total = gradient(param, step, index, 0)
    for rank in range(1, world_size):
        total = total + gradient(param, step, index, rank)
    return total / world_size


def stored_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Of their storages, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class Factor(torch.nn.Module):
    """Weights whose gradient is the input."""

    def __init__(self, numel: int = 1) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(numel))

    def forward(self, x: float | torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def backward(
    params: Sequence[torch.nn.Parameter], grads: Sequence[torch.Tensor | None], scale: Any = 1.0
) -> None:
    """A backward pass that adds these gradients, times ``scale``, to those of the parameters, and
    nothing where one is None."""
    pairs = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
    if pairs:
        roots, values = zip(*pairs, strict=True)
        torch.autograd.backward(roots, [value * scale for value in values])


def train(
    optimizer: torch.optim.Optimizer,
    params: Sequence[torch.nn.Parameter],
    steps: range,
    grad: Callable[[torch.Tensor, int, int], torch.Tensor | None],
) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(params, [grad(param, step, index) for index, param in enumerate(params)])
        optimizer.step()


def train_ours(
    rank: Rank,
    kind: str,
    shapes: Shapes,
    steps: int,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Parameters and full state after ``steps`` steps on this rank's own gradients."""
    params = make_params(shapes, seed=rank.rank, dtype=dtype)  # rank 0's must win
    optimizer = getattr(fusedshard, kind)(params, process_group=rank.group, **options)
    train(optimizer, params, range(steps), lambda p, t, i: gradient(p, t, i, rank.rank))
    return [p.detach().clone() for p in params], optimizer.full_state_dict()


def train_reference(
    world_size: int,
    kind: str,
    shapes: Shapes,
    steps: int,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The same in one process, with torch.optim and the mean gradients."""
    params = make_params(shapes, dtype=dtype)
    optimizer = getattr(torch.optim, kind)(params, **options)
    train(optimizer, params, range(steps), lambda p, t, i: mean_gradient(p, t, i, world_size))
    return [p.detach() for p in params], optimizer.state_dict()


class Job:
    """Training on one rank, which can be compared with what it was."""

    SHAPES: ClassVar[Shapes] = [(17, 257), (5,)]
    OPTIONS: ClassVar[dict[str, Any]] = {"lr": 0.1, "eps": 1.0}

    def __init__(self, rank: Rank, mode: str, group: Any = None) -> None:
        self.rank, self.group = rank, group or rank.group
        self.params = make_params(self.SHAPES)
        self.optimizer = fusedshard.AdamW(
            self.params, mode=mode, process_group=self.group, **self.OPTIONS
        )

    def gradients(self, step: int) -> None:
        for param in self.params:
            param.grad = None
        own = [gradient(p, step, index, self.rank.rank) for index, p in enumerate(self.params)]
        backward(self.params, own)

    def steps(self, which: range) -> None:
        for step in which:
            self.gradients(step)
            self.optimizer.step()

    @classmethod
    def reference(cls, world_size: int, steps: int) -> Any:
        """What `whole` should give after ``steps`` steps."""
        return train_reference(world_size, "AdamW", cls.SHAPES, steps, **cls.OPTIONS)

    def local(self) -> Any:
        """Copies of all that this rank holds, without communication."""
        states = [dict(state) for state in self.optimizer.state.values()]
        moments = [{name: value.clone() for name, value in state.items()} for state in states]
        return [p.detach().clone() for p in self.params], moments

    def whole(self) -> Any:
        state = self.optimizer.full_state_dict()
        return [p.detach().clone() for p in self.params], state


def impatient(size: int) -> Any:
    """A group of the first ranks that waits for none longer than `PATIENCE`."""
    return dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=PATIENCE))


def assert_same_bits(a: Any, b: Any, what: str = "value") -> None:
    """Equal to the bit, through lists and dicts of tensors."""
    if isinstance(a, torch.Tensor):
        assert a.shape == b.shape and a.dtype == b.dtype, what
        assert torch.equal(a, b), f"{what}: differs by {(a - b).abs().max()}"
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), f"{what}: {a.keys()} against {b.keys()}"
        for key in a:
            assert_same_bits(a[key], b[key], f"{what}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), what
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same_bits(x, y, f"{what}[{index}]")
    else:
        assert a == b, f"{what}: {a!r} against {b!r}"


def assert_close(
    ours: tuple[list[torch.Tensor], dict[str, Any]],
    reference: tuple[list[torch.Tensor], dict[str, Any]],
    tolerance: float = 1e-6,
) -> None:
    """Parameters and moments within ``tolerance``, steps equal."""
    for index, (a, b) in enumerate(zip(ours[0], reference[0], strict=True)):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=f"parameter {index}")
    states, expected = ours[1]["state"], reference[1]["state"]
    assert states.keys() == expected.keys()
    for index, state in states.items():
        for name, value in expected[index].items():
            torch.testing.assert_close(
                state[name],
                value,
                rtol=0,
                atol=0 if name == "step" else tolerance,
                check_dtype=name != "step",
                msg=f"{name} of parameter {index}",
            )
