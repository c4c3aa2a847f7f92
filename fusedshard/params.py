"""What the optimizer asks of a parameter and of its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fusedshard.dense import is_dense, is_wrapper, shows_its_memory
from fusedshard.kernels import SUPPORTED_DTYPES, check_device
from fusedshard.layout import ParamSpec
from fusedshard.precision import Precision

# Complex ones are trained as twice as many reals.
TRAINABLE_DTYPES = (*SUPPORTED_DTYPES, torch.complex64, torch.complex128)
KEEP_PARAMETERS = (
    "build the optimizer after model.to(...), and copy into a parameter instead of replacing p.data"
)


def reject_sets(params: Any) -> Any:
    """Raise TypeError for a set of parameters: each process would iterate it in its own order."""
    if isinstance(params, (set, frozenset)):
        raise TypeError("params: got a set, whose order differs between processes; wanted a list")
    return params


def iterate_params(groups: Iterable[Mapping[str, Any]]) -> list[torch.nn.Parameter]:
    """The parameters of param groups, in the order in which torch numbers them."""
    return [param for group in groups for param in group["params"]]


def parameter_labels(groups: Iterable[Mapping[str, Any]], first: int = 0) -> list[str]:
    """A name for each parameter, for messages: its number, counted from ``first``, and its own
    name where the optimizer was given one."""
    return [
        f"parameter {index}" + (f" ({name!r})" if name else "")
        for index, name in enumerate(_given_names(groups), first)
    ]


def parameter_names(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """The name that the optimizer was given for each parameter, else its number."""
    return [name or f"parameter {index}" for index, name in enumerate(_given_names(groups))]


def _given_names(groups: Iterable[Mapping[str, Any]]) -> list[str | None]:
    names: list[str | None] = []
    for group in groups:
        names += group.get("param_names") or [None] * len(group["params"])
    return names


Labelled = tuple[str, torch.Tensor]


def check_params(
    groups: Sequence[Mapping[str, Any]],
    first: int,
    device: torch.device | None,
    known: Sequence[Labelled] = (),
) -> None:
    """Raise, naming the parameter, for one that cannot be trained here, or lies on another device
    than ``device`` (None: than the first one), or shares memory with another or a ``known`` one.

    Frozen parameters may be anything, and share memory among each other: `check_param` and
    `check_apart` are for them when they thaw.
    """
    labels = parameter_labels(groups, first)
    seen: set[torch.nn.Parameter] = set()
    training: list[Labelled] = []
    others = list(known)
    for label, param in zip(labels, iterate_params(groups), strict=True):
        if param in seen:
            raise ValueError(f"{label}: got the same parameter twice in one group, wanted it once")
        seen.add(param)
        if param.requires_grad:
            device = device or param.device
            check_param(label, param, device)
        (training if param.requires_grad else others).append((label, param))
    check_apart(training, others)


def check_param(label: str, param: torch.Tensor, device: torch.device) -> None:
    """Raise for a parameter that cannot be moved into flat memory on ``device``."""
    check_device(label, param.device)
    if param.device != device:
        raise ValueError(
            f"{label}: got device {param.device}, wanted {device} as the others: use one "
            "optimizer a device"
        )
    if is_wrapper(param) or getattr(param, "_is_flat_param", False):
        raise TypeError(
            f"{label}: got a {type(param).__name__} without memory of its own (DTensor, FSDP, "
            "or a tensor subclass that wraps others), wanted a plain parameter"
        )
    if param.dtype not in TRAINABLE_DTYPES:
        wanted = " or ".join(map(str, TRAINABLE_DTYPES))
        raise TypeError(f"{label}: got {param.dtype}, wanted {wanted}")
    if not is_dense(param):
        raise ValueError(
            f"{label}: got shape {tuple(param.shape)} with strides {param.stride()}, wanted "
            "elements that fill their memory without gaps or overlaps: pass a contiguous copy"
        )


def check_apart(moving: Sequence[Labelled], others: Sequence[Labelled]) -> None:
    """Raise ValueError where a parameter that moves into flat memory shares its memory with another
    that does, or with one of ``others``."""
    spans = [(*_span(param), label, True) for label, param in moving if param.numel()]
    spans += [
        (*_span(param), label, False)
        for label, param in others
        if param.numel() and not is_wrapper(param) and param.layout == torch.strided
    ]
    end, last, last_moves = 0, "", False
    for start, stop, label, moves in sorted(spans):
        if start < end and (moves or last_moves):
            raise ValueError(
                f"{label}: shares memory with {last}, which flat memory would end: to tie "
                "weights, use one Parameter object in both places"
            )
        if stop > end:
            end, last, last_moves = stop, label, moves


def _span(param: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first element and behind the last."""
    reach = sum(s * (n - 1) for s, n in zip(param.stride(), param.size(), strict=True))
    start = param.data_ptr()
    return start, start + (reach + 1) * param.element_size()


