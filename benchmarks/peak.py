"""How much memory a call takes for a while, on the host."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROCESS = Path("/proc/self")
M_MMAP_THRESHOLD = -3


def return_freed_memory() -> None:
    """Have glibc give large blocks back to the system as soon as they are freed, which it stops to
    do once it has seen some: what is allocated next would not show."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 128 * 1024)


def peak_of(work: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes of resident memory, at most, beyond what this process had before; what ``work``
    returned, which still counts."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    (PROCESS / "clear_refs").write_text("5")  # the peak starts at what is there now
    before = _status("VmRSS")
    result = work()
    return _status("VmHWM") - before, result


def _status(name: str) -> int:
    lines = (PROCESS / "status").read_text().splitlines()
    (kilobytes,) = (int(line.split()[1]) for line in lines if line.startswith(name))
    return kilobytes * 1024
