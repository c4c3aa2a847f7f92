"""What a rank holds of parameters and optimizer state, whatever kind of optimizer it is."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from fusedshard.auditing import own
from fusedshard.auditing.pieces import (
    PARAM,
    Held,
    Inventory,
    ParamInfo,
    box,
    whole,
)
from fusedshard.dense import is_wrapper
from fusedshard.params import iterate_params, parameter_names
from fusedshard.state import ShardedOptimizer

Names = dict[torch.Tensor, str]


def take(optimizer: Any, model: Any, ranks: Sequence[int]) -> Inventory:
    """List what this rank holds. Without communication.

    Args:
        ranks: those that are audited, by their numbers in the default group.

    Raises:
        TypeError: ``optimizer`` is no torch.optim.Optimizer, ``model`` no module, or parameters
            are of a kind that cannot be audited.
    """
    _check_kinds(optimizer, model)
    world_size = len(ranks)
    names = _names(optimizer, model)
    groups = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    params = [
        ParamInfo(n, tuple(p.shape), p.requires_grad and p in groups, groups.get(p, 0))
        for p, n in names.items()
    ]
    held = [h for p, n in names.items() for h in held_in(n, PARAM, p, ranks, world_size)]
    is_zero, expected = is_zero_redundancy(optimizer), own.expected_state(optimizer, names)
    if isinstance(optimizer, ShardedOptimizer):
        held += own.held_state(optimizer, names)
    else:
        copies = 1 if is_zero else world_size
        for param, state in _state_of(optimizer).items():
            if param in names:
                # Numbers with fractions are a rank's own, as the last loss that LBFGS has seen.
                for part, value in leaves(_without_floats(state)):
                    held += held_in(names[param], part, value, ranks, copies)
    held += [h for item in _settings(optimizer) for h in held_in(*item, ranks, world_size)]
    buffers = dict(_buffers(model))
    params += [ParamInfo(name, tuple(buffer.shape), False) for name, buffer in buffers.items()]
    for name, buffer in buffers.items():
        held += held_in(name, PARAM, buffer, ranks, world_size)
    present = tuple(item for item in held if item.piece.numel)
    return Inventory(tuple(params), present, expected, frozenset(buffers), is_zero)


def is_zero_redundancy(optimizer: Any) -> bool:
    # Where nobody has imported it none can be one; importing it takes seconds, and warns.
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def _check_kinds(optimizer: Any, model: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer: got {type(optimizer).__name__}, wanted a torch.optim.Optimizer"
        )
    if not (model is None or isinstance(model, torch.nn.Module)):
        raise TypeError(f"model: got {type(model).__name__}, wanted a torch.nn.Module or None")


def _names(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> Names:
    """Every parameter once: the model's, and then what else the optimizer has."""
    names: Names = {}
    if model is not None:
        _reshard(model)
        named = _unwrapped(model).named_parameters()
        names.update((param, _plain_name(name)) for name, param in named)
    params = iterate_params(optimizer.param_groups)
    for param, name in zip(params, parameter_names(optimizer.param_groups), strict=True):
        if param not in names:
            names[param] = _unused(name, names.values())
    for tensor, name in names.items():
        if getattr(tensor, "_is_flat_param", False) or hasattr(tensor, "_fsdp_flattened"):
            raise TypeError(
                f"{name}: got a parameter of FullyShardedDataParallel, wanted plain ones or those "
                "of FSDP2 (fully_shard)"
            )
    return names