def form_of(param: torch.Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    """What must not change while an optimizer holds a parameter."""
    return param.dtype, param.size(), param.stride()


def check_form(label: str, param: torch.Tensor, form: Any) -> None:
    """Raise RuntimeError where a parameter has another form than ``form_of`` said once."""
    if form_of(param) != form:
        raise RuntimeError(
            f"{label}: cast or reshaped after the optimizer was built (got "
            f"{', '.join(map(str, form_of(param)))}, wanted {', '.join(map(str, form))}): "
            f"{KEEP_PARAMETERS}"
        )


def spec_of(index: int, param: torch.Tensor, precision: Precision) -> ParamSpec:
    """What the layout needs to know of parameter ``index``: those with moments of different dtypes
    are of different kinds."""
    moments = precision.moments_of(param)
    names = [str(dtype).removeprefix("torch.") for dtype in (param.dtype, moments)]
    itemsize = param.dtype.to_real().itemsize
    kind = f"{names[0]}/{names[1]}@{param.device}"
    return ParamSpec(index, param.nbytes // itemsize, kind, itemsize, precision.block_of(param))


def version_of(tensor: torch.Tensor) -> int:
    """How often it was changed, as far as autograd has counted that; tensors of inference mode
    count none."""
    return -1 if tensor.is_inference() else tensor._version


def check_gradient(label: str, param: torch.Tensor) -> bool:
    """Whether a parameter has a gradient.

    Raises:
        RuntimeError: it has one that cannot be averaged: sparse, of another type, shape or device.
    """
    grad = param.grad
    if grad is None:
        return False
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"{label}: got a gradient of layout {grad.layout}, wanted a dense one: sparse "
            "gradients are not supported (build the embedding with sparse=False)"
        )
    if is_wrapper(grad):
        raise RuntimeError(
            f"{label}: got a gradient of type {type(grad).__name__}, wanted a plain tensor"
        )
    if grad.size() != param.size() or grad.device != param.device:
        raise RuntimeError(
            f"{label}: got a gradient of shape {tuple(grad.shape)} on {grad.device}, wanted "
            f"{tuple(param.shape)} on {param.device}"
        )
    return True


def dense_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """The gradient, which passed `check_gradient`, in the parameter's storage order and dtype:
    ``p.grad`` itself where it is so already, else a copy."""
    grad = param.grad
    if grad is None:
        return None
    if grad.stride() == param.stride() and grad.dtype == param.dtype and shows_its_memory(grad):
        return grad
    return torch.empty_strided(
        param.size(), param.stride(), dtype=param.dtype, device=param.device
    ).copy_(grad)


def store_gradient(param: torch.Tensor, mean: torch.Tensor) -> None:
    """Make ``p.grad`` hold ``mean``: in place, or as a new tensor where its elements share
    memory, as those of an expanded one."""
    if param.grad is not None and is_dense(param.grad):
        param.grad.copy_(mean)
    else:
        param.grad = mean.to(getattr(param, "grad_dtype", None) or param.dtype)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor, uint8."""
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def in_storage_order(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor as one dimension of reals, in the order in which they lie in memory."""
    numbers = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return numbers.view(tensor.dtype.to_real())
