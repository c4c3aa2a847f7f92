"""What one step does: averaged gradients, fused update, gathered parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from fusedshard import kernels
from fusedshard.agreement import Status, agree
from fusedshard.clipping import (
    norm_of_gradients,
    norm_of_shards,
    scale_pieces,
    shards_found_inf,
)
from fusedshard.comm import Communicator
from fusedshard.flat import BucketMemory
from fusedshard.holdings import Holdings
from fusedshard.options import ParallelOptions
from fusedshard.params import dense_gradient, in_storage_order, store_gradient
from fusedshard.tables import GroupScalars, gradient_addresses, integers


class Averaged(NamedTuple):
    """Gradients that were averaged and not yet used.

    Attributes:
        grads: this rank's own, or in replicated mode the means.
        used: 1 for each parameter that has one on any rank, else 0.
        marks: to see whether they are still what they were.
        factor: one fp64 element on the device that the update multiplies them by, or None.
    """

    grads: list[torch.Tensor | None]
    used: list[int]
    marks: list[tuple[int, int, int]]
    factor: torch.Tensor | None = None


class Engine(Holdings):
    """The machinery below `fusedshard.Adam`, without hyperparameters and torch's bookkeeping.

    All methods that move data between ranks are collective, and say so. None waits for the device,
    but for what gloo exchanges of a GPU.
    """

    def __init__(self, comm: Communicator, options: ParallelOptions) -> None:
        super().__init__(comm, options)
        self._averaged: Averaged | None = None
        self._turn = -1  # of the last agreement

    def forget_gradients(self) -> None:
        """What was averaged is of no use any more."""
        self._averaged = None

    @property
    def was_scaled(self) -> bool:
        """Whether the present gradients were averaged, and then clipped or unscaled."""
        averaged = self._averaged
        return averaged is not None and averaged.factor is not None and not self._changed()

    def average_gradients(
        self,
        groups: Sequence[GroupScalars],
        error: Exception | None = None,
        *,
        scaling: str = "",
        final: bool = False,
    ) -> None:
        """Average the gradients over the ranks, unless they are those averaged last. Collective.

        Args:
            groups: hyperparameters of each param group.
            error: what is wrong on this rank already.
            scaling: as in `agreement.Status`.
            final: whether the update comes next, so that clipping cannot be repeated.

        Raises:
            RuntimeError: on every rank, with nothing changed, if one of them has an error, or
                the ranks' hyperparameters differ, or gradients that are averaged already are
                there on some ranks only, or gradients changed after they were clipped. TypeError,
                ValueError: likewise, if a parameter that was frozen cannot be trained here.
        """
        grads: list[torch.Tensor | None] = [None] * len(self.params)
        if error is None:
            try:
                labelled = zip(self._labels, self.params, strict=True)
                grads = [dense_gradient(label, param) for label, param in labelled]
            except Exception as caught:  # the other ranks must learn of it
                error = caught
        changed = self._changed()
        if final and changed and self._averaged and self._averaged.factor is not None:
            error = error or RuntimeError(
                "gradients: changed after clip_grad_norm_ or unscale_: call these after the last "
                "backward(), and optimizer.zero_grad() where a step is left out"
            )
        present = [grad is not None for grad in grads]
        self._turn += 1
        agreed = agree(self.comm, Status(error, groups, self._turn, scaling, present, changed))
        if not agreed.changed:
            return
        if agreed.partly and not self._reduces:
            raise RuntimeError(
                f"{self._labels[agreed.partly[0]]}: got a gradient on some ranks only, but "
                'grad_sync="external" wants averaged ones, which are on every rank'
            )
        used = agreed.used
        self._adopt_later([index for index, is_used in enumerate(used) if is_used])
        if self._reduces:
            with self.comm.stats.phase("exchange"):
                self._reduce(grads, used)
        # With the update next nobody asks whether they change.
        self._averaged = Averaged(grads, used, [] if final else self._marks())

    def _changed(self) -> bool:
        return self._averaged is None or self._averaged.marks != self._marks()

    def _marks(self) -> list[tuple[int, int, int]]:
        """What tells whether a gradient is still the one it was."""
        return [_mark(param.grad) for param in self.params]

    def gradient_norm(self, norm_type: float, params: Collection[int] | None) -> torch.Tensor:
        """Norm of the averaged gradient (of some parameters), as far as it was scaled: fp64, on
        the device. Collective in sharded mode."""
        averaged = self.averaged
        if self._reads_shards:
            buckets = self._used_buckets(averaged.used)
            norm = norm_of_shards(buckets, params, norm_type, self.comm)
            norm = norm * self._reducer.shard_scale
        else:
            norm = norm_of_gradients(averaged.grads, params, norm_type)
        norm = norm.to(self.device or kernels.CPU)
        return norm if averaged.factor is None else norm * averaged.factor

    def scale_gradients(self, factor: torch.Tensor, params: Collection[int] | None) -> None:
        """Multiply the averaged gradients: all of them by way of the next update, or some at
        once."""
        averaged = self.averaged
        if params is None:
            product = factor if averaged.factor is None else averaged.factor * factor
            self._averaged = averaged._replace(factor=product)
        elif self._reads_shards:
            scale_pieces(self._used_buckets(averaged.used), params, factor)
        else:
            for index in params:
                grad = averaged.grads[index]
                if grad is not None:
                    grad.mul_(factor.to(grad.dtype))
            self._averaged = averaged._replace(marks=self._marks())

    @property
    def averaged(self) -> Averaged:
        """What `average_gradients` has left."""
        assert self._averaged is not None
        return self._averaged

    def check_finite(self, found_inf: torch.Tensor) -> None:
        """Set ``found_inf`` (one fp32 element) on every rank to 1 where the averaged gradient of
        any is not finite. Collective in sharded mode."""
        averaged = self.averaged
        if self._reads_shards:
            shards_found_inf(self._used_buckets(averaged.used), found_inf, self.comm)
        else:
            for grad in averaged.grads:
                if grad is not None:
                    kernels.found_inf_(found_inf, in_storage_order(grad))

    def update(
        self, groups: Sequence[GroupScalars], found_inf: torch.Tensor | None = None
    ) -> list[int]:
        """Update what this rank owns of the used parameters, by the averaged gradients, and
        gather the rest. Collective.

        Args:
            groups: hyperparameters of each param group.
            found_inf: one fp32 element on the device; unless 0, nothing is updated or counted.

        Returns:
            1 for each used parameter, 0 for each other.
        """
        grads, used, _, factor = self.averaged
        self._make_room_for_amsgrad([group.amsgrad for group in groups])
        with self.comm.stats.phase("update"):
            if not self._reads_shards:
                self._tables.point_at_params(gradient_addresses(grads))
            self._tables.set_used(integers(used))
            self._tables.set_groups(groups)
            self._tables.upload()
        grad_scale: float | torch.Tensor = self._reducer.shard_scale if self._reads_shards else 1.0
        if factor is not None:
            grad_scale = factor * grad_scale
        pending = []
        for bucket in self._used_buckets(used):
            with self.comm.stats.phase("update"):
                kernels.adam_(bucket.state, bucket.table, self.steps, grad_scale, found_inf)
            if self.holds_shards:
                pending.append(self.comm.all_gather_(bucket.param))
        used_on_device = self._tables.device_used
        kernels.count_steps_(self.steps, self.step_mirror, used_on_device, found_inf)
        with self.comm.stats.phase("gather"):
            for gather in pending:
                gather.wait()
        # The kernels wrote through raw pointers, which autograd does not see.
        changed = [self.params[index] for index, is_used in enumerate(used) if is_used]
        torch.autograd.graph.increment_version(changed)
        self._averaged = None
        return used

    def _reduce(self, grads: list[torch.Tensor | None], used: Sequence[int]) -> None:
        """Average in place, in replicated mode, or into this rank's shards. Collective."""
        buckets = self._used_buckets(used)
        if not self._sharded:
            self._separate(grads, used)
        self._packing.point_at_params(gradient_addresses(grads))
        self._packing.upload()
        if self._sharded:
            self._reducer.reduce_to_shards(buckets)
            return
        self._reducer.reduce_in_place(buckets)
        for param, grad in zip(self.params, grads, strict=True):
            if grad is not None and grad is not param.grad:
                store_gradient(param, grad)

    def _separate(self, grads: list[torch.Tensor | None], used: Sequence[int]) -> None:
        """Memory for the mean of each used parameter: where this rank has no gradient, or two
        parameters have one tensor as theirs."""
        owners = Counter(grad.untyped_storage().data_ptr() for grad in grads if grad is not None)
        for index, param in enumerate(self.params):
            grad = grads[index]
            if grad is None:
                grads[index] = torch.zeros_like(param) if used[index] else None
            elif owners[grad.untyped_storage().data_ptr()] > 1:
                grads[index] = grad.clone()

    def _used_buckets(self, used: Sequence[int]) -> list[BucketMemory]:
        """The buckets that hold a used parameter, in the order of exchange."""
        return [
            bucket
            for flat in self._flats
            for bucket in flat.buckets
            if any(used[segment.param] for segment in bucket.segments)
        ]


def _mark(grad: torch.Tensor | None) -> tuple[int, int, int]:
    if grad is None:
        return 0, 0, 0
    # Tensors of inference mode count no versions.
    return id(grad), grad.data_ptr(), -1 if grad.is_inference() else grad._version
