"""Folders that torch.distributed.checkpoint wrote, read without running what they hold."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fusedshard.auditing.files.contents import UnusableFile, check_holds_state, find
from fusedshard.auditing.files.placing import list_arrays
from fusedshard.auditing.pieces import PARAM, Held, Index, Inventory, ParamInfo, Piece, dtype_name

INDEX = ".metadata"
# What an index is made of: its pickle may name nothing else.
CLASSES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}
# What a chunk that cannot be read may raise.
BROKEN = (pickle.UnpicklingError, EOFError, OSError, RuntimeError, ValueError, LookupError)


def read(path: Path) -> tuple[list[Inventory], list[str]]:
    """What each file in a folder holds, and its name; what cannot be read is not held. One chunk
    at a time is in memory."""
    folder = _Folder(path)
    wholes = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
        for name, stored in folder.tensors.items()
    }
    contents = find(folder.nested(wholes))
    check_holds_state(path, contents)
    listing = list_arrays([contents], [str(path)])
    arrays = {id(in_files[0]): array for array, in_files in listing.arrays.items()}
    others = [name for name, whole in wholes.items() if id(whole) not in arrays]
    params = [*listing.params, *(ParamInfo(n, tuple(wholes[n].shape), False) for n in others)]
    held: dict[str, list[Held]] = {file: [] for file in folder.files}
    for name, whole in wholes.items():
        array = arrays.get(id(whole), (name, PARAM))
        sound = [c for c in folder.tensors[name].chunks if folder.chunk(name, c) is not None]
        for chunk in sound if whole.numel() else ():
            box = tuple(chunk.offsets), tuple(chunk.sizes)
            held[folder.file_of(name, chunk)].append(_held(array, whole, *box))
        if whole.numel() and not sound:
            held[folder.files[0]].append(_nothing(array, whole))
    names = [file + folder.trouble(file) for file in folder.files]
    return [Inventory(params, ours, (), listing.buffers) for ours in held.values()], names


def _held(array: tuple[str, str], whole: torch.Tensor, offset: Index, size: Index) -> Held:
    dtype = dtype_name(whole.dtype)
    piece = Piece(*array, tuple(whole.shape), offset, size, dtype, 1, tuple(whole.stride()))
    # There is no copy to compare its bits with, so that they need not stay.
    return Held(piece, torch.empty(0, dtype=whole.dtype))


def _nothing(array: tuple[str, str], whole: torch.Tensor) -> Held:
    """None of an array, so that all of it is found to be missing."""
    whole = whole.reshape(1) if whole.dim() == 0 else whole
    nowhere = (0,) * whole.dim()
    return _held(array, whole, nowhere, nowhere)


def load(path: Path) -> Any:
    """What was saved, as nested dicts of whole tensors.

    Raises:
        UnusableFile: some of it cannot be read.
    """
    folder = _Folder(path)
    return folder.nested({name: _whole(folder, name) for name in folder.tensors})


def _whole(folder: _Folder, name: str) -> torch.Tensor:
    stored = folder.tensors[name]
    whole = torch.empty(stored.size, dtype=stored.properties.dtype)
    missing = whole.numel()
    for chunk in stored.chunks:
        found = folder.chunk(name, chunk)
        if found is not None:
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[box] = found
            missing -= found.numel()
    if missing:
        raise UnusableFile(
            f"{folder.path}: {name}: got other elements than each once, wanted a folder that is "
            "whole; audited alone, it is said what is wrong"
        )
    return whole


class _Folder:
    """A checkpoint's index, and its files.

    Attributes:
        path: of the folder.
        tensors: what the index says of each, by name.
        files: names of those that should be there, in their numbers' order.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        index = _read_index(path)
        self._paths = index.planner_data or {}
        self._stored = {(i.fqn, i.offset): info for i, info in index.storage_data.items()}
        items = index.state_dict_metadata
        self.tensors = {name: item for name, item in items.items() if hasattr(item, "chunks")}
        self._others = [name for name in items if name not in self.tensors]
        infos = self._stored.values()
        self.files = sorted({info.relative_path for info in infos}, key=_numbers_in)
        self._broken: set[str] = set()

    def nested(self, tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
        """As they were saved, with what names an optimizer's parameters."""
        tree: dict[Any, Any] = {}
        for name, tensor in tensors.items():
            _insert(tree, self._paths.get(name, (name,)), tensor)
        for name in self._others:
            place = self._paths.get(name, (name,))
            if "param_groups" in place:
                _insert(tree, place, self._load(self._stored.get((name, None))))
        return tree

    def file_of(self, name: str, chunk: Any) -> str:
        """Empty where the index does not say."""
        info = self._stored.get((name, chunk.offsets))
        return info.relative_path if info else ""

    def chunk(self, name: str, chunk: Any) -> torch.Tensor | None:
        """None where it cannot be read, or is not what the index says."""
        found = self._load(self._stored.get((name, chunk.offsets)))
        is_sound = (
            isinstance(found, torch.Tensor)
            and found.shape == chunk.sizes
            and found.dtype == self.tensors[name].properties.dtype
        )
        if not is_sound:
            self._broken.add(self.file_of(name, chunk))
        return found if is_sound else None

    def trouble(self, file: str) -> str:
        """What is wrong with a file, after all its chunks were read."""
        path = self.path / file
        if not path.exists():
            return " (missing)"
        ends = [i.offset + i.length for i in self._stored.values() if i.relative_path == file]
        if path.stat().st_size < max(ends):
            return f" ({path.stat().st_size} of {max(ends)} bytes)"
        return " (damaged)" if file in self._broken else ""

    def _load(self, info: Any) -> Any:
        if info is None:
            return None
        if getattr(info, "transform_descriptors", None):
            raise UnusableFile(
                f"{self.path}: got files written with {', '.join(info.transform_descriptors)}, "
                "wanted plain ones"
            )
        try:
            with (self.path / info.relative_path).open("rb") as file:
                file.seek(info.offset)
                content = io.BytesIO(file.read(info.length))
            return torch.load(content, map_location="cpu", weights_only=True)
        except BROKEN:
            return None


def _numbers_in(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]


def _insert(tree: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _read_index(path: Path) -> Any:
    try:
        with (path / INDEX).open("rb") as file:
            index = _IndexUnpickler(file).load()
    except FileNotFoundError:
        raise UnusableFile(
            f"{path}: got a folder without {INDEX}, wanted one that torch.distributed.checkpoint "
            "wrote, or files"
        ) from None
    except (*BROKEN, TypeError, AttributeError) as error:
        raise UnusableFile(f"{path / INDEX}: cannot be read: {error}") from None
    if not hasattr(index, "state_dict_metadata") or index.storage_data is None:
        raise UnusableFile(f"{path / INDEX}: got no index of a checkpoint")
    return index


class _IndexUnpickler(pickle.Unpickler):
    """Of the classes of an index alone, so that reading one runs nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"got {module}.{name}, wanted what an index is made of")
        return super().find_class(module, name)
