"""What commands show things with; the packages for that are an extra."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 140  # columns where the output is no terminal: enough for tables in one piece


def require_packages(*names: str) -> None:
    """Raises ModuleNotFoundError, with the remedy, unless every package is installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f"needs {' and '.join(missing)}: pip install 'fusedshard[demo]'")


def make_console() -> Console:
    """A terminal as it is; elsewhere, wide enough for tables."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)
