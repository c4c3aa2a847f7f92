"""A model's parameters: names, shapes and dtypes, of a file or of a transformer of some size."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusedshard.planning.sizes import MOST_PARAMETERS

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_NAMES = {
    **DTYPES,
    **{str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()},
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
}
# Of numbers that are not trained: masks, positions.
_UNTRAINED = re.compile(r"(bool|u?int(8|16|32|64)|[iu](8|16|32|64))", re.IGNORECASE)
_MOST_HEADER = 100_000_000  # bytes, as in safetensors

VOCABULARY = 50_304
WIDTH_STEP = 128  # of transformers' widths; they have as many layers as such steps, or nearly


_ZIP = b"PK\x03\x04"  # how torch.save's files begin


class UnusableModel(ValueError):
    """A file that does not say what a model's parameters are."""


class Parameter(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def block(self) -> str | None:
        """What it lies in of what comes many times, as ``"layers.3"``: its name up to the first
        number."""
        match = re.match(r"(.*?\b\d+)\.", self.name)
        return None if match is None else match[1]


@dataclass(frozen=True)
class Model:
    """
    Attributes:
        parameters: in their order.
        origin: where they are from, in words.
    """

    parameters: tuple[Parameter, ...]
    origin: str

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Each once."""
        return list(dict.fromkeys(parameter.dtype for parameter in self.parameters))


def transformer(numel: int, dtype: torch.dtype) -> Model:
    """A decoder-only transformer with ``numel`` parameters: about as many layers as its width has
    steps of `WIDTH_STEP`, and one tensor of what that leaves."""
    steps = 0
    while _layers_of((steps + 1) * WIDTH_STEP, numel) > steps:
        steps += 1
    width = steps * WIDTH_STEP
    layers = _layers_of(width, numel) if steps else 0
    shapes: dict[str, tuple[int, ...]] = {}
    if layers:
        shapes["embedding.weight"] = (VOCABULARY, width)
    for layer in range(layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer(width).items()}
    if layers:
        shapes["norm.weight"] = (width,)
    rest = numel - sum(math.prod(shape) for shape in shapes.values())
    parameters = [Parameter(name, shape, dtype) for name, shape in shapes.items()]
    words = f"one tensor of {rest:,}"
    if layers:
        words = f"{layers} layers of width {width:,}, vocabulary {VOCABULARY:,} (tied)"
        words += f", and one tensor of the remaining {rest:,}" if rest else ""
    if rest:
        parameters.append(Parameter("rest", (rest,), dtype))
    return Model(tuple(parameters), f"decoder-only transformer: {words}")


def _layer(width: int) -> dict[str, tuple[int, ...]]:
    return {
        "attention_norm.weight": (width,),
        "attention.qkv.weight": (3 * width, width),
        "attention.out.weight": (width, width),
        "mlp_norm.weight": (width,),
        "mlp.up.weight": (4 * width, width),
        "mlp.down.weight": (width, 4 * width),
    }


def _layers_of(width: int, numel: int) -> int:
    """How many fit."""
    layer = sum(math.prod(shape) for shape in _layer(width).values())
    return (numel - (VOCABULARY + 1) * width) // layer


def read(path: Path, dtype: torch.dtype | None) -> Model:
    """Those that a file names: safetensors, its index, or JSON.

    Args:
        path: of it.
        dtype: of all parameters, whatever the file says; None: as it says, and bf16 where it says
            nothing.

    Raises:
        UnusableModel: naming the file, what it has, and what was wanted.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        begins = file.read(9)
        # Such a header is JSON, behind its length.
        is_safetensors = path.suffix == ".safetensors" or begins[8:] == b"{" != begins[:1]
        text = b"" if is_safetensors else begins + file.read(_MOST_HEADER)
    if is_safetensors:
        entries = _header(path)
    else:
        entries = _json(path, text)
        if "weight_map" in entries:
            entries = _of_shards(path, entries["weight_map"])
    found = [_parameter(path, name, entry, dtype) for name, entry in entries.items()]
    parameters = tuple(parameter for parameter in found if parameter is not None)
    numel = sum(parameter.numel for parameter in parameters)
    if not 1 <= numel <= MOST_PARAMETERS:
        raise UnusableModel(f"{path}: got {numel:,} parameters, wanted 1 to {MOST_PARAMETERS:,}")
    left_out = len(found) - len(parameters)
    note = f", without {left_out} of integers" if left_out else ""
    return Model(parameters, f"{path.name}{note}")


def _of_shards(path: Path, weight_map: Any) -> dict[str, Any]:
    """The entries of an index, from the headers of the files beside it."""
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and Path(file).name == file and file.isprintable()
        for file in weight_map.values()
    ):
        raise UnusableModel(f"{path}: weight_map: wanted for each name a file beside the index")
    headers = {file: _header(path.parent / file) for file in dict.fromkeys(weight_map.values())}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise UnusableModel(f"{path.parent / file}: has no {name}, which {path.name} says")
    return {name: headers[file][name] for name, file in weight_map.items()}


def _header(path: Path) -> dict[str, Any]:
    """A safetensors file begins with its header's length (8 bytes, little endian) and the header,
    which is JSON."""
    with path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER):
            raise UnusableModel(
                f"{path}: got {size:,} bytes that announce a header of {length:,}, wanted a "
                "safetensors file with a whole one"
            )
        entries = _json(path, file.read(length))
    entries.pop("__metadata__", None)
    return entries


def _json(path: Path, text: bytes) -> dict[str, Any]:
    if text.startswith(_ZIP):
        raise UnusableModel(
            f"{path}: got a file of torch.save, wanted JSON or safetensors: write the shapes with "
            "json.dump({n: list(p.shape) for n, p in model.named_parameters()}, file)"
        )
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableModel(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(entries, dict):
        raise UnusableModel(f"{path}: got a {type(entries).__name__}, wanted names with shapes")
    return entries


def _parameter(path: Path, name: str, entry: Any, dtype: torch.dtype | None) -> Parameter | None:
    """None for integers."""
    shape, named = entry, None
    if isinstance(entry, Mapping):
        shape, named = entry.get("shape"), entry.get("dtype")
    is_shape = isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**48 for n in shape)
    if not is_shape or math.prod(max(1, n) for n in shape) >= 2**60:
        raise UnusableModel(
            f"{path}: {name}: got {_short(entry)}, wanted a shape as [3, 5] or "
            '{"shape": [3, 5], "dtype": "bf16"}'
        )
    if named is not None and not isinstance(named, str):
        raise UnusableModel(f"{path}: {name}: got dtype {_short(named)}, wanted its name")
    if named is not None and _UNTRAINED.fullmatch(named):
        return None
    known = torch.bfloat16 if named is None else _NAMES.get(named.removeprefix("torch."))
    if known is None and dtype is None:
        raise UnusableModel(
            f"{path}: {name}: got dtype {named!r}, wanted one of {', '.join(DTYPES)} or of integers"
        )
    chosen = dtype or known
    assert chosen is not None
    return Parameter(name, tuple(shape), chosen)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
