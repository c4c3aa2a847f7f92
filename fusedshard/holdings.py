"""What an optimizer holds: parameters in flat memory, their moments and step counts, and tables."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusedshard import checkpoint, kernels
from fusedshard.comm import Communicator
from fusedshard.dense import is_dense, is_plain, shows_its_memory
from fusedshard.exchange import GradientExchange
from fusedshard.flat import BucketMemory, FlatBuffer, view_as_param
from fusedshard.gradients import GradientReducer
from fusedshard.layout import FlatLayout, Layout, Segment, Slot, build_layout
from fusedshard.native import BACKENDS
from fusedshard.options import ParallelOptions
from fusedshard.params import (
    KEEP_PARAMETERS,
    bytes_of,
    check_apart,
    check_form,
    check_param,
    form_of,
    iterate_params,
    parameter_labels,
    spec_of,
)
from fusedshard.sharded_state import ShardedState
from fusedshard.tables import StepTables, integers


class Holdings:
    """All that outlives a step.

    Parameters are known by their number in the order of the param groups. Those that train all
    lie on one device, where step counts are kept, too. Methods that move data between ranks are
    collective, and say so.
    """

    def __init__(self, comm: Communicator, options: ParallelOptions) -> None:
        self.comm = comm
        self.params: list[torch.nn.Parameter] = []
        self.device: torch.device | None = None
        self.steps, self.step_mirror = integers([]), integers([]).to(torch.float32)
        self._tables = self._packing = StepTables([], integers([]), 0, kernels.CPU)
        self._retired: list[object] = []  # what CUDA graphs may still write to
        self._options = options
        self._sharded = options.mode == "sharded"
        # Whether gradients must be averaged here, and parameters gathered.
        self._reduces = comm.world_size > 1 and options.grad_sync != "external"
        self.holds_shards = comm.world_size > 1 and self._sharded
        self._exchange = GradientExchange(
            comm.stats,
            self._new_reducer(ordered=True),
            options.grad_sync if self._reduces else "external",
            in_place=not self._sharded,
        )
        self._flats: list[FlatBuffer] = []
        self._adopted: set[int] = set()
        # Parameters whose ``p.grad`` shows the rounding of a mean that lies elsewhere.
        self._mean_places: dict[int, tuple[FlatBuffer, Slot]] = {}

    def admit(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Number all parameters, and take those that train into flat memory. Collective."""
        self._settle()
        self._number(groups)
        training = [index for index, p in enumerate(self.params) if p.requires_grad]
        self._choose_device([self.params[index] for index in training])
        new = len(self.params) - len(self.steps)
        self.set_steps(torch.cat([self.steps, self.steps.new_zeros(new)]))
        self._adopt(training)
        self._share_frozen(first=len(self.params) - new)
        self._make_tables()
        self._make_room_for_amsgrad([bool(group["amsgrad"]) for group in groups])

    def _share_frozen(self, first: int) -> None:
        """Give every rank the first one's frozen parameters, too, as DDP does. Collective."""
        for param in self.params[first:]:
            shared = not param.requires_grad and param.numel() and param.device.type in BACKENDS
            if shared and is_plain(param) and is_dense(param):
                self.comm.broadcast_(bytes_of(param.detach()))

    def admit_copies(self, groups: Sequence[Mapping[str, Any]], original: Holdings) -> None:
        """Take the copied parameters of ``groups`` into flat memory, where the original has its
        own there, and copy all that it holds of them. Without communication."""
        self._number(groups)
        for label, param, form in zip(self._labels, self.params, original._forms, strict=True):
            check_form(label, param, form)
        self._adopted = set(original._adopted)
        self._choose_device([self.params[index] for index in sorted(self._adopted)])
        self.set_steps(original.steps.clone())
        for theirs in original._flats:
            flat = self._new_flat(theirs.layout)
            flat.adopt(self.params, None)
            flat.copy_state(theirs)
        self._make_tables()

    def _number(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self.params = iterate_params(groups)
        self._labels = parameter_labels(groups)
        self._forms = [form_of(param) for param in self.params]
        self._group_sizes = [len(group["params"]) for group in groups]
        self._group_of = [index for index, group in enumerate(groups) for _ in group["params"]]

    def labelled_params(self) -> list[tuple[str, torch.Tensor]]:
        """All parameters with their names for messages."""
        return list(zip(self._labels, self.params, strict=True))

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
            dtypes = [param.dtype for param in training]
            preferred = self.comm.prefers_ordered(self.device)
            ordered = self._options.ordered(dtypes, preferred=preferred)
            self._exchange.reducer = self._new_reducer(ordered=ordered)

    def _new_reducer(self, *, ordered: bool) -> GradientReducer:
        return GradientReducer(self.comm, ordered=ordered, in_place=not self._sharded)

    def _settle(self) -> None:
        """End what backward has begun on any rank, before buckets change or the ranks exchange
        other things. Collective. What is wrong with a gradient is left for the step to say."""
        if self._exchange.overlapped and any(self.comm.gather_objects(self._exchange.next > 0)):
            error = self._exchange.complete()
            if error is not None:
                self._exchange.note_error(error)

    def _adopt_later(self, indices: Sequence[int]) -> None:
        """The same once tables are there, which stay as they are where no parameter is new."""
        new = [index for index in indices if index not in self._adopted]
        if new:
            self._check_not_captured(f"{self._labels[new[0]]}: begins to train")
            self._choose_device([self.params[index] for index in new])
            for index in new:  # alike on all ranks, as their forms are
                param = self.params[index]
                check_param(self._labels[index], param, self.device or param.device)
            everyone = self.labelled_params()
            others = [pair for index, pair in enumerate(everyone) if index not in new]
            check_apart([everyone[index] for index in new], others)
            self._adopt(new)
            self._make_tables()

    def _adopt(self, indices: Sequence[int]) -> None:
        """Re-home parameters that are not yet in flat memory. Collective.

        Frozen parameters stay outside, without moments, until some rank has a gradient of them.
        """
        new = [index for index in indices if index not in self._adopted]
        self._adopted.update(new)
        specs = [spec_of(index, self.params[index], self._options.precision) for index in new]
        layout = build_layout(specs, self.comm.world_size, self._options.bucket_cap_bytes)
        for flat_layout in layout.flats:
            self._new_flat(flat_layout).adopt(self.params, self.comm)

    def _new_flat(self, layout: FlatLayout) -> FlatBuffer:
        flat = FlatBuffer(
            layout,
            self.comm,
            self._options.precision,
            sharded=self._sharded,
            reduces=self._reduces,
        )
        self._flats.append(flat)
        if flat.shows_reduced:
            self._mean_places |= {slot.param: (flat, slot) for slot in layout.slots}
        return flat

    def _make_tables(self) -> None:
        self._retire(self._tables, self._packing)
        buckets = [bucket for flat in self._flats for bucket in flat.buckets]
        self._tables = self._tables_of([(b, b.owned) for b in buckets])
        self._packing = self._tables_of([(b, b.segments) for b in buckets])
        for bucket, table, packing in zip(
            buckets, self._tables.tables, self._packing.tables, strict=True
        ):
            bucket.table, bucket.packing = table, packing
        self._addresses = [0] * len(self.params)  # 0: not in flat memory
        for flat in self._flats:
            for slot in flat.layout.slots:
                self._addresses[slot.param] = flat.address_of(slot)
        reduced = [bucket.reduced for bucket in buckets if bucket.reduced is not None]
        self._reads_shards = self._sharded and bool(reduced)
        if self._reads_shards:
            self._tables.point_at_shards(reduced)
        self._exchange.take(self.params, self._labels, buckets, self._packing)

    def _tables_of(self, buckets: Sequence[tuple[BucketMemory, Sequence[Segment]]]) -> StepTables:
        stretches = [(segments, bucket.param.itemsize) for bucket, segments in buckets]
        group_of, device = integers(self._group_of), self.device or kernels.CPU
        return StepTables(stretches, group_of, len(self._group_sizes), device)

    @property
    def flats(self) -> Sequence[FlatBuffer]:
        return self._flats

    @property
    def layout(self) -> Layout:
        return Layout(self.comm.world_size, tuple(flat.layout for flat in self._flats))

    def memory(self) -> dict[str, int]:
        flats, lanes = self._flats, self._exchange.reducer.lanes
        return {
            "parameters": sum(flat.param.nbytes for flat in flats),
            "moments": sum(m.nbytes for flat in flats for m in flat.moments.values()),
            "masters": sum(f.masters.nbytes for f in flats if f.masters is not None),
            "reduced": sum(flat.reduced.nbytes for flat in flats if flat.reduced is not None),
            "send": sum(lane.nbytes("send", "wide") for lane in lanes),
            "receive": sum(lane.nbytes("receive") for lane in lanes),
        }

    def check_unchanged(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise RuntimeError where param groups or their parameters are not those admitted, or a
        parameter has another form or place."""
        sizes = [len(group["params"]) for group in groups]
        same = all(map(operator.is_, iterate_params(groups), self.params))
        if sizes != self._group_sizes or not same:
            raise RuntimeError(
                "param_groups: groups or parameters were added, removed or reordered: use "
                "add_param_group, or build a new optimizer"
            )
        self.comm.check_world()
        self._check_homes()

    def _check_homes(self) -> None:
        rows = zip(self._labels, self.params, self._forms, self._addresses, strict=True)
        for label, param, form, address in rows:
            check_form(label, param, form)
            if address and not (param.data_ptr() == address and shows_its_memory(param)):
                raise RuntimeError(
                    f"{label}: moved after the optimizer was built: {KEEP_PARAMETERS}"
                )

    def _make_room_for_amsgrad(self, amsgrad: Sequence[bool]) -> None:
        """For the param groups that have it."""
        for flat in self._flats if any(amsgrad) else ():
            missing = "max_exp_avg_sq" not in flat.moments
            if missing and any(amsgrad[self._group_of[slot.param]] for slot in flat.layout.slots):
                self._check_not_captured("amsgrad: is switched on")
                flat.ensure_max_exp_avg_sq()

    def visible_state(self, indices: set[int]) -> dict[int, dict[str, torch.Tensor]]:
        """Views of step, moments and masters of some parameters: whole where this rank has all of
        them, else this rank's piece."""
        state: dict[int, dict[str, torch.Tensor]] = {}
        for flat in self._flats:
            for slot in flat.layout.slots:
                if slot.param in indices:
                    param = self.params[slot.param]
                    state[slot.param] = flat.visible_moments(slot, param)
                    if flat.masters is not None:
                        state[slot.param][checkpoint.MASTERS] = flat.visible_masters(slot, param)
        for index in indices - state.keys():  # empty parameters have no place in flat memory
            param = self.params[index]
            empty = torch.zeros_like(param, dtype=kernels.wide_dtype(param.dtype))
            state[index] = {name: empty.clone() for name in checkpoint.MOMENTS}
        # In torch's order, for whoever goes through a state dict.
        return {i: {"step": self._step_view(i), **state[i]} for i in sorted(state)}

    def _step_view(self, index: int) -> torch.Tensor:
        """In a storage of its own, so that pickling one parameter's does not write all."""
        return view_as_param(self.step_mirror, Slot(index, index, 1), self.step_mirror[index])

    @property
    def is_plain(self) -> bool:
        """Whether `visible_state` is all there is, in the formats of state dicts."""
        return all(flat.is_plain for flat in self._flats)

    def full_state(self, *, keep: bool = True, cpu: bool = True) -> checkpoint.State:
        """Copies of all parameters' moments and masters, whole, unless this rank is not to keep
        them. Collective in sharded mode."""
        if self.holds_shards:
            self._settle()
        return checkpoint.full_state(self._flats, self.params, self.comm, keep=keep, cpu=cpu)

    def sharded_state(self) -> dict[int, dict[str, ShardedState]]:
        """Moments and masters of which this rank has a part, without communication."""
        return checkpoint.sharded_state(self._flats, self.params)

    def owned_ranges(self) -> list[list[tuple[int, int]]]:
        """Starts and lengths of what this rank owns of each parameter, in its own numbers."""
        owned = {}
        for flat in self._flats:
            for index, pieces in flat.pieces.items():
                owned[index] = [checkpoint.in_numbers(p, self.params[index]) for p in pieces]
        return [owned.get(index, []) for index in range(len(self.params))]

    def _warn_of_unused(self, masters: set[int]) -> None:
        kept = [flat for flat in self._flats if flat.masters is not None]
        unused = sorted(masters - {s.param for flat in kept for s in flat.layout.slots})
        if unused:
            warnings.warn(
                f"state_dict: has master weights of {len(unused)} parameters (first: "
                f"{self._labels[unused[0]]}) that this optimizer keeps none of: it goes on from "
                "the parameters as they are, which may be rounded",
                stacklevel=2,
            )

    def load(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace steps, moments and masters by ``state``; where it has nothing by zero, masters by
        the parameters themselves. Collective."""
        self._settle()
        self._adopt_later(sorted(state))
        for flat in self._flats:
            if any("max_exp_avg_sq" in state.get(s.param, {}) for s in flat.layout.slots):
                flat.ensure_max_exp_avg_sq()
            checkpoint.store_moments(flat, self.params, state)
            checkpoint.store_masters(flat, self.params, state)
        self._warn_of_unused({i for i, values in state.items() if checkpoint.MASTERS in values})
        steps = [int(state[i]["step"]) if i in state else 0 for i in range(len(self.params))]
        self.set_steps(integers(steps))
