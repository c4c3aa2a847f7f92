"""The CPU update alone: in fp32 against torch.optim.AdamW, and in mixed precision, each beside the
roofline.

    python benchmarks/bench_kernel.py [--elements N] [--threads 1 2] [--isa all] [--quick]

The roofline is a loop that reads four arrays and writes three in place, as an update must, and
computes next to nothing: it runs on the very buffers that fusedshard updates. The read floor only
reads four arrays: no update can be faster, whatever it does about its writes. README.md says how
to read the figures.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import mixed_arrays
import torch
from harness import Samples, Spread, Timing, interleave, ratio, threads
from load import median_other_cores, wait_for_idle
from mixed_arrays import CONFIGURATIONS
from record import Bar, add_common_options, bars_table, busy, header, open_console, write
from rich.table import Table

from fusedshard import _C, kernels
from fusedshard.native import AdamState
from fusedshard.tables import GroupScalars

Update = Callable[[], object]

TORCH = "torch AdamW fused"
ROOFLINE = "roofline"
READ_FLOOR = "read floor"
UPDATE_BYTES = 28  # an element: parameter, gradient and two moments read, all but gradient written
READ_BYTES = 16
HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
GROUP = GroupScalars(
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    decoupled=True,
    amsgrad=False,
    maximize=False,
    **HYPERPARAMETERS,
)


class Arrays(NamedTuple):
    """What an update works on: 1-D fp32 tensors of one length."""

    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


def allocate(elements: int, *, flat: bool) -> Arrays:
    """The same values each time, in fusedshard's flat memory or in torch's.

    Gradients are positive, so that the roofline loop, which adds them to everything, never makes
    a second moment negative.
    """
    new = partial(kernels.flat_memory, dtype=torch.float32) if flat else torch.zeros
    arrays = Arrays(*(new(elements) for _ in Arrays._fields))
    generator = torch.Generator().manual_seed(0)
    arrays.param.normal_(generator=generator)
    arrays.grad.uniform_(0.5, 1.5, generator=generator)
    return arrays


@dataclass(frozen=True)
class Contender:
    """One implementation.

    Attributes:
        build: makes the update of some arrays.
        flat: it works on the flat buffers, which all such contenders share; else on its own.
    """

    name: str
    build: Callable[[Arrays], Update]
    flat: bool = False


def fusedshard_update(isa: str, arrays: Arrays) -> Update:
    state = AdamState(arrays.param, arrays.exp_avg, arrays.exp_avg_sq, None)
    return mixed_arrays.adamw_update(isa, state, arrays.grad, GROUP)


def torch_update(implementation: str, arrays: Arrays) -> Update:
    """`implementation` is torch's name of the option that asks for it, or for-loop."""
    chosen = {"foreach": False} if implementation == "for-loop" else {implementation: True}
    return torch.optim.AdamW([_parameter(arrays)], **HYPERPARAMETERS | chosen).step


def torch_on_flat_update(arrays: Arrays) -> Update:
    """torch's fused update on our memory: what is left to the kernel once the memory is equal."""
    param = _parameter(arrays)
    optimizer = torch.optim.AdamW([param], **HYPERPARAMETERS, fused=True)
    optimizer.state[param].update(
        step=torch.zeros(()), exp_avg=arrays.exp_avg, exp_avg_sq=arrays.exp_avg_sq
    )
    return optimizer.step


def deepspeed_update(arrays: Arrays) -> Update:
    adam = importlib.import_module("deepspeed.ops.adam")  # an extra, which may not be there
    return adam.DeepSpeedCPUAdam([_parameter(arrays)], **HYPERPARAMETERS, adamw_mode=True).step


def _parameter(arrays: Arrays) -> torch.nn.Parameter:
    param = torch.nn.Parameter(arrays.param)
    param.grad = arrays.grad
    return param


def contenders(isas: Sequence[str]) -> list[Contender]:
    found = [Contender(our_name(isa), partial(fusedshard_update, isa), flat=True) for isa in isas]
    found += [
        Contender(TORCH, partial(torch_update, "fused")),
        Contender("torch AdamW fused, our memory", torch_on_flat_update, flat=True),
        Contender("torch AdamW foreach", partial(torch_update, "foreach")),
    ]
    if importlib.util.find_spec("deepspeed"):
        found.append(Contender("DeepSpeedCPUAdam", deepspeed_update))
    return found


def our_name(isa: str) -> str:
    return f"fusedshard {isa}"


def largest_difference(contender: Contender, steps: int = 3, elements: int = 10_000) -> float:
    """Of its parameters from those of torch's for-loop Adam in fp64, after a few equal steps."""
    arrays = allocate(elements, flat=contender.flat)
    exact = Arrays(*(array.double() for array in arrays))
    update = contender.build(arrays)
    reference = torch_update("for-loop", exact)
    for _ in range(steps):
        update()
        reference()
    return (arrays.param - exact.param).abs().max().item()


def roofline(isa: str, arrays: Arrays) -> None:
    _C.set_cpu_variant(isa)
    param, grad, exp_avg, exp_avg_sq = (array.data_ptr() for array in arrays)
    elements, count = arrays.param.numel(), torch.get_num_threads()
    _C.roofline_f32(param, grad, exp_avg, exp_avg_sq, elements, count)


