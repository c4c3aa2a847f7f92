"""What one step does: flat memory, averaged gradients, fused update, gathered parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fusedshard import checkpoint, kernels
from fusedshard.agreement import Status, agree
from fusedshard.clipping import norm_of_gradients, norm_of_shards, scale_pieces
from fusedshard.comm import Communicator
from fusedshard.flat import BucketMemory, FlatBuffer
from fusedshard.gradients import GradientReducer
from fusedshard.layout import Layout, Segment, build_layout
from fusedshard.options import ParallelOptions
from fusedshard.params import (
    KEEP_PARAMETERS,
    check_form,
    check_param,
    dense_gradient,
    form_of,
    iterate_params,
    parameter_labels,
    spec_of,
    store_gradient,
)
from fusedshard.tables import GroupScalars, StepTables, gradient_addresses, integers


class Averaged(NamedTuple):
    """Gradients that were averaged and not yet used.

    Attributes:
        grads: this rank's own, or in replicated mode the means.
        used: 1 for each parameter that has one on any rank, else 0.
        marks: to see whether they are still what they were.
    """

    grads: list[torch.Tensor | None]
    used: list[int]
    marks: list[tuple[int, int, int]]


class Engine:
    """The machinery below `fusedshard.Adam`, without hyperparameters and torch's bookkeeping.

    Parameters are known by their number in the order of the param groups. Those that train all
    lie on one device, where step counts are kept, too. All methods that move data between ranks
    are collective, and say so. None waits for the device, but for what gloo exchanges of a GPU.
    """

    def __init__(self, comm: Communicator, options: ParallelOptions) -> None:
        self.comm = comm
        self.params: list[torch.nn.Parameter] = []
        self.device: torch.device | None = None
        self.steps, self.step_mirror = integers([]), integers([]).to(torch.float32)
        self._tables = self._packing = StepTables([], integers([]), 0, kernels.CPU)
        self._retired: list[object] = []  # what CUDA graphs may still write to
        self._averaged: Averaged | None = None
        self.factor: torch.Tensor | None = None  # that the next update multiplies gradients by
        self._options = options
        self._sharded = options.mode == "sharded"
        # Whether gradients must be averaged here, and parameters gathered.
        self._reduces = comm.world_size > 1 and options.grad_sync == "step"
        self.holds_shards = comm.world_size > 1 and self._sharded
        self._reducer = GradientReducer(comm, ordered=True)
        self._flats: list[FlatBuffer] = []
        self._adopted: set[int] = set()

    # -- parameters ----------------------------------------------------------------------------

    def admit(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Number all parameters, and take those that train into flat memory. Collective."""
        self.params = iterate_params(groups)
        self._labels = parameter_labels(groups)
        self._forms = [form_of(param) for param in self.params]
        self._group_sizes = [len(group["params"]) for group in groups]
        self._group_of = [index for index, group in enumerate(groups) for _ in group["params"]]
        training = [index for index, p in enumerate(self.params) if p.requires_grad]
        self._choose_device([self.params[index] for index in training])
        new = len(self.params) - len(self.steps)
        self.set_steps(torch.cat([self.steps, self.steps.new_zeros(new)]))
        self._adopt(training)
        self._make_tables()
        self._make_room_for_amsgrad([bool(group["amsgrad"]) for group in groups])

    def set_steps(self, steps: torch.Tensor) -> None:
        """Replace the step counts (int64, one a parameter) and their fp32 mirror: in place where
        they are as many, for the sake of CUDA graphs."""
        device = self.device or kernels.CPU
        if len(steps) == len(self.steps) and self.steps.device == device:
            self.steps.copy_(steps)
            self.step_mirror.copy_(steps)
        else:
            self._retire(self.steps, self.step_mirror)
            self.steps = steps.to(device)
            self.step_mirror = self.steps.to(torch.float32)

    def _retire(self, *replaced: object) -> None:
        """Keep what a captured step still writes to: its replays are of no use any more, and must
        do no harm."""
        if self._tables.replayed or self._packing.replayed:
            self._retired += replaced

    def _check_not_captured(self, what: str) -> None:
        if kernels.capturing(self.device or kernels.CPU):
            raise RuntimeError(
                f"{what} while a CUDA graph is captured, which would repeat it at each replay: run "
                "one step before"
            )

    def _choose_device(self, training: Sequence[torch.Tensor]) -> None:
        """The first parameters that train decide, for as long as the optimizer lives."""
        if self.device is None and training:
            self.device = training[0].device
            self.set_steps(self.steps)
            by_default = self.comm.prefers_ordered(self.device)
            ordered = self._options.ordered(by_default=by_default)
            self._reducer = GradientReducer(self.comm, ordered=ordered)

    def _adopt_later(self, indices: Sequence[int]) -> None:
        """The same once tables are there, which stay as they are where no parameter is new."""
        new = [index for index in indices if index not in self._adopted]
        if new:
            self._check_not_captured(f"{self._labels[new[0]]}: begins to train")
            self._choose_device([self.params[index] for index in new])
            for index in new:  # alike on all ranks, as their forms are
                param = self.params[index]
                check_param(self._labels[index], param, self.device or param.device)
            self._adopt(new)
            self._make_tables()

    def _adopt(self, indices: Sequence[int]) -> None:
        """Re-home parameters that are not yet in flat memory. Collective.

        Frozen parameters stay outside, without moments, until some rank has a gradient of them.
        """
        new = [index for index in indices if index not in self._adopted]
        self._adopted.update(new)
        specs = [spec_of(index, self.params[index]) for index in new]
        layout = build_layout(specs, self.comm.world_size, self._options.bucket_cap_bytes)
        keep_reduced = self._sharded and self._reduces
        for flat_layout in layout.flats:
            flat = FlatBuffer(
                flat_layout, self.comm, sharded=self._sharded, keep_reduced=keep_reduced
            )
            flat.adopt(self.params, self.comm)
            self._flats.append(flat)

    def _make_tables(self) -> None:
        self._retire(self._tables, self._packing)
        buckets = [bucket for flat in self._flats for bucket in flat.buckets]
        self._tables = self._tables_of([(b, b.owned) for b in buckets])
        self._packing = self._tables_of([(b, b.segments) for b in buckets])
        for bucket, table, packing in zip(
            buckets, self._tables.tables, self._packing.tables, strict=True
        ):
            bucket.table, bucket.packing = table, packing
        reduced = [bucket.reduced for bucket in buckets if bucket.reduced is not None]
        self._reads_shards = bool(reduced)
        if self._reads_shards:
            self._tables.point_at_shards(reduced)

    def _tables_of(self, buckets: Sequence[tuple[BucketMemory, Sequence[Segment]]]) -> StepTables:
        stretches = [(segments, bucket.param.itemsize) for bucket, segments in buckets]
        group_of, device = integers(self._group_of), self.device or kernels.CPU
        return StepTables(stretches, group_of, len(self._group_sizes), device)

    @property
    def layout(self) -> Layout:
        return Layout(self.comm.world_size, tuple(flat.layout for flat in self._flats))

    def memory(self) -> dict[str, int]:
        flats, lanes = self._flats, self._reducer.lanes
        return {
            "parameters": sum(flat.param.nbytes for flat in flats),
            "moments": sum(m.nbytes for flat in flats for m in flat.owned_moments().values()),
            "reduced": sum(flat.reduced.nbytes for flat in flats if flat.reduced is not None),
            "send": sum(lane.nbytes("send") for lane in lanes),
            "receive": sum(lane.nbytes("receive") for lane in lanes),
        }

    # -- a step --------------------------------------------------------------------------------

    def check_unchanged(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise RuntimeError where param groups or their parameters are not those admitted, or a
        parameter has another form or place."""
        sizes = [len(group["params"]) for group in groups]
        same = zip(iterate_params(groups), self.params, strict=False)
        if sizes != self._group_sizes or any(now is not then for now, then in same):
            raise RuntimeError(
                "param_groups: groups or parameters were added, removed or reordered: use "
                "add_param_group, or build a new optimizer"
            )
        self.comm.check_world()
        self._check_homes()

    def average_gradients(
        self, groups: Sequence[GroupScalars], error: Exception | None = None
    ) -> None:
        """Average the gradients over the ranks, unless they are those averaged last. Collective.

        Args:
            groups: hyperparameters of each param group.
            error: what is wrong on this rank already.

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
        changed = self._averaged is None or self._averaged.marks != self._marks()
        present = [grad is not None for grad in grads]
        agreed = agree(self.comm, Status(error, groups, present, changed))
        if not agreed.changed:
            return
        if self.factor is not None:
            raise RuntimeError(
                "gradients: changed after clip_grad_norm_ was called: call it after the last "
                "backward() before step()"
            )
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
        self._averaged = Averaged(grads, used, self._marks())

    def _marks(self) -> list[tuple[int, int, int]]:
        """What tells whether a gradient is still the one it was."""
        return [
            (0, 0, 0)
            if (grad := param.grad) is None
            else (id(grad), grad.data_ptr(), grad._version)
            for param in self.params
        ]

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
        return norm if self.factor is None else norm * self.factor

    def scale_gradients(self, factor: torch.Tensor, params: Collection[int] | None) -> None:
        """Multiply the averaged gradients: all of them by way of the next update, or some at
        once."""
        averaged = self.averaged
        if params is None:
            self.factor = factor if self.factor is None else self.factor * factor
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

    def update(self, groups: Sequence[GroupScalars]) -> list[int]:
        """Update what this rank owns of the used parameters, by the averaged gradients, and
        gather the rest. Collective.

        Returns:
            1 for each used parameter, 0 for each other.
        """
        grads, used, _ = self.averaged
        self._make_room_for_amsgrad([group.amsgrad for group in groups])
        with self.comm.stats.phase("update"):
            if not self._reads_shards:
                self._tables.point_at_params(gradient_addresses(grads))
            self._tables.set_used(integers(used))
            self._tables.set_groups(groups)
            self._tables.upload()
        grad_scale: float | torch.Tensor = self._reducer.shard_scale if self._reads_shards else 1.0
        if self.factor is not None:
            grad_scale = self.factor * grad_scale
        pending = []
        for bucket in self._used_buckets(used):
            with self.comm.stats.phase("update"):
                kernels.adam_(bucket.state, bucket.table, self.steps, grad_scale)
            if self.holds_shards:
                pending.append(self.comm.all_gather_(bucket.param))
        kernels.count_steps_(self.steps, self.step_mirror, self._tables.device_used)
        with self.comm.stats.phase("gather"):
            for gather in pending:
                gather.wait()
        # The kernels wrote through raw pointers, which autograd does not see.
        changed = [self.params[index] for index, is_used in enumerate(used) if is_used]
        torch.autograd.graph.increment_version(changed)
        self._averaged, self.factor = None, None
        return used

    def _check_homes(self) -> None:
        for label, param, form in zip(self._labels, self.params, self._forms, strict=True):
            check_form(label, param, form)
        for flat in self._flats:
            for slot in flat.layout.slots:
                if self.params[slot.param].data_ptr() != flat.address_of(slot):
                    raise RuntimeError(
                        f"{self._labels[slot.param]}: moved after the optimizer was built: "
                        f"{KEEP_PARAMETERS}"
                    )

    def _reduce(self, grads: list[torch.Tensor | None], used: Sequence[int]) -> None:
        """Average in place, in replicated mode, or into this rank's shards. Collective."""
        buckets = self._used_buckets(used)
        if not self._sharded:
            for index, param in enumerate(self.params):
                if used[index] and grads[index] is None:
                    grads[index] = torch.zeros_like(param)
        self._packing.point_at_params(gradient_addresses(grads))
        self._packing.upload()
        if self._sharded:
            self._reducer.reduce_to_shards(buckets)
            return
        self._reducer.reduce_in_place(buckets)
        for param, grad in zip(self.params, grads, strict=True):
            if grad is not None and grad is not param.grad:
                store_gradient(param, grad)

    def _used_buckets(self, used: Sequence[int]) -> list[BucketMemory]:
        """The buckets that hold a used parameter, in the order of exchange."""
        return [
            bucket
            for flat in self._flats
            for bucket in flat.buckets
            if any(used[segment.param] for segment in bucket.segments)
        ]

    def _make_room_for_amsgrad(self, amsgrad: Sequence[bool]) -> None:
        """For the param groups that have it."""
        for flat in self._flats if any(amsgrad) else ():
            missing = flat.max_exp_avg_sq is None
            if missing and any(amsgrad[self._group_of[slot.param]] for slot in flat.layout.slots):
                self._check_not_captured("amsgrad: is switched on")
                flat.ensure_max_exp_avg_sq()

    # -- moments -------------------------------------------------------------------------------

    def visible_state(self, indices: set[int]) -> dict[int, dict[str, torch.Tensor]]:
        """Views of step and moments of some parameters: whole where this rank has all of them,
        else this rank's piece."""
        state: dict[int, dict[str, torch.Tensor]] = {}
        for flat in self._flats:
            names = flat.owned_moments()
            for slot in flat.layout.slots:
                if slot.param in indices:
                    param = self.params[slot.param]
                    state[slot.param] = {n: flat.moment_view(n, slot, param) for n in names}
        for index in indices - state.keys():  # empty parameters have no place in flat memory
            state[index] = {n: torch.zeros_like(self.params[index]) for n in checkpoint.MOMENTS}
        return {i: {"step": self.step_mirror[i], **moments} for i, moments in state.items()}

    def full_moments(self, *, keep: bool = True) -> dict[int, dict[str, torch.Tensor]]:
        """Copies of all parameters' moments, whole, unless this rank is not to keep them.
        Collective."""
        return checkpoint.full_moments(self._flats, self.params, self.comm, keep=keep)

    def load(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace steps and moments by ``state``, and by zero where it has nothing. Collective."""
        self._adopt_later(sorted(state))
        for flat in self._flats:
            if any("max_exp_avg_sq" in state.get(s.param, {}) for s in flat.layout.slots):
                flat.ensure_max_exp_avg_sq()
            checkpoint.store_moments(flat, self.params, state)
        steps = [int(state[i]["step"]) if i in state else 0 for i in range(len(self.params))]
        self.set_steps(integers(steps))
