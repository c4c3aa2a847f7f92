"""What is demanded of the GPU machine code. Run as a program this prints a table of all kernels and
what is wrong with them."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from machine_code import Kernel, configure, count, find_tools, table

# (loads, stores) of 16 bytes that are in a kernel at least; every kernel is listed.
# A vector loop of adam moves four arrays and stores three of them; with the maximum one more.
# Where some groups have it there are two loops, one for those that have not.
ADAM, ADAM_MAX = (4, 3), (4 + 5, 3 + 4)
# adam_mixed loads gradients of fp32 (two accesses), bf16 and fp16; parameters of fp32, of bf16
# beside a remainder, and of bf16 and of fp16, each beside an fp32 master. It stores fp32 parameters
# or masters, remainders, fp16, and bf16 that is split, rounded to the nearest or at random.
MIXED = ((2 + 1 + 1) + 2 + 2 + (1 + 2) + (1 + 2), 2 + 1 + 1 + 3)
# Beside that 16 bytes of a moment are loaded and stored so often; of codes it is 8 bytes, once.
OF_MOMENT = {"float": 2, "BFloat16": 1, "unsigned char": 0}
REALS = ("float", "double")
NARROW = ("BFloat16", "Half")
INTEGERS = ("unsigned short", "unsigned int", "unsigned long")
VECTORS = {
    **{f"adam<{real}>": ADAM for real in REALS},
    **{f"adam<{real}, max>": ADAM_MAX for real in REALS},
    **{
        f"adam_mixed<{moment}{', max' * has_max}>": (
            MIXED[0] + (2 + has_max) * accesses,
            MIXED[1] + (2 + has_max) * accesses,
        )
        for moment, accesses in OF_MOMENT.items()
        for has_max in (False, True)
    },
    **{f"mean<{real}>": (2, 1) for real in REALS},  # loads the first chunk apart from the others
    **{f"mean<{narrow}>": (2, 2) for narrow in NARROW},  # the mean is fp32
    **{f"partial_sums<{real}, square>": (1, 0) for real in ("float", *NARROW)},
    "partial_sums<double, square>": (2, 0),  # a thread takes four lanes at once
    "partial_sums<double>": (2, 0),
    **{f"found_inf<{real}>": (1, 0) for real in (*REALS, *NARROW)},
    **{f"refresh<{narrow}>": (1 + 2, 2) for narrow in NARROW},  # beside fp32 numbers
    **{f"pack<{integer}>": (1, 2) for integer in INTEGERS},  # copies or stores zeros
    **{f"unpack<{integer}>": (1, 1) for integer in INTEGERS},
    "fingerprint_blocks": (1, 0),
    **{name: (0, 0) for name in ("fingerprint_rows", "write_words", "count_steps", "probe")},
}
# (loads, stores) of 8 bytes that codes take at least: one for each moment. Beside them as much is
# loaded as makes up a row of the segments and one of the groups, a step count, a tile and a scale.
CODES = {"adam_mixed<unsigned char>": (2, 2), "adam_mixed<unsigned char, max>": (3, 3)}
TABLE_LOADS = 8 + 8 + 1 + 1 + 1

# PTX instructions that compute, and those of them that round as the CPU does: without ".rn",
# ptxas may turn an addition and a multiplication into one FMA.
ARITHMETIC = re.compile(
    r"(add|sub|mul|div|sqrt|fma|mad|rcp|rsqrt|ex2|lg2|sin|cos|tanh)\.(.*\.)?(b?f16|f32|f64)\w*"
)
EXACT = re.compile(r"(add|sub|mul|div|sqrt)\.rn\.f(32|64)")

# Each rule gives what is wrong with a kernel, or nothing.


def check_local_memory(kernel: Kernel) -> str:
    found = kernel.resources
    local = count(kernel.sass, r"(LDL|STL)(\..*)?")
    if found.stack or found.spill_stores or found.spill_loads or local:
        return (
            f"{found.stack} bytes of stack, {found.spill_stores} stored and {found.spill_loads} "
            f"loaded by spills, {local} accesses to local memory"
        )
    return ""


def check_vectors(kernel: Kernel) -> str:
    if kernel.name not in VECTORS:
        return "not listed in VECTORS"
    loads, stores = VECTORS[kernel.name]
    if kernel.loads < loads or kernel.stores < stores:
        return (
            f"{kernel.loads} loads and {kernel.stores} stores of 16 bytes, wanted {loads} "
            f"and {stores}"
        )
    return check_codes(kernel)


def check_codes(kernel: Kernel) -> str:
    if kernel.name not in CODES:
        return ""
    loads, stores = CODES[kernel.name]
    loaded, stored = kernel.accesses("LD", "64") - TABLE_LOADS, kernel.accesses("ST", "64")
    if loaded < loads or stored < stores:
        return f"{loaded} loads and {stored} stores of 8 bytes, wanted {loads} and {stores}"
    return ""


def check_arithmetic(kernel: Kernel) -> str:
    wrong = {code for code in kernel.ptx if ARITHMETIC.fullmatch(code)}
    return ", ".join(sorted(code for code in wrong if not EXACT.fullmatch(code)))


def check_atomics(kernel: Kernel) -> str:
    """None at all, not only of floats: nothing here needs them."""
    wrong = [code for code in kernel.ptx if re.match(r"(atom|red|multimem)\.", code)]
    # REDUX is the reduction in a warp; a barrier's is BAR.RED.
    wrong += [code for code in kernel.sass if re.match(r"ATOM|RED(?!UX)", code)]
    return ", ".join(sorted(wrong))


def check_occupancy(kernel: Kernel) -> str:
    if kernel.occupancy < 0.5:
        return f"occupancy {kernel.occupancy:.1%} by {kernel.resources.registers} registers"
    return ""


RULES: dict[str, Callable[[Kernel], str]] = {
    "local memory": check_local_memory,
    "vectors": check_vectors,
    "arithmetic": check_arithmetic,
    "atomics": check_atomics,
    "occupancy": check_occupancy,
}


def problems(rule: str, kernels: Iterable[Kernel]) -> list[str]:
    checked = ((kernel, RULES[rule](kernel)) for kernel in kernels)
    return [f"{k.name}, sm_{k.architecture}: {problem}" for k, problem in checked if problem]


def main() -> int:
    tools = find_tools()
    if isinstance(tools, str):
        print(tools, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        kernels = configure(tools, Path(folder)).compile_all()
    print(table(kernels))
    found = [f"{rule}: {problem}" for rule in RULES for problem in problems(rule, kernels)]
    print("\n".join(found) or "nothing wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