def read_floor(arrays: Arrays) -> None:
    torch.dot(arrays.param, arrays.grad)
    torch.dot(arrays.exp_avg, arrays.exp_avg_sq)


def counted(work: Update) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Measured(NamedTuple):
    """What is timed, and the bytes that it has to move for an element."""

    work: Update
    update_bytes: int


def works(args: argparse.Namespace) -> dict[str, Measured]:
    shared = allocate(args.elements, flat=True)
    found = {
        ROOFLINE: Measured(partial(roofline, args.isa[0], shared), UPDATE_BYTES),
        READ_FLOOR: Measured(partial(read_floor, shared), READ_BYTES),
    }
    for contender in contenders(args.isa):
        arrays = shared if contender.flat else allocate(args.elements, flat=False)
        found[contender.name] = Measured(contender.build(arrays), UPDATE_BYTES)
    for configuration in CONFIGURATIONS:
        state, gradient = mixed_arrays.allocate(configuration, args.elements)
        for isa in args.isa:
            name = f"{our_name(isa)}: {configuration.name}"
            work = mixed_arrays.adamw_update(isa, state, gradient, GROUP)
            found[name] = Measured(work, configuration.update_bytes)
    return found


def measure(args: argparse.Namespace, measured: dict[str, Measured]) -> dict[int, Timing]:
    """Times of everything, by number of threads."""
    variants = {name: partial(counted, work) for name, (work, _) in measured.items()}
    idle = partial(wait_for_idle, args.idle_wait)
    timings = {}
    for count in args.threads:
        with threads(count):
            timings[count] = interleave(variants, args.repeats, before_round=idle)
    return timings


def rows(samples: Samples, elements: int, measured: dict[str, Measured]) -> list[dict[str, Any]]:
    """The figures of one number of threads."""
    found = []
    for name, seconds in samples.items():
        spread, update_bytes = Spread.of(seconds), measured[name].update_bytes
        share = ratio(samples, ROOFLINE, name).scaled(update_bytes / UPDATE_BYTES)
        found.append(
            {
                "name": name,
                "bytes_an_element": update_bytes,
                "seconds": asdict(spread),
                "gigabytes_per_second": update_bytes * elements / spread.median / 1e9,
                "share_of_roofline": asdict(share),
                "speed_against_torch_fused": asdict(ratio(samples, TORCH, name)),
                "samples": seconds,
            }
        )
    return found


def bars(samples: dict[int, Samples], ours: str) -> list[Bar]:
    found = []
    for count, against_torch, of_roofline in ((1, 1.6, 0.95), (2, 1.4, 0.9)):
        if count in samples:
            with_threads = f"{count} thread{'s' * (count > 1)}"
            speed = ratio(samples[count], TORCH, ours)
            share = ratio(samples[count], ROOFLINE, ours)
            found += [
                Bar(f"speed against {TORCH}, {with_threads}", speed, at_least=against_torch),
                Bar(f"share of the roofline, {with_threads}", share, at_least=of_roofline),
            ]
    return found


def results_table(result: dict[str, Any]) -> Table:
    table = Table(title=f"threads: {result['threads']}, {busy(result['other_cores'])}")
    columns = ("", "bytes", "ms: median (quartiles)", "GB/s", "of roofline", "against torch fused")
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for row in result["rows"]:
        table.add_row(
            row["name"],
            str(row["bytes_an_element"]),
            Spread(**row["seconds"]).text(scale=1e3),
            f"{row['gigabytes_per_second']:.1f}",
            Spread(**row["share_of_roofline"]).text(),
            Spread(**row["speed_against_torch_fused"]).text(),
        )
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The CPU update alone.")
    variants = _C.cpu_variants()
    parser.add_argument("--elements", type=int, help="of each array (default: 32 Mi)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--isa",
        nargs="+",
        choices=[*variants, "all"],
        default=[_C.cpu_variant()],
        help="compiled variants to measure; bars and roofline are of the first",
    )
    add_common_options(parser)
    args = parser.parse_args()
    if "all" in args.isa:
        args.isa = variants[::-1]
    args.elements = args.elements or (1 << 18 if args.quick else 32 << 20)
    args.repeats = args.repeats or (3 if args.quick else 15)
    return args


def main() -> None:
    args = parse()
    console = open_console()
    differences = {c.name: largest_difference(c) for c in contenders(args.isa)}
    measured = works(args)
    timings = measure(args, measured)
    samples = {count: timing.samples for count, timing in timings.items()}
    found_bars = bars(samples, our_name(args.isa[0]))
    report = header("kernel", args) | {
        "largest_difference_from_fp64": differences,
        "results": [
            {
                "threads": count,
                "other_cores": median_other_cores([timing.rounds]),
                "rows": rows(timing.samples, args.elements, measured),
            }
            for count, timing in timings.items()
        ],
        "bars": [bar.as_json() for bar in found_bars],
    }
    console.print(f"{args.elements} elements, {args.repeats} interleaved rounds")
    for result in report["results"]:
        console.print(results_table(result))
        ceiling = ratio(samples[result["threads"]], TORCH, READ_FLOOR)
        console.print(f"no update can beat {TORCH} by more than {ceiling.text()}: the read floor")
    console.print(bars_table(found_bars, quick=args.quick))
    write(report, args.out, "kernel", console)


if __name__ == "__main__":
    main()
