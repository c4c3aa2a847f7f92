"""What the kernels read of a step beside the arrays: table rows, used parameters, groups.

All of it lies in one array of 64-bit words in host memory, and for a GPU once more in device
memory, where it is brought up to date before the kernels of a step are launched.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fusedshard.layout import Segment
from fusedshard.native import BACKENDS, CudaBackend

# start, length, grad address, active, param, group, first, wide: struct Segment in kernels.h
_COLUMNS = 8
_BLOCK = 480  # words that one launch writes at most: kWords in table_cuda.cu


class GroupScalars(NamedTuple):
    """Hyperparameters of a param group, in the order of struct Group in adam.h.

    lr and betas may be tensors of one element on the parameters' device, which are read there.
    """

    lr: float | torch.Tensor
    beta1: float | torch.Tensor
    beta2: float | torch.Tensor
    eps: float
    weight_decay: float
    decoupled: bool
    amsgrad: bool
    maximize: bool

    @staticmethod
    def of(group: Mapping[str, Any], device: torch.device | None) -> GroupScalars:
        """A param group's values as they are now: users and schedulers change them at will.

        Tensors on ``device``, the parameters', are left for the kernels to read there.
        """

        def scalar(value: Any) -> Any:
            on_device = isinstance(value, torch.Tensor) and value.device == device
            return value if on_device and value.device.type != "cpu" else float(value)

        beta1, beta2 = group["betas"]
        return GroupScalars(
            lr=scalar(group["lr"]),
            beta1=scalar(beta1),
            beta2=scalar(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=bool(group["decoupled_weight_decay"]),
            amsgrad=bool(group["amsgrad"]),
            maximize=bool(group["maximize"]),
        )

    def on_host(self) -> tuple[float, ...]:
        """The values, with NaN for what only the device knows."""
        return tuple(
            float("nan") if isinstance(value, torch.Tensor) else float(value) for value in self
        )


class SegmentTable:
    """The kernels' view of one bucket: a stretch of `StepTables` rows.

    Attributes:
        rows: (n, 8) int64 in host memory.
        words: where among all of the tables' words these lie.
        params: the parameter of each row.
        device_rows: the same for the kernels; on the CPU ``rows`` itself.
        tiles: on a GPU (t, 2) int32: segment, and which stretch of it.
        groups, device_groups: (groups, 8) fp64, one row a param group.
        end: one past the last element that any row names.
        alignment: of which the rows' starts are multiples; 0 where all are 0.
        amsgrad: whether the group of any row has it.
    """

    def __init__(self, tables: StepTables, first: int, segments: Sequence[Segment]) -> None:
        self.rows = tables.rows[first : first + len(segments)]
        self.words = range(first * _COLUMNS, (first + len(segments)) * _COLUMNS)
        self.params = [segment.param for segment in segments]
        self._offset_bytes = tables.param_offset_bytes[first : first + len(segments)]
        self.device_rows = tables.device_rows[first : first + len(segments)]
        self.groups, self.device_groups = tables.groups, tables.device_groups
        self.end = max((s.shard_start + s.length for s in segments), default=0)
        self.alignment = math.gcd(*(s.shard_start for s in segments))
        self.tiles = tables.tiles_of(tuple(s.length for s in segments))
        self.amsgrad = False

    def point_at(self, addresses: Mapping[int, int]) -> None:
        """Take each segment from its parameter's own gradient, which lies, dense and in the
        parameter's storage order, at the address given; 0 where there is none."""
        found = integers([addresses[param] for param in self.params])
        self.rows[:, 2] = _behind(found, self._offset_bytes)