def _unused(name: str, taken: Collection[str]) -> str:
    """Two models may call their parameters alike."""
    number = itertools.count(2)
    unused = name
    while unused in taken:
        unused = f"{name} ({next(number)})"
    return unused


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _reshard(model: torch.nn.Module) -> None:
    """Show FSDP2's own parameters where a forward without backward has left gathered ones in their
    place, as its ``state_dict`` does."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def _plain_name(name: str) -> str:
    """Without what torch.compile puts before it."""
    return name.replace("_orig_mod.", "")


def _buffers(model: torch.nn.Module | None) -> Iterator[tuple[str, torch.Tensor]]:
    if model is not None:
        for name, buffer in _unwrapped(model).named_buffers():
            yield _plain_name(name), buffer


def _settings(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Numbers among the hyperparameters of each param group."""
    for index, group in enumerate(optimizer.param_groups):
        others = {key: value for key, value in group.items() if key != "params"}
        for part, value in leaves(others):
            yield f"param_groups[{index}]", part, value


def _state_of(optimizer: Any) -> Mapping[Any, Mapping[str, Any]]:
    """By parameter, of what this rank holds."""
    if is_zero_redundancy(optimizer):
        # Its own is filled by consolidate_state_dict only; before the first step there is none.
        optimizer = getattr(optimizer, "optim", optimizer)
    state: Mapping[Any, Mapping[str, Any]] = optimizer.state
    return state


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors and numbers, by name; in lists and dicts by ``name.key``."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (bool, int, float)):
        yield name, torch.tensor(value, dtype=_number_dtype(value), device="cpu")
    elif isinstance(value, (Mapping, list, tuple)):
        items: Iterable[tuple[Any, Any]] = (
            value.items() if isinstance(value, Mapping) else enumerate(value)
        )
        for key, item in items:
            yield from leaves(item, f"{name}.{key}" if name else str(key))


def _without_floats(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_floats(v) for k, v in value.items() if not isinstance(v, float)}
    if isinstance(value, (list, tuple)):
        return [_without_floats(item) for item in value if not isinstance(item, float)]
    return value


def _number_dtype(value: float) -> torch.dtype:
    return torch.float64 if isinstance(value, float) else torch.int64


def held_in(
    param: str, part: str, tensor: torch.Tensor, ranks: Collection[int], copies: int
) -> Sequence[Held]:
    """The pieces of an array that lie in a tensor: if plain, one, of which there must be so many
    copies on the ``ranks``, which are numbered as in meshes."""
    tensor = tensor.detach()
    if hasattr(tensor, "placements") and hasattr(tensor, "__create_chunk_list__"):
        return _held_of_dtensor(param, part, tensor, ranks)
    if is_wrapper(tensor) and hasattr(tensor, "__tensor_flatten__"):
        inner, _ = tensor.__tensor_flatten__()
        parts = [(f"{part}.{name}", getattr(tensor, name)) for name in inner]
        return [h for p, value in parts for h in held_in(param, p, value, ranks, copies)]
    if is_wrapper(tensor) or tensor.is_quantized or tensor.device.type == "meta":
        kind = f"{type(tensor).__name__} on {tensor.device}"
        raise TypeError(f"{part} of {param}: got a {kind}, wanted a tensor with memory of its own")
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return [whole(param, part, tensor, copies)]


def _held_of_dtensor(param: str, part: str, tensor: Any, ranks: Collection[int]) -> Sequence[Held]:
    """What this rank has of a distributed tensor, whose placements say in how many copies."""
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise TypeError(f"{part} of {param}: got a DTensor of partial sums, wanted no such")
    shards = math.prod(
        mesh.size(dim) for dim, placement in enumerate(placements) if not placement.is_replicate()
    )
    all_of_mesh = set(mesh.mesh.flatten().tolist()) <= set(ranks)
    local = tensor.to_local()
    local = local.wait() if hasattr(local, "wait") else local
    held = []
    for chunk in tensor.__create_chunk_list__() if local.numel() else ():
        offset, size = tuple(chunk.offsets), tuple(chunk.sizes)
        if tuple(local.shape) != size:
            raise TypeError(
                f"{part} of {param}: got a local shard of shape {tuple(local.shape)} for a chunk "
                f"of {size}, wanted one chunk a rank"
            )
        copies = len(ranks) // shards if all_of_mesh else 0
        held.append(box(param, part, tuple(tensor.shape), offset, local, copies))
    return held
