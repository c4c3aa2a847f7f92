"""One set of bits: for every compiled instruction set, every thread count, and odd values."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_tools import (
    ADAM,
    ADAMW,
    chunks_of_all_scales,
    each_dtype,
    each_kind,
    running_on,
    update,
    ways_to_run,
)
from oracles import adam_reference_, fresh_state, ordered_mean, same_bits, same_state

from fusedshard import _C
from fusedshard.dense import Chunks
from fusedshard.kernels import found_inf_, mean_, square_sum
from fusedshard.native import AdamState
from fusedshard.tables import GroupScalars

# Below, at and above what one thread, two and three take (a thread takes 2^15 elements at least),
# with and without a remainder for every vector width.
GRAIN = 1 << 15
SMALL = [0, 1, 7, 17 * 257]
LARGE = [2 * GRAIN - 1, 2 * GRAIN, 2 * GRAIN + 1, 3 * GRAIN + 17, 131_071]
on_each_backend = pytest.mark.usefixtures("each_backend")
each_size = pytest.mark.parametrize("numel", [*SMALL, *LARGE])


def odd_values(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Random values, between them the extremes of the dtype, denormals, zeros, infinities, NaN."""
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator, dtype=dtype)
    info = torch.finfo(dtype)
    odd = [info.max, -info.max, info.tiny, -info.tiny, info.tiny / 8, -info.tiny / 1000, 0.0, -0.0]
    odd += [float("inf"), -float("inf"), float("nan"), info.eps, 1e-30, 1e30]
    places = torch.randperm(numel, generator=generator)[: numel // 8]
    values[places] = torch.tensor(odd, dtype=dtype).repeat(numel)[: len(places)]
    return values


def odd_state(numel: int, dtype: torch.dtype) -> AdamState:
    generator = torch.Generator().manual_seed(numel + 1)
    shuffled = [
        odd_values(numel, dtype)[torch.randperm(numel, generator=generator)] for _ in "pmvx"
    ]
    return AdamState(shuffled[0], shuffled[1], shuffled[2].abs(), shuffled[3].abs())


def check_update(group: GroupScalars, dtype: torch.dtype, numel: int) -> None:
    start, grad = odd_state(numel, dtype), odd_values(numel, dtype)
    results = []
    for variant, threads in ways_to_run():
        state = copy.deepcopy(start)
        with running_on(variant, threads):
            update(state, grad, group, 3, 0.5)
        results.append(state)
        assert same_state(state, results[0]), (variant, threads)
    if dtype == torch.float32:
        adam_reference_(start, grad, group, 3, 0.5)
        assert same_state(start, results[0])


@on_each_backend
@pytest.mark.parametrize("numel", [17 * 257, 3 * GRAIN + 17])
@each_dtype
@each_kind
def test_update_with_every_switch(group: GroupScalars, dtype: torch.dtype, numel: int) -> None:
    check_update(group, dtype, numel)


@on_each_backend
@each_size
@each_dtype
def test_update_of_every_size(dtype: torch.dtype, numel: int) -> None:
    check_update(ADAMW, dtype, numel)


@on_each_backend
@each_size
@each_dtype
def test_mean(dtype: torch.dtype, numel: int) -> None:
    chunks = [*chunks_of_all_scales(3, numel, dtype), odd_values(numel, dtype)]
    rows = torch.stack(chunks).repeat(1, 2)[:, :numel]  # at equal distances, apart
    want = ordered_mean(chunks)
    forms: tuple[Chunks, ...] = (rows, list(rows))
    for (variant, threads), given in itertools.product(ways_to_run(), forms):
        out = torch.full((numel,), 7.0, dtype=dtype)
        with running_on(variant, threads):
            mean_(out, given)
        assert same_bits(out, want), (variant, threads, type(given))


@on_each_backend
@each_size
@each_dtype
def test_square_sum(dtype: torch.dtype, numel: int) -> None:
    (x,) = chunks_of_all_scales(1, numel, dtype)
    sums = set()
    for variant, threads in ways_to_run():
        with running_on(variant, threads):
            sums.add(float(square_sum(x)).hex())
    assert len(sums) == 1


@on_each_backend
@each_size
@each_dtype
def test_found_inf(dtype: torch.dtype, numel: int) -> None:
    x = odd_values(numel, dtype)
    finite = x.nan_to_num()
    for variant, threads in ways_to_run():
        with running_on(variant, threads):
            for values in (x, finite):
                found_inf = torch.zeros(1)
                found_inf_(found_inf, values)
                assert bool(found_inf) == (not values.isfinite().all())


@on_each_backend
@each_dtype
def test_denormals_are_kept(dtype: torch.dtype) -> None:
    numel = 3 * GRAIN + 17
    tiny = torch.full((numel,), torch.finfo(dtype).tiny / 64, dtype=dtype)
    group = ADAM._replace(lr=1.0, beta1=0.5, beta2=0.5, eps=1.0)
    for variant, threads in ways_to_run():
        state, mean = fresh_state(tiny), torch.empty_like(tiny)
        with running_on(variant, threads):
            update(state, tiny, group, 1)
            mean_(mean, [tiny, tiny * 3])
        assert torch.equal(state.exp_avg, tiny / 2), (variant, threads)
        assert torch.equal(state.param, torch.zeros_like(tiny)), (variant, threads)
        assert torch.equal(mean, tiny * 2), (variant, threads)


@on_each_backend
@each_dtype
def test_negative_zero_is_kept(dtype: torch.dtype) -> None:
    zero = torch.full((1003,), -0.0, dtype=dtype)
    for variant, threads in ways_to_run():
        state, mean = fresh_state(zero), torch.empty_like(zero)
        with running_on(variant, threads):
            update(state, -zero, ADAMW, 1)
            mean_(mean, [zero, zero])
        assert same_bits(state.param, zero), (variant, threads)
        assert same_bits(mean, zero), (variant, threads)


def run_python(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


# One more thread each time, since idle ones stay; the first has too little to share.
COUNT_THREADS = """
import os, sys, torch
sys.path.insert(0, sys.argv[1])
from kernel_tools import ADAM, update
from fusedshard.kernels import flat_memory, mean_, square_sum
from fusedshard.native import AdamState
p, g, m, v = (flat_memory(4 * 2**15, torch.float32) for _ in range(4))
kernels = [
    lambda: square_sum(g[: 2**16 - 1]),
    lambda: square_sum(g),
    lambda: mean_(m, [g]),
    lambda: update(AdamState(p, m, v, None), g, ADAM, 1),
]
for threads, kernel in zip([4, 2, 3, 4], kernels):
    torch.set_num_threads(threads)
    kernel()
    print(len(os.listdir("/proc/self/task")))
"""


def test_threads_are_used() -> None:
    done = run_python(COUNT_THREADS, str(Path(__file__).parent))
    counts = [int(line) for line in done.stdout.split()]
    assert [count - counts[0] for count in counts] == [0, 1, 2, 3], done.stderr


USE = (
    "import torch; from fusedshard import _C, kernels; x = kernels.square_sum(torch.ones(3)).item()"
)


@pytest.mark.parametrize(
    ("value", "chosen"), [("baseline", "baseline"), ("", _C.cpu_variants()[-1])]
)
def test_environment_picks_a_variant(value: str, chosen: str) -> None:
    done = run_python(f"{USE}; print(_C.cpu_variant(), x)", FUSEDSHARD_CPU_ISA=value)
    assert done.stdout.split() == [chosen, "3.0"], done.stderr


def test_unknown_variant_in_the_environment_is_refused_at_import() -> None:
    done = run_python("import fusedshard; print('imported')", FUSEDSHARD_CPU_ISA="sse9")
    assert done.returncode == 1 and "imported" not in done.stdout
    last_line = done.stderr.strip().splitlines()[-1]
    for part in ("FUSEDSHARD_CPU_ISA", "'sse9'", *_C.cpu_variants()):
        assert part in last_line


def test_unknown_variant_is_refused() -> None:
    before = _C.cpu_variant()
    with pytest.raises(ValueError, match=r"got 'sse9'.*baseline"):
        _C.set_cpu_variant("sse9")
    assert _C.cpu_variant() == before