class StepTables:
    """The tables of several buckets, which are refreshed together.

    Start, length, parameter and group of a row never change; gradient addresses, used parameters
    and groups are what was set last. Nothing acts before `upload`.

    Args:
        stretches: for each bucket its segments and bytes of an element.
        group_of: int64, the param group of each parameter.
        group_count: param groups.
        device: where the kernels run.
    """

    def __init__(
        self,
        stretches: Sequence[tuple[Sequence[Segment], int]],
        group_of: torch.Tensor,
        group_count: int,
        device: torch.device,
    ) -> None:
        flat = [(segment, size) for segments, size in stretches for segment in segments]
        self._params = integers([s.param for s, _ in flat])
        self._param_starts = integers([s.param_start for s, _ in flat])
        self._itemsizes = integers([size for _, size in flat])
        self.param_offset_bytes = self._param_starts * self._itemsizes
        sizes = [len(flat) * _COLUMNS, len(group_of), group_count * len(GroupScalars._fields)]
        self.words = torch.zeros(sum(sizes), dtype=torch.int64, device="cpu")
        backend = BACKENDS[device.type]
        self.device_words = self.words
        if isinstance(backend, CudaBackend):
            self.device_words = torch.zeros_like(self.words, device=device)
        self.rows, self.used, self.groups = _parts(self.words, sizes)
        self.device_rows, self.device_used, self.device_groups = _parts(self.device_words, sizes)
        self.rows[:, 0] = integers([s.shard_start for s, _ in flat])
        self.rows[:, 1] = integers([s.length for s, _ in flat])
        self.rows[:, 4] = self._params
        self.rows[:, 5] = group_of[self._params]
        self.rows[:, 6] = self._param_starts
        self._tiles: dict[tuple[int, ...], torch.Tensor] = {}
        firsts = itertools.accumulate((len(segments) for segments, _ in stretches), initial=0)
        self.tables = [
            SegmentTable(self, first, segments)
            for first, (segments, _) in zip(firsts, stretches, strict=False)
        ]
        self.device_scalars: list[tuple[int, int, torch.Tensor]] = []
        self.replayed = False  # whether a CUDA graph may write to the device's words
        self._sent: torch.Tensor | None = None
        self._backend = backend

    def tiles_of(self, lengths: tuple[int, ...]) -> torch.Tensor:
        """Which stretch of which segment each thread block takes, where the segments are as long
        as that. Buckets of one pattern, as layers of one shape make, share them."""
        if lengths not in self._tiles:
            self._tiles[lengths] = _tiles(lengths, self.device_words.device)
        return self._tiles[lengths]

    def point_at_shards(self, gradients: Sequence[torch.Tensor]) -> None:
        """Take each bucket's gradients from one array parallel to it, which must outlive this: of
        the parameters' dtype, or fp32."""
        pairs = [(g, t) for g, t in zip(gradients, self.tables, strict=True) for _ in t.rows]
        bases = integers([gradient.data_ptr() for gradient, _ in pairs])
        itemsizes = integers([gradient.itemsize for gradient, _ in pairs])
        self.rows[:, 2] = bases + self.rows[:, 0] * itemsizes
        self.rows[:, 7] = itemsizes != self._itemsizes

    def point_at_params(self, addresses: torch.Tensor, wide: torch.Tensor | None = None) -> None:
        """The same from each parameter's own tensor: ``addresses`` from `gradient_addresses`;
        ``wide``: int64, 1 for each parameter narrower than its gradient, which is fp32."""
        itemsizes = self._itemsizes
        if wide is not None:
            self.rows[:, 7] = wide[self._params]
            itemsizes = torch.where(self.rows[:, 7] == 1, 4, itemsizes)
        self.rows[:, 2] = _behind(addresses[self._params], self._param_starts * itemsizes)

    def set_used(self, used: torch.Tensor) -> None:
        """Which parameters have a gradient on any rank: int64, 0 or 1 for each."""
        self.used.copy_(used)
        self.rows[:, 3] = used[self._params]

    def set_groups(self, groups: Sequence[GroupScalars]) -> None:
        """The hyperparameters as they are now."""
        values = [group.on_host() for group in groups]
        self.groups.copy_(torch.tensor(values, dtype=torch.float64, device="cpu").view(-1, 8))
        for table in self.tables:
            table.amsgrad = any(group.amsgrad for group in groups) and any(
                groups[index].amsgrad for index in table.rows[:, 5].unique().tolist()
            )
        self.device_scalars = [
            (index, column, value)
            for index, group in enumerate(groups)
            for column, value in enumerate(group)
            if isinstance(value, torch.Tensor)
        ]

    def upload(self, table: SegmentTable | None = None) -> None:
        """Bring the device's words up to date, in the order of the current stream: all of them,
        or a bucket's rows."""
        everything = range(len(self.words))
        first_time = self._sent is None
        self._backend.upload(self, everything if table is None or first_time else table.words)

    def stretches_to_send(self, words: range) -> list[tuple[int, int]]:
        """``(start, stop)`` of those words that differ from the device's."""
        if self._sent is None or self.replayed:
            return [(words.start, words.stop)] if words else []
        now, then = (array[words.start : words.stop] for array in (self.words, self._sent))
        if len(words) <= _BLOCK:
            return [] if torch.equal(now, then) else [(words.start, words.stop)]
        changed = now != then
        blocks = (changed.nonzero().flatten() // _BLOCK).unique().tolist()
        starts = [words.start + block * _BLOCK for block in blocks]
        return [(start, min(start + _BLOCK, words.stop)) for start in starts]

    def note_sent(self, words: range) -> None:
        """The device's are these now."""
        if self._sent is None:
            self._sent = self.words.clone()
        self._sent[words.start : words.stop] = self.words[words.start : words.stop]


def integers(values: Sequence[int]) -> torch.Tensor:
    """An int64 tensor in host memory, whatever torch's default device."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def gradient_addresses(grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Addresses of dense gradients in their parameters' storage order, int64; 0 for None."""
    return integers([0 if grad is None else grad.data_ptr() for grad in grads])


def _behind(addresses: torch.Tensor, offset_bytes: torch.Tensor) -> torch.Tensor:
    """0 stays 0."""
    return torch.where(addresses == 0, addresses, addresses + offset_bytes)


def _parts(
    words: torch.Tensor, sizes: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, used, groups = words.split(list(sizes))
    columns = len(GroupScalars._fields)
    return rows.view(-1, _COLUMNS), used, groups.view(torch.float64).view(-1, columns)


def _tiles(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Which stretch of which segment each thread block takes; none on the CPU."""
    backend = BACKENDS[device.type]
    if not isinstance(backend, CudaBackend):
        return torch.empty(0, 2, dtype=torch.int32)
    counts = (integers(lengths) + backend.tile_elements - 1) // backend.tile_elements
    segments = torch.arange(len(lengths), device="cpu").repeat_interleave(counts)
    firsts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    indices = torch.arange(len(segments), device="cpu") - firsts
    return torch.stack([segments, indices], dim=1).to(torch.int32).to(device)
