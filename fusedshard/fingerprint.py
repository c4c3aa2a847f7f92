"""Are all ranks building the same optimizer? Compared at construction, before anything moves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fusedshard.comm import Communicator, describe_error, raise_shared
from fusedshard.params import iterate_params, parameter_labels

# What of a param group must agree between ranks; other keys are the user's own.
HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")


class Description(NamedTuple):
    """What must be the same on every rank: options, groups, and each parameter, as text."""

    options: list[str]
    groups: list[str]
    params: list[str]

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()


def agree_on_groups(
    comm: Communicator,
    error: Exception | None,
    options: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    first_param: int = 0,
) -> None:
    """Raise on every rank if one of them brings an error, or other options or groups than rank 0.

    Collective. Parameters are numbered from ``first_param`` in messages.
    """
    description = None if error else describe(options, groups, first_param)
    digest = description.digest if description else ""
    answers = comm.gather_objects((describe_error(error), digest))
    raise_shared(error, [failure for failure, _ in answers])
    if len({digest for _, digest in answers}) > 1:
        descriptions = [d for d in comm.gather_objects(description) if d is not None]
        difference = first_difference(descriptions)
        raise ValueError(f"params: the ranks build different optimizers: {difference}")


def describe(
    options: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], first_param: int = 0
) -> Description:
    """Describe an optimizer's options and param groups; parameters are numbered from
    ``first_param``."""
    group_of = [index for index, group in enumerate(groups) for _ in group["params"]]
    labels = parameter_labels(groups, first_param)
    params = [
        f"{label}: {_describe_param(param)}, group {group}"
        for label, param, group in zip(labels, iterate_params(groups), group_of, strict=True)
    ]
    settings = [f"{key}={value!r}" for key, value in sorted(options.items())]
    hyper = [
        f"param_groups[{index}]['{key}']={plain(group[key])!r}"
        for index, group in enumerate(groups)
        for key in HYPERPARAMETERS
    ]
    return Description(settings, hyper, params)


def first_difference(descriptions: Sequence[Description]) -> str | None:
    """In words, the first way in which a rank differs from rank 0; None if all are alike."""
    reference = descriptions[0]
    for rank, other in enumerate(descriptions):
        if other == reference:
            continue
        counts = f"{len(other.params)} parameters on rank {rank}, {len(reference.params)} on rank 0"
        for ours, theirs in zip(other.params, reference.params, strict=False):
            if ours != theirs:
                return f"rank {rank} has {ours}; rank 0 has {theirs} ({counts})"
        if len(other.params) != len(reference.params):
            longer = max(other.params, reference.params, key=len)
            extra = longer[min(len(other.params), len(reference.params))]
            return f"{counts}; the first that one of them lacks is {extra}"
        return (
            f"rank {rank} has {_unlike(other, reference)}; rank 0 has {_unlike(reference, other)}"
        )
    return None


def _unlike(description: Description, other: Description) -> str:
    """The options and group settings of the first that the second has not."""
    theirs = {*other.options, *other.groups}
    return ", ".join(
        item for item in (*description.options, *description.groups) if item not in theirs
    )


def _describe_param(param: torch.Tensor) -> str:
    kind = str(param.dtype).removeprefix("torch.")
    frozen = "" if param.requires_grad else ", requires_grad=False"
    # Only the type of device: each rank has a GPU of its own.
    kind += "" if param.device.type == "cpu" else f" on {param.device.type}"
    return f"{kind}, shape {tuple(param.shape)}, strides {tuple(param.stride())}{frozen}"


def plain(value: Any) -> Any:
    """A hyperparameter as numbers, since a tensor's text names its device and rounds."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return tuple(map(plain, value)) if isinstance(value, (tuple, list)) else value
