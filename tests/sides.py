"""A job run twice: by our optimizer on every rank, and by torch's in one process on the means.

A job is a module-level function of a `Side`; what it does is the same on both sides, and it returns
the side's `outcome` as often as there is something to compare.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ranks import Rank, RankPool
from training import (
    Shapes,
    Variant,
    assert_close,
    assert_same_bits,
    backward,
    gradient,
    make_params,
    mean_gradient,
)

Params = Sequence[torch.nn.Parameter]
Outcome = tuple[list[torch.Tensor], dict[str, Any]]
EXTERNAL = "external"
# With eps=1 a wrong scale of the gradients shows, which Adam would else divide away.
HYPER: dict[str, Any] = {"lr": 0.1, "eps": 1.0, "weight_decay": 0.1}


@dataclass(frozen=True)
class Side:
    """What differs between a rank and the reference.

    Attributes:
        variant: the optimizer under test.
        world_size: the ranks whose gradients are averaged.
        rank: where this is one of them, and has a process group; None: the reference, or the only
            rank.
        ours: whether this is our side.
    """

    variant: Variant
    world_size: int
    rank: Rank | None
    ours: bool

    @property
    def number(self) -> int:
        return 0 if self.rank is None else self.rank.rank

    def build(self, params: Any, **options: Any) -> Any:
        """Our optimizer, or torch's, without the options that it does not know."""
        if self.ours:
            return self.variant.ours(params, self.rank, **options)
        known = {k: v for k, v in options.items() if k not in ("bucket_cap_mb", "reduction")}
        return self.variant.torchs(params, **known)

    def params(
        self, shapes: Shapes, dtype: torch.dtype = torch.float32
    ) -> list[torch.nn.Parameter]:
        """Other values on each rank, of which the first one's must win."""
        return make_params(shapes, seed=self.number, dtype=dtype)

    def own(self, of_ranks: Sequence[float]) -> float:
        """This rank's of one value a rank, or their mean."""
        if self.ours and self.variant.grad_sync != EXTERNAL:
            return of_ranks[self.number]
        return sum(of_ranks) / len(of_ranks)

    def gradient(self, param: torch.Tensor, step: int, index: int) -> torch.Tensor:
        """A gradient that differs between steps, parameters and ranks, or the mean over ranks."""
        if self.ours and self.variant.grad_sync != EXTERNAL:
            return gradient(param, step, index, self.number)
        return mean_gradient(param, step, index, self.world_size)

    def partial_gradient(
        self, param: torch.Tensor, step: int, index: int, users: Collection[int]
    ) -> torch.Tensor | None:
        """The same where only the ranks in ``users`` have one, and the others count as zero."""
        if self.ours:
            return gradient(param, step, index, self.number) if self.number in users else None
        total = sum(gradient(param, step, index, rank) for rank in users)
        return total / self.world_size if isinstance(total, torch.Tensor) else None

    def backward(self, params: Params, step: int, absent: Collection[int] = ()) -> None:
        """Add such gradients to all parameters but ``absent`` ones."""
        grads = [None if i in absent else self.gradient(p, step, i) for i, p in enumerate(params)]
        backward(params, grads)

    def loss(self, of_rank: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """This rank's loss, or the mean over ranks."""
        if self.ours:
            return of_rank(self.number)
        return torch.stack([of_rank(rank) for rank in range(self.world_size)]).mean()

    def descend(self, of_rank: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """The same, and its backward."""
        loss = self.loss(of_rank)
        loss.backward()
        return loss

    def clip(
        self,
        optimizer: Any,
        params: Params,
        max_norm: float,
        norm_type: float = 2.0,
        chosen: Collection[int] | None = None,
    ) -> torch.Tensor:
        """Clip the gradients of all parameters, or of chosen ones; the norm, of the reference in
        fp64."""
        some = params if chosen is None else [params[index] for index in chosen]
        if self.ours:
            parameters = None if chosen is None else some
            norm: torch.Tensor = optimizer.clip_grad_norm_(
                max_norm, norm_type, parameters=parameters
            )
            return norm
        # torch has no infinity norm of an empty tensor, and its sum in fp32 is not good to 1e-6.
        some = [param for param in some if param.numel()]
        grads = [param.grad.double().flatten() for param in some if param.grad is not None]
        exact = torch.linalg.vector_norm(torch.cat([torch.zeros(1).double(), *grads]), norm_type)
        torch.nn.utils.clip_grad_norm_(some, max_norm, norm_type)
        return exact

    def full_state(self, optimizer: Any) -> dict[str, Any]:
        """A copy of the state that `load_state_dict` takes."""
        state: dict[str, Any] = (
            optimizer.full_state_dict() if self.ours else copy.deepcopy(optimizer.state_dict())
        )
        return state

    def outcome(self, optimizer: Any) -> Outcome:
        """Copies of the parameters, and the whole state."""
        params = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
        return params, self.full_state(optimizer)


Job = Callable[..., list[Any]]


def check_against_torch(
    ranks: RankPool,
    world_size: int,
    variant: Variant,
    job: Job,
    *args: Any,
    tolerance: float = 1e-6,
) -> list[Any]:
    """Outcomes of ``job`` on the first rank, once they are known to have the same bits on every
    rank, and to be torch's within ``tolerance``.

    A world of one rank is this process, without a group of ranks.
    """
    if world_size == 1:
        results = [job(Side(variant, 1, None, ours=True), *args)]
    else:
        results = ranks.run(world_size, on_rank, variant, job, *args)
    for result in results:
        assert_same_bits(result, results[0])
    compare(results[0], job(Side(variant, world_size, None, ours=False), *args), tolerance)
    outcomes: list[Any] = results[0]
    return outcomes


def on_rank(rank: Rank, variant: Variant, job: Job, *args: Any) -> list[Any]:
    """``job`` on this rank."""
    return job(Side(variant, rank.world_size, rank, ours=True), *args)


def compare(ours: list[Any], reference: list[Any], tolerance: float = 1e-6) -> None:
    """Outcomes within ``tolerance``; other tensors, as norms, relative to their size."""
    for our, their in zip(ours, reference, strict=True):
        if isinstance(their, tuple):
            assert_close(our, their, tolerance)
        else:
            torch.testing.assert_close(our, their, rtol=tolerance, atol=0, check_dtype=False)
