"""Which parameter of which model a saved optimizer's numbers mean."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from fusedshard.auditing.files.contents import Contents, Key, SavedOptimizer, is_buffer
from fusedshard.auditing.pieces import Index
from fusedshard.dense import is_wrapper

Names = dict[str, dict[Key, str]]  # by the optimizer's key and the parameter's
Shapes = Mapping[Key, set[Index]]
Ways = dict[str, dict[Key, str]]  # names by model, of those that fit
Fits = Callable[[set[Index], Index], bool]
Candidates = dict[str, Index]  # parameters of a model, in its order


def name_parameters(files: Sequence[Contents]) -> Names:
    """Names over all files, in the order of the optimizers.

    A number is named by a model in the files if its parameters' shapes leave one way alone to go
    through each group in the model's order. Else it is ``"parameter 3"``. Names that are not a
    model's have the optimizer's key before them, where there are several.
    """
    names: Names = {}
    models = _models(files)
    for optimizer in dict.fromkeys(key for file in files for key in file.optimizers):
        saved = [file.optimizers[optimizer] for file in files if optimizer in file.optimizers]
        keys = dict.fromkeys(key for one in saved for key in one.keys)
        given: dict[Key, str] = {key: key for key in keys if isinstance(key, str)}
        ways = _of_names(given, models) if given else _by_shapes(saved, models)
        prefix = f"{optimizer}: " if optimizer else ""
        named = {key: f"{prefix}parameter {key}" for key in keys}
        if len(ways) == 1:
            [(model, found)] = ways.items()
            named |= {key: full_name(model, name) for key, name in found.items()}
        elif given or ways:
            # An average of the weights is a second model with the same names.
            first = given or next(iter(ways.values()))
            if all(found == first for found in ways.values()):
                named |= {key: prefix + name for key, name in first.items()}
        names[optimizer] = named
    return _without_conflicts(names)


def full_name(model: str, name: str) -> str:
    """An entry's, where there are several models."""
    return f"{model}.{name}" if model else name


def _models(files: Sequence[Contents]) -> dict[str, Candidates]:
    """The parameters of each, tied ones once."""
    found: dict[str, Candidates] = {}
    for file in files:
        for model, entries in file.models.items():
            if model in found:
                continue
            seen = set()
            found[model] = {}
            for name, tensor in entries.items():
                memory = _memory(tensor)
                if memory not in seen and not is_buffer(name, tensor):
                    found[model][name] = tuple(tensor.shape)
                seen.add(memory)
    return found


def _memory(tensor: torch.Tensor) -> object:
    place = 0 if is_wrapper(tensor) else tensor.untyped_storage().data_ptr()
    return (place, tensor.storage_offset(), tensor.shape) if place else id(tensor)


def _of_names(given: dict[Key, str], models: Mapping[str, Candidates]) -> Ways:
    return {model: given for model, known in models.items() if set(given.values()) <= known.keys()}


def _by_shapes(saved: Sequence[SavedOptimizer], models: Mapping[str, Candidates]) -> Ways:
    shapes: defaultdict[Key, set[Index]] = defaultdict(set)
    for one in saved:
        for key, parts in one.state.items():
            shapes[key] |= {tuple(tensor.shape) for tensor in parts.values() if tensor.dim()}
    ways = {
        model: _match(saved[0].groups, shapes, candidates, _is_whole)
        or _match(saved[0].groups, shapes, candidates, _is_piece)
        for model, candidates in models.items()
    }
    return {model: names for model, names in ways.items() if names}


def _is_whole(state: set[Index], shape: Index) -> bool:
    return not state or shape in state


def _is_piece(state: set[Index], shape: Index) -> bool:
    return all(len(piece) == 1 and piece[0] <= math.prod(shape) for piece in state)


def _match(
    groups: Sequence[Sequence[Key]], shapes: Shapes, candidates: Candidates, fits: Fits
) -> dict[Key, str]:
    """Empty where none is certain."""
    names: dict[Key, str] = {}
    order = list(candidates)
    for group in groups:
        first = list(_first_way(group, shapes, order, candidates, fits))
        last = list(_first_way(group[::-1], shapes, order[::-1], candidates, fits))[::-1]
        if len(first) != len(group) or first != last:
            return {}
        names |= zip(group, first, strict=True)
    # Of parameters of one dimension state of another length is no piece, but another model's.
    is_credible = fits is _is_whole or any(len(candidates[n]) > 1 for n in names.values())
    return names if is_credible and len(set(names.values())) == len(names) else {}


def _first_way(
    group: Sequence[Key], shapes: Shapes, order: Sequence[str], candidates: Candidates, fits: Fits
) -> Iterator[str]:
    """As early as possible in the order; if this and the latest are one, there is no other."""
    left = iter(order)
    for key in group:
        fitting = (name for name in left if fits(shapes.get(key, set()), candidates[name]))
        name = next(fitting, None)
        if name is None:
            return
        yield name


def _without_conflicts(names: Names) -> Names:
    """Where two optimizers claim a parameter, neither is believed."""
    owners: defaultdict[str, list[str]] = defaultdict(list)
    for optimizer, named in names.items():
        for name in named.values():
            owners[name].append(optimizer)
    doubted = {o for claimed in owners.values() if len(claimed) > 1 for o in claimed}
    return {
        optimizer: {key: f"{optimizer}: parameter {key}" for key in named}
        if optimizer in doubted
        else named
        for optimizer, named in names.items()
    }
