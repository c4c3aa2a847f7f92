"""A rank's part of an optimizer state tensor, in the words of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from fusedshard.boxes import Box, boxes_of
from fusedshard.flat import view_as_param
from fusedshard.layout import Slot

if TYPE_CHECKING:  # when it is needed it is there, and it takes a second to import
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

REMEDY = (
    "call full_state_dict() on every rank and save what it returns, or save state_dict() with "
    "torch.distributed.checkpoint"
)


# Bits of NaN whose payload says nothing to anybody, by size of the number.
MARKS = {
    2: (torch.int16, 0x7FEB),
    4: (torch.int32, 0x7FEBFEED),
    8: (torch.int64, 0x7FFBFEED7FEBFEED),
}


def _marked(numbers: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Their bits, and those of the mark."""
    integers, mark = MARKS[numbers.dtype.to_real().itemsize]
    return numbers.view(numbers.dtype.to_real()).view(integers), mark


class Stretch:
    """Consecutive elements of a parameter's state, in storage order, that this rank has.

    Args:
        start, length: in elements of the parameter.
        read: returns them, 1-D: their memory, or a copy where they are kept in another format.
        is_loaded: whether they are, or are to be, a checkpoint's.
    """

    def __init__(
        self,
        start: int,
        length: int,
        read: Callable[[], torch.Tensor],
        *,
        is_loaded: bool = False,
    ) -> None:
        self.start, self.length, self.read, self.is_loaded = start, length, read, is_loaded

    def copied(self, device: torch.device | str) -> Stretch:
        kept = self.read().to(device, copy=True)
        return Stretch(self.start, self.length, lambda: kept, is_loaded=self.is_loaded)

    def awaited(self) -> Stretch:
        """Memory for what a checkpoint has of it. Nothing says afterwards whether that was all:
        numbers that do not come stay such NaN as no arithmetic gives."""
        kept = torch.empty_like(self.read())
        bits, mark = _marked(kept)
        bits.fill_(mark)
        return Stretch(self.start, self.length, lambda: kept, is_loaded=True)

    def missing(self) -> int:
        """How many elements of what was to be loaded did not come."""
        if not self.is_loaded:
            return 0
        bits, mark = _marked(self.read())
        return int((bits == mark).sum()) * self.length // max(1, len(bits))

    def __deepcopy__(self, memo: dict[int, Any]) -> Stretch:
        # Also what asynchronous saving calls, to keep a snapshot in host memory.
        return self.copied("cpu")


def _apart(box: Box, stretch: torch.Tensor) -> torch.Tensor:
    """A box's elements in a storage of their own size over the same memory: where there is more
    behind a tensor, a copy of it is saved, and kept until the file is done."""
    elements = box.of(stretch)
    place = Slot(0, box.start, elements.numel())
    return view_as_param(stretch, place, elements)


class ShardedState(torch.Tensor):
    """A state tensor (exp_avg, ...) of the parameter's shape, of which this rank holds a part.

    torch.distributed.checkpoint saves and loads it as boxes of the whole tensor, so that any
    number of ranks, or another optimizer, can load what was saved. Nothing is communicated. Saved
    is what the optimizer holds at that time. What is loaded is kept apart from it until
    ``load_state_dict`` takes it over, so that a load that fails changes nothing.

    It has shape, strides, dtype and device, and can be copied (``clone``, ``copy.deepcopy``,
    ``to(device)``); all else raises RuntimeError, pickling TypeError: its values are not here.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _stretches: tuple[Stretch, ...]
    is_loaded: bool  # whether a checkpoint is, or was, to be loaded into it

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        stretches: Sequence[Stretch] = (),
    ) -> ShardedState:
        self: ShardedState = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=device
        )
        self._stretches = tuple(stretches)
        self.is_loaded = False
        return self

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """What this rank has of it, in storage order: what was loaded, else what the optimizer
        holds now."""
        return self._stretches

    def boxes(self) -> list[tuple[Box, Stretch]]:
        """The same as boxes of the whole tensor."""
        shape, strides = self.size(), self.stride()
        return [
            (box, stretch)
            for stretch in self._stretches
            for box in boxes_of(shape, strides, stretch.start, stretch.length)
        ]

    # -- the protocol of torch.distributed.checkpoint ------------------------------------------

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(self.dtype), self.size()),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Asked for where something is to be loaded into it."""
        self._stretches = tuple(stretch.awaited() for stretch in self._stretches)
        self.is_loaded = True
        return self._chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for box, stretch in self.boxes():
            if index.offset is not None and box.offset == tuple(index.offset):
                return _apart(box, stretch.read())
        raise ValueError(f"{index.fqn}: this rank has no box at {index.offset}")

    def _chunks(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size))
            for box, _ in self.boxes()
        ]

    # -- as a tensor -----------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aten, given = torch.ops.aten, kwargs or {}
        source = next(leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, cls))
        if func in (aten.detach.default, aten.alias.default):
            return source._with(source._stretches)
        if func in (aten.clone.default, aten._to_copy.default) and source._is_move(given):
            device = given.get("device") or source.device
            stretches = [stretch.copied(device) for stretch in source._stretches]
            return source._with(stretches, device=device)
        if func is aten.new_empty.default and list(args[1]) in ([], list(source.size())):
            # How an asynchronous save begins a copy, before it copies the attributes.
            return source._with((), device=given.get("device") or source.device)
        if func is aten.zeros_like.default and given.get("device") is not None:
            # The same with a storage writer of the caller's, before it calls copy_.
            return source._with((), device=given["device"])
        if func is aten.copy_.default and source._takes(args):
            source._stretches = tuple(part.copied(source.device) for part in args[1]._stretches)
            return source
        # No TypeError, of which Tensor's operators make another one that says nothing.
        raise RuntimeError(source._refusal(str(func)))

    def _takes(self, args: Sequence[Any]) -> bool:
        """Whether a copy of another such tensor is to be its content: the optimizer's memory, if
        it shows that, is not written to."""
        return all(isinstance(arg, ShardedState) and arg.size() == self.size() for arg in args[:2])

    def _is_move(self, given: dict[str, Any]) -> bool:
        """Whether a copy is asked for that has its form."""
        same_dtype = given.get("dtype") in (None, self.dtype)
        return same_dtype and given.get("memory_format") in (None, torch.preserve_format)

    def _with(
        self, stretches: Sequence[Stretch], device: torch.device | str | None = None
    ) -> ShardedState:
        place = self.device if device is None else torch.device(device)
        twin = type(self)(self.size(), self.stride(), self.dtype, place, stretches)
        twin.is_loaded = self.is_loaded
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedState:
        twin = self.clone()
        assert isinstance(twin, ShardedState)
        memo[id(self)] = twin
        return twin

    def _no_memory(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(self._refusal("memory"))

    # They look for it without calling an operation; share_memory_ would end the process.
    numpy = __array__ = tolist = __dlpack__ = share_memory_ = _no_memory

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(self._refusal("pickle (torch.save)"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        ranges = ", ".join(f"{s.start}:{s.start + s.length}" for s in self._stretches)
        return (
            f"ShardedState(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"elements here: [{ranges}])"
        )

    def _refusal(self, call: str) -> str:
        shape = tuple(self.shape)
        return f"{call}: of this state tensor of shape {shape} a rank has only its shard: {REMEDY}"
