"""From the contents of files to what each holds of which array."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from fusedshard.auditing.files.contents import Contents, UnusableFile, is_buffer
from fusedshard.auditing.files.dtensors import held_in_dtensor, is_dtensor
from fusedshard.auditing.files.naming import Names, full_name, name_parameters
from fusedshard.auditing.inventory import held_in
from fusedshard.auditing.pieces import PARAM, Held, Index, Inventory, ParamInfo, stretch
from fusedshard.checkpoint import MASTERS, MOMENTS

# State with an element for each of the parameter's, as torch's optimizers call it.
ELEMENTWISE = {*MOMENTS, MASTERS, "momentum_buffer", "exp_inf", "square_avg", "acc_delta", "sum"}

InFiles = dict[int, torch.Tensor]  # of one array, by the file's number


class Listing(NamedTuple):
    """What files hold together.

    Attributes:
        params: of all models and optimizers.
        buffers: names of those that are no parameters.
        arrays: by parameter and part.
        files: what they are called.
    """

    params: Sequence[ParamInfo]
    buffers: frozenset[str]
    arrays: dict[tuple[str, str], InFiles]
    files: Sequence[str]


def list_arrays(files: Sequence[Contents], called: Sequence[str]) -> Listing:
    names = name_parameters(files)
    arrays: dict[tuple[str, str], InFiles] = {}
    for number, file in enumerate(files):
        for param, part, tensor in [*_of_models(file), *_of_optimizers(file, names)]:
            arrays.setdefault((param, part), {})[number] = tensor
    trained = dict.fromkeys(name for named in names.values() for name in named.values())
    of_models = [param for param, part in arrays if part == PARAM]
    shapes = _shapes(arrays)
    params = [
        ParamInfo(name, shapes.get(name, ()), name in trained)
        for name in dict.fromkeys([*of_models, *trained])
    ]
    buffers = {
        full_name(model, name)
        for file in files
        for model, entries in file.models.items()
        for name, tensor in entries.items()
        if is_buffer(name, tensor)
    }
    return Listing(params, frozenset(buffers - trained.keys()), arrays, called)


def place(listing: Listing) -> list[Inventory]:
    """What each file holds of the arrays."""
    shapes = {info.name: info.shape for info in listing.params}
    held: list[list[Held]] = [[] for _ in listing.files]
    is_spread = _is_spread(listing)
    for (param, part), in_files in listing.arrays.items():
        numel = math.prod(shapes[param])
        is_known = (param, PARAM) in listing.arrays and part != PARAM
        if is_known and _are_stretches(part, in_files, shapes[param]):
            for number, start in starts_of(in_files, numel).items():
                held[number].append(stretch(param, part, in_files[number], start, numel))
        else:
            of_all = len(in_files) if part == PARAM else len(listing.files)
            copies = 1 if is_spread and part != PARAM else of_all
            for number, tensor in in_files.items():
                held[number] += _held(listing, number, (param, part), tensor, copies)
    return [
        Inventory(listing.params, ours, (), listing.buffers, is_spread)
        for ours in _without_empty(held)
    ]


def _without_empty(held: Sequence[Sequence[Held]]) -> Iterator[list[Held]]:
    """Pieces without elements are left out, but where all of an array are and should not be."""
    present = {item.piece.array for ours in held for item in ours if item.piece.numel}
    for ours in held:
        yield [
            item
            for item in ours
            if item.piece.numel or (item.piece.whole_numel and item.piece.array not in present)
        ]


def _held(
    listing: Listing, number: int, array: tuple[str, str], tensor: torch.Tensor, copies: int
) -> Sequence[Held]:
    ranks = range(len(listing.files))
    try:
        if is_dtensor(tensor):
            return held_in_dtensor(*array, tensor, len(ranks))
        return held_in(*array, tensor, ranks, copies)
    except TypeError as error:
        raise UnusableFile(f"{listing.files[number]}: {error}") from None


def starts_of(in_files: InFiles, numel: int) -> dict[int, int]:
    """Where in an array of ``numel`` elements the stretches in the files begin, if each follows
    the one before. One that would go beyond the end lies before it; one that repeats another lies
    where that does."""
    total = sum(len(piece) for piece in in_files.values())
    starts: dict[int, int] = {}
    at = 0
    for number, piece in in_files.items():
        twin = next((n for n in starts if _is_copy(in_files[n], piece)), None)
        starts[number] = min(at, max(0, numel - len(piece))) if twin is None else starts[twin]
        if twin is None or total <= numel:  # then it has another's place
            at += len(piece)
    return starts


def _is_copy(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Not where all elements are one number, which state is before a parameter has been used."""
    is_copy = first.dtype == second.dtype and torch.equal(first, second)
    return is_copy and not bool((first == first[:1]).all())


def _are_stretches(part: str, in_files: InFiles, shape: Index) -> bool:
    """Whether tensors are 1-D pieces of an array of the parameter's shape, one after another."""
    tensors = list(in_files.values())
    numel = math.prod(shape)
    if any(tensor.dim() != 1 or is_dtensor(tensor) for tensor in tensors):
        return False
    lengths = [len(tensor) for tensor in tensors]
    if sum(lengths) == numel:
        return len(lengths) > 1 or len(shape) != 1
    return part in ELEMENTWISE and all(length < numel for length in lengths)


def _of_models(file: Contents) -> Iterator[tuple[str, str, torch.Tensor]]:
    for model, entries in file.models.items():
        for name, tensor in entries.items():
            yield full_name(model, name), PARAM, tensor


def _of_optimizers(file: Contents, names: Names) -> Iterator[tuple[str, str, torch.Tensor]]:
    for optimizer, saved in file.optimizers.items():
        for key, parts in saved.state.items():
            for part, tensor in parts.items():
                yield names[optimizer][key], part, tensor


def _shapes(arrays: Mapping[tuple[str, str], InFiles]) -> dict[str, Index]:
    """The model's, else that of state with an element for each of the parameter's, else any."""
    shapes: dict[str, Index] = {}
    for trusted in ({PARAM}, ELEMENTWISE, {part for _, part in arrays}):
        for (param, part), in_files in arrays.items():
            shape = tuple(next(iter(in_files.values())).shape)
            if part in trusted and shape:
                shapes.setdefault(param, shape)
    return shapes


def _is_spread(listing: Listing) -> bool:
    """Whether whole parameters are spread over the files: most state is in one of them alone, and
    not all of it in the same."""
    holders: dict[str, set[int]] = {}
    for (param, part), in_files in listing.arrays.items():
        if part != PARAM:
            holders.setdefault(param, set()).update(in_files)
    counts = Counter(len(numbers) for numbers in holders.values())
    is_usual = bool(counts) and counts.most_common(1)[0][0] == 1
    return is_usual and len(set().union(*holders.values())) > 1
