"""What saved files hold, each as if it were a rank."""

from __future__ import annotations

import importlib
import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusedshard.auditing.files import folders
from fusedshard.auditing.files.contents import Contents, UnusableFile, check_holds_state, find
from fusedshard.auditing.files.placing import list_arrays, place
from fusedshard.auditing.pieces import Inventory


def read(paths: Sequence[str | os.PathLike[str]]) -> tuple[list[Inventory], list[str]]:
    """What the files of a job's ranks hold, and what to call the files.

    Each path is a file that torch.save wrote, of one rank: an optimizer's state dict, a model's,
    or dicts that hold such. Files are read with ``weights_only=True``: nothing in them is run.

    - Copies: what all files have is compared.
    - Whole parameters spread over the files: state that is in some files only.
    - Pieces of parameters: where state is one-dimensional and shorter than its parameter, whose
      shape a model in one of the files must say, the files in their order hold consecutive
      stretches of it, as far as they go. A stretch with the bits of an earlier one, if not all
      its elements are the same, is taken for that one once more.
    - DTensors say themselves what they are.

    A folder that torch.distributed.checkpoint wrote is, alone, audited over its files: whether
    every element is there once. With other paths it counts as one file, whose whole tensors are
    read into memory.

    Raises:
        UnusableFile: a path holds no state, cannot be read without running code in it, or is of
            another model than the first.
    """
    places = [Path(path) for path in paths]
    _check_paths(places)
    if len(places) == 1 and places[0].is_dir():
        return folders.read(places[0])
    files = [_contents_of(path) for path in places]
    for path, contents in zip(places, files, strict=True):
        check_holds_state(path, contents)
    _check_alike(places, files)
    return place(list_arrays(files, [str(path) for path in places])), _short_names(places)


# -- reading --------------------------------------------------------------------------------------


def _check_paths(paths: Sequence[Path]) -> None:
    seen: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise UnusableFile(f"{path}: no such file or folder")
        if path.resolve() in seen:
            raise UnusableFile(f"{path}: got it twice, wanted a file for each rank")
        seen.add(path.resolve())


def _contents_of(path: Path) -> Contents:
    try:
        return find(_load(path))
    except UnusableFile:
        raise
    except Exception as error:  # it may hold anything
        reason = f"{type(error).__name__}: {error}"
        raise UnusableFile(f"{path}: cannot make sense of what it holds: {reason}") from error


def _load(path: Path) -> Any:
    if path.is_dir():
        return folders.load(path)
    if dist.is_available():
        importlib.import_module("torch.distributed.tensor")  # else DTensors are refused
    try:
        is_mappable = zipfile.is_zipfile(path)  # else a file of torch before 1.6
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mappable)
    except pickle.UnpicklingError as error:
        raise UnusableFile(f"{path}: {_why_refused(str(error))}") from None
    except (EOFError, OSError, RuntimeError, ValueError, LookupError, TypeError) as error:
        reason = str(error).partition(". ")[0] or type(error).__name__
        raise UnusableFile(f"{path}: cannot be read as a file of torch.save: {reason}") from None


def _why_refused(error: str) -> str:
    unsafe = re.search(r"(?i)unsupported (?:global|class):? (?:GLOBAL )?([\w.]+)", error)
    if unsafe is None:
        return "cannot be read as a file of torch.save"
    return (
        f"got a pickle with {unsafe[1]}, which only running code in it would load; wanted tensors, "
        "numbers, text, lists and dicts alone"
    )


def _short_names(paths: Sequence[Path]) -> list[str]:
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _check_alike(paths: Sequence[Path], files: Sequence[Contents]) -> None:
    """All of one model."""
    forms = [dict(_forms(contents)) for contents in files]
    firsts: dict[str, tuple[Path, Any]] = {}
    for path, form in zip(paths, forms, strict=True):
        for what, found in form.items():
            first, wanted = firsts.setdefault(what, (path, found))
            if found != wanted:
                raise UnusableFile(
                    f"{path}: {what}: got {_unlike(found, wanted)}, wanted "
                    f"{_unlike(wanted, found)}, as in {first}; all files must be of "
                    "one model, and number its parameters alike"
                )


def _forms(contents: Contents) -> Iterator[tuple[str, Any]]:
    for model, entries in contents.models.items():
        yield f"model {model}".strip(), {name: tuple(t.shape) for name, t in entries.items()}
    if contents.optimizers:
        yield "optimizers", dict.fromkeys(contents.optimizers, "present")
    for key, optimizer in contents.optimizers.items():
        if all(isinstance(number, int) for number in optimizer.keys):
            groups = [len(group) for group in optimizer.groups]
            yield f"optimizer {key}".strip(), {"parameters in groups": groups}


def _unlike(found: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first of what the other does not have."""
    for name, value in found.items():
        if other.get(name) != value:
            return f"{name or 'one'} {value}"
    return "no others"
