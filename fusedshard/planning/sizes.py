"""Quantities as people write them: 10B parameters, 80GiB, 450GB/s."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence

_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_BYTES = {
    **{f"{letter}B": 1000**power for power, letter in enumerate(("", "K", "M", "G", "T"))},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
}
_RATES = {
    **{f"{unit}/s": scale for unit, scale in _BYTES.items()},
    **{f"{letter}bit/s": 1000**power / 8 for power, letter in enumerate("KMGT", 1)},
}
_BINARY, _DECIMAL = ("B", "KiB", "MiB", "GiB"), ("B", "KB", "MB", "GB")
MOST_RANKS = 1 << 16
MOST_PARAMETERS = 10**13  # whose layout is still made in seconds


def count(text: str) -> int:
    """A number of parameters: ``"10B"``, ``"124M"``, ``"1000"``."""
    wanted = "a count from 1 to 10T, as 10B, 124M or 1000"
    number = _parsed(text, _COUNTS, wanted, most=MOST_PARAMETERS)
    if number != int(number):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted {wanted}")
    return int(number)


def byte_size(text: str) -> int:
    """``"80GiB"``, ``"80GB"``."""
    return int(_parsed(text, _BYTES, "a size above 0 as 80GiB or 80GB"))


def rate(text: str) -> float:
    """Bytes a second: ``"450GB/s"``, ``"400Gbit/s"``."""
    return _parsed(text, _RATES, "a rate above 0 as 450GB/s or 400Gbit/s")


def ranks(text: str) -> int:
    """A number of ranks."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= MOST_RANKS:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted an integer from 1 to {MOST_RANKS}")
    return int(text)


def megabytes(text: str) -> float:
    """A number above 0, without its unit."""
    return _parsed(text, {"": 1}, "a number above 0", least=1e-6)


def _parsed(
    text: str, units: Mapping[str, float], wanted: str, least: float = 1, most: float = 1e18
) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?([A-Za-z/]*)", text[:40], re.ASCII)
    value = 0.0
    if match is not None and match[2] in units:
        digits = match[1]
        # Integers stay exact: a float has but 53 bits.
        value = (int(digits) if digits.isdigit() else float(digits)) * units[match[2]]
    if match is None or not least <= value <= most:
        raise argparse.ArgumentTypeError(f"got {text[:40]!r}, wanted {wanted}")
    return value


def binary_unit(nbytes: int) -> tuple[str, int]:
    """The unit that ``nbytes`` are at least one of, and its bytes: GiB at most."""
    return _unit(nbytes, _BINARY, 1024)


def decimal_unit(nbytes: int) -> tuple[str, int]:
    """The same, GB at most."""
    return _unit(nbytes, _DECIMAL, 1000)


def _unit(nbytes: int, names: Sequence[str], step: int) -> tuple[str, int]:
    power = max(power for power in range(len(names)) if power == 0 or nbytes >= step**power)
    return names[power], step**power


def rate_text(rate: float) -> str:
    """``"450 GB/s"``."""
    unit, scale = decimal_unit(int(rate))
    return f"{rate / scale:,.4g} {unit}/s"


def time_text(seconds: float) -> str:
    """``"3.42 ms"``."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
