"""Times of the update of one size: every contender in fp32 in the same rounds, then each
configuration of formats beside the roofline and torch's fused kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import cold_copies
import mixed_arrays
import torch
from cold_copies import Arrays, Rotation, copies_needed, stride
from harness import Samples, Spread, Timing, interleave, ratio, threads
from kernel_contenders import (
    TORCH,
    TORCHAO,
    Contender,
    Update,
    contenders,
    distance_from_fp64,
    is_installed,
    our_name,
    shard_update,
    torchao_update,
)
from load import median_other_cores
from mixed_arrays import CONFIGURATIONS, Configuration

from fusedshard import _C
from fusedshard.native import AdamState

ROOFLINE, READ_FLOOR = "roofline", "read floor"
ARRAYS_BYTES = 16  # of an element's parameter, gradient and two moments
UPDATE_BYTES, READ_BYTES, COPY_BYTES = 28, ARRAYS_BYTES, 8
CODED = "fp32, 8-bit moments"  # the configuration that torchao's has the formats of
# Both kinds of memory, the largest configuration, and what torch's unfused implementations need.
PEAK_BYTES = 60


@dataclass(frozen=True)
class Plan:
    """How everything is measured.

    Attributes:
        isas: of fusedshard; a GPU has one, which has no name.
        cold_bytes: that are used in between before a copy is used again.
        most_copies: of arrays, whatever that means for caches.
        device_seconds: of some work on a GPU; None on the CPU.
    """

    device: str
    isas: Sequence[str | None]
    threads: Sequence[int]
    repeats: int
    cold_bytes: int
    most_copies: int
    before_round: Callable[[], object]
    device_seconds: Callable[[Update], float] | None = None

    @property
    def names(self) -> list[str]:
        """What fusedshard is called, the default first."""
        return [our_name(isa) for isa in self.isas]

    def copies(self, elements: int, bytes_an_element: int) -> int:
        needed = copies_needed(elements, bytes_an_element, self.cold_bytes)
        return min(self.most_copies, needed)


def choose(isa: str | None) -> None:
    """Which compiled variant fusedshard runs from now on."""
    if isa is not None:
        _C.set_cpu_variant(isa)


class Measured(NamedTuple):
    """What is timed: an update for each copy of some arrays."""

    updates: Sequence[Update]
    rotation: Rotation
    update_bytes: int = UPDATE_BYTES
    isa: str | None = None

    def seconds(self, device_seconds: Callable[[Update], float] | None) -> float:
        """Of one update."""
        choose(self.isa)
        chosen = self.rotation.take(self.updates)
        if device_seconds is not None:
            return device_seconds(chosen[0])
        start = time.perf_counter()
        for update in chosen:
            update()
        return (time.perf_counter() - start) / len(chosen)


def roofline(arrays: Arrays) -> Update:
    """On the CPU a loop over the four arrays that computes next to nothing, on a GPU a copy."""
    if arrays.param.is_cuda:  # leaves a moment as constant gradients would
        return partial(arrays.exp_avg.copy_, arrays.grad)
    param, grad, exp_avg, exp_avg_sq = (array.data_ptr() for array in arrays)
    rest = exp_avg, exp_avg_sq, arrays.param.numel()
    return lambda: _C.roofline_f32(param, grad, *rest, torch.get_num_threads())


def read_floor(arrays: Arrays) -> Update:
    def read() -> None:
        torch.dot(arrays.param, arrays.grad)
        torch.dot(arrays.exp_avg, arrays.exp_avg_sq)

    return read


class Memory:
    """Arrays of one size, fusedshard's and torch's, in as many copies as are needed."""

    def __init__(self, plan: Plan, elements: int) -> None:
        self._plan, self._elements = plan, elements
        self.copies = plan.copies(elements, ARRAYS_BYTES)
        self._arrays: dict[bool, tuple[list[Arrays], Rotation]] = {}

    def measured(self, contender: Contender, update_bytes: int = UPDATE_BYTES) -> Measured:
        arrays, rotation = self._of(contender.flat and self._plan.device == "cpu")
        updates = [contender.build(copy) for copy in arrays]
        return Measured(updates, rotation, update_bytes, contender.isa)

    def _of(self, flat: bool) -> tuple[list[Arrays], Rotation]:
        if flat not in self._arrays:
            size, device = (self._elements, self.copies), self._plan.device
            arrays = cold_copies.allocate(*size, flat=flat, device=device)
            self._arrays[flat] = arrays, Rotation(self.copies)
        return self._arrays[flat]


def fp32_works(plan: Plan, memory: Memory) -> dict[str, Measured]:
    isa = plan.isas[0]
    moved = UPDATE_BYTES if plan.device == "cpu" else COPY_BYTES
    found = {
        ROOFLINE: memory.measured(Contender(ROOFLINE, roofline, flat=True, isa=isa), moved),
        READ_FLOOR: memory.measured(Contender(READ_FLOOR, read_floor, flat=True), READ_BYTES),
    }
    return found | {c.name: memory.measured(c) for c in contenders(plan.isas, plan.device)}


class Coded(NamedTuple):
    """An implementation of the update of shards in mixed precision."""

    build: Callable[[AdamState, torch.Tensor], Update]
    isa: str | None = None


def mixed_contenders(plan: Plan, configuration: Configuration, copies: int) -> dict[str, Coded]:
    found = {
        f"{name}: {configuration.name}": Coded(shard_update, isa)
        for name, isa in zip(plan.names, plan.isas, strict=True)
    }
    # An optimizer of its own and a compilation for each copy would be out of proportion.
    if configuration.name == CODED and copies == 1 and is_installed("torchao"):
        found[f"{TORCHAO}: {CODED}"] = Coded(lambda state, grad: torchao_update(state.param, grad))
    return found


def mixed_works(plan: Plan, configuration: Configuration, elements: int) -> dict[str, Measured]:
    copies = plan.copies(elements, configuration.memory_bytes)
    step, rotation = stride(elements), Rotation(copies)
    state, grad = mixed_arrays.allocate(configuration, step * copies, plan.device)
    parts = [
        (mixed_arrays.part(state, start, elements), grad[start : start + elements])
        for start in range(0, step * copies, step)
    ]
    moved = configuration.update_bytes
    return {
        name: Measured([build(*part) for part in parts], rotation, moved, isa)
        for name, (build, isa) in mixed_contenders(plan, configuration, copies).items()
    }


def measure_threads(plan: Plan, works: Mapping[str, Measured]) -> dict[int, Timing]:
    """Times of everything in the same rounds, by number of threads."""
    variants = {name: partial(work.seconds, plan.device_seconds) for name, work in works.items()}
    timings = {}
    for count in plan.threads:
        with threads(count):
            timings[count] = interleave(variants, plan.repeats, before_round=plan.before_round)
    return timings


def rows(samples: Samples, elements: int, works: Mapping[str, Measured]) -> list[dict[str, Any]]:
    """The figures of what was measured in the same rounds."""
    found = []
    for name, seconds in samples.items():
        spread, moved = Spread.of(seconds), works[name].update_bytes
        share = ratio(samples, ROOFLINE, name).scaled(moved / works[ROOFLINE].update_bytes)
        found.append(
            {
                "name": name,
                "bytes_an_element": moved,
                "seconds": asdict(spread),
                "gigabytes_per_second": moved * elements / spread.median / 1e9,
                "share_of_roofline": asdict(share),
                "speed_against_torch_fused": asdict(ratio(samples, TORCH, name)),
                "samples": seconds,
            }
        )
    return found


def rows_of_configuration(
    samples: Samples, elements: int, works: Mapping[str, Measured]
) -> list[dict[str, Any]]:
    """Each with the samples that it was measured beside."""
    beside = {"roofline_samples": samples[ROOFLINE], "torch_fused_samples": samples[TORCH]}
    found = rows(samples, elements, works)
    return [row | beside for row in found if row["name"] not in (ROOFLINE, TORCH)]


def measure_size(plan: Plan, elements: int) -> tuple[list[dict[str, Any]], dict[int, Samples]]:
    """A result for each number of threads, and the samples of fp32 by number of threads."""
    memory = Memory(plan, elements)
    works = fp32_works(plan, memory)
    timings = measure_threads(plan, works)
    found = {count: rows(t.samples, elements, works) for count, t in timings.items()}
    rounds = {count: list(timing.rounds) for count, timing in timings.items()}
    samples = {count: timing.samples for count, timing in timings.items()}
    base = {name: works[name] for name in (ROOFLINE, TORCH)}
    del works
    for configuration in CONFIGURATIONS:  # one after another: together they need not fit
        beside = base | mixed_works(plan, configuration, elements)
        for count, timing in measure_threads(plan, beside).items():
            found[count] += rows_of_configuration(timing.samples, elements, beside)
            rounds[count] += timing.rounds
        del beside  # before the next ones are allocated
    results = [
        {
            "threads": count,
            "elements": elements,
            "copies": memory.copies,
            "other_cores": median_other_cores([rounds[count]]),
            "rows": found[count],
        }
        for count in plan.threads
    ]
    return results, samples


def distances(plan: Plan, elements: int = 10_240) -> dict[str, float]:
    """Of each contender's parameters from fp64, after a few equal steps from one start."""
    found = {}
    for contender in contenders(plan.isas, plan.device):
        choose(contender.isa)
        flat = contender.flat and plan.device == "cpu"
        (arrays,) = cold_copies.allocate(elements, 1, flat=flat, device=plan.device)
        update = contender.build(arrays)
        found[contender.name] = distance_from_fp64(update, [arrays.param], [arrays.grad])
    for configuration in CONFIGURATIONS:
        for name, (build, isa) in mixed_contenders(plan, configuration, copies=1).items():
            choose(isa)
            state, grad = mixed_arrays.allocate(configuration, elements, plan.device)
            found[name] = distance_from_fp64(build(state, grad), [state.param], [grad])
    return found


def fits(elements: int, available_bytes: int) -> bool:
    return elements * PEAK_BYTES <= available_bytes
