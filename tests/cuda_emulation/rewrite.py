"""What a host compiler has to be given in place of a CUDA source.

It takes CUDA C++ as it is once include/cuda_runtime.h has defined the names away. Only shared
memory needs more: every block finds it filled anew.
"""

from __future__ import annotations

import re
from pathlib import Path

# Comments and literals, in which nothing is looked for.
_ASIDE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_SHARED = re.compile(r"\b__shared__\b[^;={}]*?\b(\w+)\s*(?:\[[^;]*\]\s*)?;")


def _blanked(text: str) -> str:
    """`text` with blanks for comments and literals, every character in its place."""
    return _ASIDE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def rewritten(text: str, origin: Path) -> str:
    """The source `text`, with messages about it that name `origin`.

    Raises:
        ValueError: A declaration of shared memory is of a kind that is not emulated.
    """
    code = _blanked(text)
    declarations = list(_SHARED.finditer(code))
    if len(declarations) != code.count("__shared__") or "extern __shared__" in code:
        raise ValueError(f"{origin}: shared memory in a form that rewrite.py does not know")
    parts, done = [f'#line 1 "{origin}"\n'], 0
    for match in declarations:
        name = match[1]
        # On the declaration's own line, so that line numbers stay.
        fill = f" static uint64_t {name}_epoch = 0;"
        fill += f" ::emulation::enter_shared({name}_epoch, &{name}, sizeof({name}));"
        parts += [text[done : match.end()], fill]
        done = match.end()
    return "".join([*parts, text[done:]])
