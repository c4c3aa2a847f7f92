"""What one step does: averaged gradients, fused update, gathered parameters."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from fusedshard import kernels
from fusedshard.agreement import Agreement, Status, agree
from fusedshard.backward import BackwardHooks
from fusedshard.clipping import (
    norm_of_gradients,
    norm_of_shards,
    scale,
    scale_pieces,
    shards_found_inf,
)
from fusedshard.comm import Communicator
from fusedshard.flat import BucketMemory
from fusedshard.holdings import Holdings
from fusedshard.options import ParallelOptions
from fusedshard.params import (
    check_gradient,
    dense_gradient,
    in_storage_order,
    store_gradient,
)
from fusedshard.tables import GroupScalars, gradient_addresses, integers


class Averaged(NamedTuple):
    """Gradients that were averaged and not yet used.

    Attributes:
        grads: the means, unless they are this rank's shards.
        used: 1 for each parameter that has one on any rank, else 0.
        present: for each parameter whether it has a gradient here.
        factor: one fp64 element on the device that the update multiplies them by, or None.
        witness: where they were clipped or unscaled short of ``p.grad``: a parameter, and the
            gradient that it had then, if it has one.
    """

    grads: list[torch.Tensor | None]
    used: list[int]
    present: list[bool]
    factor: torch.Tensor | None = None
    witness: tuple[int, weakref.ref[torch.Tensor]] | None = None


class Engine(Holdings):
    """The machinery below `fusedshard.Adam`, without hyperparameters and torch's bookkeeping.

    All methods that move data between ranks are collective, and say so. None waits for the device,
    but for what gloo exchanges of a GPU.
    """

    def __init__(self, comm: Communicator, options: ParallelOptions) -> None:
        super().__init__(comm, options)
        self._averaged: Averaged | None = None
        self._hooks: BackwardHooks | None = None
        self._turn = -1  # of the last agreement
        self._failure: Exception | None = None  # of one in a backward, known to all ranks

    def _choose_device(self, training: Sequence[torch.Tensor]) -> None:
        super()._choose_device(training)
        if self._hooks is None and self.device is not None and self._exchange.overlapped:
            method = None if self._sharded else weakref.WeakMethod(self._end_backward)
            self._hooks = BackwardHooks(self.comm.number, self._exchange, self.device, method)

    def _make_tables(self) -> None:
        super()._make_tables()
        if self._hooks is not None:
            self._hooks.attach()

    def no_sync(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._hooks is None else self._hooks.no_sync()

    @property
    def has_sent_by_backward(self) -> bool:
        """Whether what backward sends is no more read from ``p.grad``."""
        return self._exchange.overlapped and self._sharded

    def forget_gradients(self) -> None:
        """What was averaged is of no use any more."""
        self._averaged = None
        self._exchange.forget()

    def average_gradients(
        self,
        groups: Sequence[GroupScalars],
        error: Exception | None = None,
        *,
        call: str,
        scaling: str = "",
    ) -> None:
        """Average the gradients over the ranks, unless they are those averaged last. Collective.

        Args:
            groups: hyperparameters of each param group.
            error: what is wrong on this rank already.
            call: the name of the function that all ranks are in.
            scaling: as in `agreement.Status`.

        Raises:
            RuntimeError: on every rank, with nothing changed, if one of them has an error, or
                the ranks' hyperparameters differ, or gradients that are averaged already are
                there on some ranks only, or gradients were edited where that cannot be honoured.
                TypeError, ValueError: likewise, if a parameter that was frozen cannot be trained
                here.
        """
        known, self._failure = self._failure, None
        if known is not None:
            raise known
        failure = self._exchange.complete()
        present = [False] * len(self.params)
        try:
            labelled = zip(self._labels, self.params, strict=True)
            present = [check_gradient(label, param) for label, param in labelled]
        except Exception as caught:  # the other ranks must learn of it
            failure = failure or caught
        outlook = self._exchange.outlook()
        averaged = self._averaged
        changed = averaged is None or outlook.changed or present != averaged.present
        error = error or failure or self._misuse(outlook.edited, changed=changed)
        self._turn += 1
        status = Status(error, call, groups, self._turn, scaling, present, changed, outlook.stale)
        agreed = agree(self.comm, status)
        if agreed.changed:
            self._check_settled(agreed)
            self._average(agreed, used_at_once=call == "step")
        if call != "backward":  # after which nobody can have edited anything
            self._honour_edits()

    def _misuse(self, edited: Sequence[int], *, changed: bool) -> Exception | None:
        """What is wrong with gradients that were changed, where one cannot go by their new values:
        where backward has sent them, or the factor is already chosen that they are to be scaled
        by."""
        if edited:
            return RuntimeError(
                f"{self._labels[edited[0]]}: its gradient was changed after backward had sent it "
                "to be averaged: clip with optimizer.clip_grad_norm_ and scale with "
                "fusedshard.GradScaler (torch's see this rank's gradient alone); "
                'grad_sync="step" takes other edits of it, and grad_sync="external" a model in '
                "DistributedDataParallel"
            )
        if changed and self._averaged is not None and self._averaged.witness is not None:
            index, gradient = self._averaged.witness
            if self.params[index].grad is gradient() is not None:
                return RuntimeError(
                    "gradients: changed after clip_grad_norm_ or unscale_, which left the scaling "
                    "to the update: call these after the last backward(), clip with "
                    "optimizer.clip_grad_norm_, and call optimizer.zero_grad() where a step is "
                    "left out"
                )
        return None

    def _check_settled(self, agreed: Agreement) -> None:
        """Averaged gradients are there on every rank or on none."""
        if self._exchange.overlapped and not self._sharded and self._averaged is not None:
            renewed = {i for number in agreed.stale for i in self._exchange.members[number]}
            partly = [i for i in agreed.partly if i in self._exchange.spans and i not in renewed]
        else:
            partly = [] if self._reduces else agreed.partly
        if partly:
            raise RuntimeError(
                f"{self._labels[partly[0]]}: got a gradient on some ranks only, but averaged ones "
                f'(grad_sync="{self._options.grad_sync}") are on every rank: edit p.grad alike on '
                "all"
            )

    def _average(self, agreed: Agreement, *, used_at_once: bool) -> None:
        """Do what the ranks have agreed on. Collective. What is ``used_at_once`` nobody can edit
        before."""
        used, known = agreed.used, len(self._exchange.members)
        self._adopt_later([index for index, is_used in enumerate(used) if is_used])
        if self._reduces:
            members = self._exchange.members
            numbers = (*agreed.stale, *range(known, len(members)))
            self._exchange.run([n for n in numbers if any(used[i] for i in members[n])], used)
        elif not used_at_once:
            self._exchange.note_present()
        present = [param.grad is not None for param in self.params]
        self._averaged = Averaged(self._means(), used, present)

    def _means(self) -> list[torch.Tensor | None]:
        """The averaged gradients, unless they are this rank's shards: ``p.grad``, or the fp32
        mean where it is but the rounding of one."""
        if self._reads_shards:
            return []
        return [
            dense_gradient(param)
            if index not in self._mean_places or param.grad is None
            else self._mean_view(index)
            for index, param in enumerate(self.params)
        ]

    def _mean_view(self, index: int) -> torch.Tensor:
        flat, slot = self._mean_places[index]
        return flat.mean_view(slot, self.params[index])

    def _honour_edits(self) -> None:
        """Where ``p.grad`` is not the rounding of its mean, somebody has changed it, and it
        counts."""
        for index in self._mean_places:
            grad = dense_gradient(self.params[index])
            if grad is not None:
                mean = in_storage_order(self._mean_view(index))
                kernels.refresh_(mean, in_storage_order(grad))

    def _end_backward(self) -> None:
        """Make ``p.grad`` the average before backward returns, as DDP does. Collective."""
        try:
            with torch.no_grad(), torch.inference_mode(False):
                self.average_gradients((), call="backward")
        except Exception as error:  # all ranks have it, and raise it at the next call
            self._failure = error

    def was_scaled(self) -> bool:
        """Whether the present gradients were averaged, and then clipped or unscaled."""
        if self._averaged is None or self._averaged.witness is None:
            return False
        index, gradient = self._averaged.witness
        return self.params[index].grad is gradient() is not None

    def gradient_norm(self, norm_type: float, params: Collection[int] | None) -> torch.Tensor:
        """Norm of the averaged gradient (of some parameters), as far as it was scaled: fp64, on
        the device. Collective in sharded mode."""
        averaged = self.averaged
        if self._reads_shards:
            buckets = self._used_buckets(averaged.used)
            norm = norm_of_shards(buckets, params, norm_type, self.comm)
            norm = norm * self._mean_scale
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
            self._averaged = averaged._replace(factor=product, witness=self._witness())
        elif self._reads_shards:
            scale_pieces(self._used_buckets(averaged.used), params, factor)
            self._averaged = averaged._replace(witness=self._witness())
        else:
            for index in params:
                grad = averaged.grads[index]
                if grad is not None:
                    scale(grad, factor)
                    if index in self._mean_places:
                        store_gradient(self.params[index], grad)
            self._exchange.note_present(params & self._exchange.spans.keys())

    @property
    def _mean_scale(self) -> float:
        """What turns averaged gradients, as they lie in memory, into means."""
        return self._exchange.reducer.shard_scale if self._reads_shards else 1.0

    def _witness(self) -> tuple[int, weakref.ref[torch.Tensor]] | None:
        for index, param in enumerate(self.params):
            if param.grad is not None:
                return index, weakref.ref(param.grad)
        return None

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
        grads, used, _, factor, _ = self.averaged
        self._make_room_for_amsgrad([group.amsgrad for group in groups])
        with self.comm.stats.phase("update"):
            if not self._reads_shards:
                self._tables.point_at_params(gradient_addresses(grads), self._wide(grads))
            self._tables.set_used(integers(used))
            self._tables.set_groups(groups)
            self._tables.upload()
        grad_scale: float | torch.Tensor = (
            self._exchange.reducer.shard_scale if self._reads_shards else 1.0
        )
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
        self._exchange.next_cycle()
        if self._hooks is not None:
            self._hooks.next_cycle()
        return used

    def _wide(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Which gradients are fp32 although their parameters are not: 1 for each, else 0."""
        if not self._mean_places:
            return None
        pairs = zip(grads, self.params, strict=True)
        return integers([grad is not None and grad.dtype != p.dtype for grad, p in pairs])

    def _used_buckets(self, used: Sequence[int]) -> list[BucketMemory]:
        """The buckets that hold a used parameter, in the order of exchange."""
        return [
            bucket
            for flat in self._flats
            for bucket in flat.buckets
            if any(used[segment.param] for segment in bucket.segments)
        ]
