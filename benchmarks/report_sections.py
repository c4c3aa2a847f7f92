"""The parts of README.md's section on performance: each is made of reports, and says nothing that
these do not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from report_step import step
from report_tables import (
    Report,
    Reports,
    busiest,
    commit,
    elements,
    median,
    paragraph,
    plural,
    processor,
    rows_of,
    table,
    volume,
)

OURS = "fusedshard sharded, ordered"


def introduction(reports: Reports) -> str:
    machines = sorted({processor(report) for report in reports.values()})
    torches = sorted({report["versions"]["torch"] for report in reports.values()})
    return paragraph(
        f"Measured on {' and on '.join(machines)}, with torch {' and '.join(torches)}, by the",
        "scripts in `benchmarks/`, whose README says how, and how to read them. Every ratio is a",
        "median over interleaved rounds of one run; the reports, with every sample, quartiles and",
        "their commit, and a chart of each, are in `benchmarks/results/`.",
        "This section is written from them by `benchmarks/report.py`.",
    )


def kernel(reports: Reports) -> str:
    report = reports["kernel"]
    ours = f"fusedshard {report['settings']['isa'][0]}"
    names = {
        ours: "**fusedshard**",
        "DeepSpeedCPUAdam": "DeepSpeedCPUAdam",
        "torch AdamW fused": "torch AdamW, fused",
        "torch AdamW foreach": "torch AdamW, foreach",
        "torch AdamW for-loop": "torch AdamW, for-loop",
    }
    text = paragraph(
        "The update alone, fp32 (`bench_kernel.py`): bytes that must be moved (28 an element) a",
        "second, as a share of a loop that moves the same bytes through the same buffers with the",
        "same number of threads, the roofline. Caches are cold; below a few thousand elements the",
        "call itself decides.",
    )
    parts = [text, *(_sizes(report, count, names) for count in report["settings"]["threads"])]
    return "\n\n".join([*parts, _ceilings(report), _formats(report, ours), _small(report)])


def _sizes(report: Report, threads: int, names: Mapping[str, str]) -> str:
    """Shares of the roofline, by contender and size."""
    results = [result for result in report["results"] if result["threads"] == threads]
    rows = [{row["name"]: row for row in result["rows"]} for result in results]
    speeds = [f"{found['roofline']['gigabytes_per_second']:.0f} GB/s" for found in rows]
    cells = [
        [shown, *(median(found.get(name), "share_of_roofline") for found in rows)]
        for name, shown in names.items()
        if any(name in found for found in rows)
    ]
    sizes = (f"{elements(result['elements'])}" for result in results)
    return table(
        [f"{plural(threads, 'thread')}, elements:", *sizes], [["roofline", *speeds], *cells]
    )


def _ceilings(report: Report) -> str:
    """What the contenders leave to be gained, where that is known."""
    said = [
        f"{bar['claim']}: {bar['measured']['median']:.2f}, at most {bar['ceiling']['median']:.2f}"
        for bar in report["bars"]
        if "ceiling" in bar
    ]
    return paragraph(
        "Where other kernels run near the memory's speed there is little to gain over them: no",
        "update can be faster than merely reading the four arrays is, which bounds the gain.",
        f"{'; '.join(said)}.",
    )


def _formats(report: Report, ours: str) -> str:
    """Of the largest size."""
    size = max(result["elements"] for result in report["results"])
    results = [result for result in report["results"] if result["elements"] == size]
    rows = [{row["name"]: row for row in result["rows"]} for result in results]
    cells = [
        [
            name.partition(": ")[2],
            str(row["bytes_an_element"]),
            *(median(found[name], "share_of_roofline") for found in rows),
            *(median(found[name], "speed_against_torch_fused") for found in rows),
        ]
        for name, row in rows[0].items()
        if name.startswith(f"{ours}: ")
    ]
    counts = [plural(result["threads"], "thread") for result in results]
    columns = [
        f"{elements(size)} elements in other formats",
        "bytes an element",
        *(f"of the roofline, {count}" for count in counts),
        *(f"speed / torch fused fp32, {count}" for count in counts),
    ]
    return table(columns, cells)


def _small(report: Report) -> str:
    said = []
    for result in report["small_tensors"]:
        speeds = {row["name"]: row for row in result["rows"]}
        others = (
            f"{median(row, 'speed_against_torch_foreach')} {name}"
            for name, row in speeds.items()
            if name not in ("fusedshard.AdamW", "torch AdamW foreach")
        )
        ours = median(speeds["fusedshard.AdamW"], "speed_against_torch_foreach")
        count = plural(result["threads"], "thread")
        said.append(f"{ours} with {count} ({', '.join(others)})")
    tensors = report["small_tensors"][0]["tensors"]
    return paragraph(
        f"A whole step of {tensors:,} small tensors on one rank, as a multiple of the speed of",
        f"torch's foreach AdamW: {'; '.join(said)}.",
    )


def mixed(reports: Reports) -> str:
    report = reports["mixed"]
    rows, settings = rows_of(report), report["settings"]
    threads = plural(settings["threads"], "thread")
    names = {
        "fusedshard": "remainders, fp32 moments",
        "fusedshard, bf16 moments": "remainders, bf16 moments",
        "fusedshard, 8-bit moments": "remainders, 8-bit moments",
    }
    speeds = [f"{median(rows[n], 'speed_against_torch')} with {what}" for n, what in names.items()]
    text = [
        f"Clipping and a step of {settings['elements'] >> 20} Mi bf16 parameters on one rank",
        f"with {threads} (`bench_mixed.py`), as a multiple of the speed of",
        "what one writes by hand with torch (gradients to fp32, `clip_grad_norm_`, fused AdamW on",
        f"fp32 masters, back to bf16): {', '.join(speeds)}.",
    ]
    coded, theirs = "fusedshard, 8-bit moments, no masters, no clipping", "torchao AdamW8bit"
    torchao = rows.get(f"{theirs}, no clipping")
    if torchao:
        speed = torchao["seconds"]["median"] / rows[coded]["seconds"]["median"]
        text.append(
            "Its 8-bit moments, without masters and clipping on either side, are "
            f"{speed:.0f} times as fast as {theirs}."
        )
    return paragraph(*text)


def scale(reports: Reports) -> str:
    report = reports["scale"]
    text = paragraph(
        "How it grows (`bench_scale.py`): the product itself as one rank of N, in bf16, without",
        "memory, wire and kernels. *step* is all that the host does in backward and step.",
    )
    columns = ["", "ranks", "buckets", "padding %", "construction s", "step ms", "state a rank"]
    rows = [
        [
            f"{found['model']} ({found['tensors']:,} tensors)",
            f"{found['ranks']:,}",
            f"{found['buckets']:,}",
            f"{found['padding_waste'] * 100:.2g}",
            f"{found['seconds']['construction']['median']:.2g}",
            f"{found['seconds']['step']['median'] * 1e3:.0f}",
            volume(found["state_bytes"]),
        ]
        for found in report["results"]
        if found["dtype"] == "bf16"
    ]
    return f"{text}\n\n{table(columns, rows)}"


def hooks(reports: Reports) -> str:
    tiny, overlap = reports["hooks_1_rank"], reports["overlap_2_ranks"]
    overhead = median(rows_of(tiny)[OURS], "overhead_against_ddp_foreach")
    of_two = median(rows_of(reports["hooks_2_ranks"])[OURS], "overhead_against_ddp_foreach")
    row = rows_of(overlap)[OURS]
    return paragraph(
        f"Python's share (`bench_hooks.py`): for {_tensors(tiny)} tiny parameters what backward,",
        f"step and zero_grad take beyond accumulating gradients is {overhead} of the same with DDP",
        f"and AdamW(foreach=True) on one rank, {of_two} on two. With a GPT on two ranks and larger",
        f"batches {row['early_buckets']['median']:.0f} of {row['buckets']} buckets are on",
        f"their way before backward ends, {median(row, 'hidden_share')} of the exchange's time is",
        f"hidden, and a step takes {median(row, 'against_exchange_in_step')} of one that",
        f"exchanges at its end ({median(row, 'against_ddp')} of DDP's): where each rank has one",
        "core, exchange and computation share it, and overlap can gain little.",
    )


def audits(reports: Reports) -> str:
    names = "fingerprint", "audit_gpt_2_ranks", "audit_tiny_2_ranks"
    prints, gpt, tiny = (reports[name] for name in names)
    times = [bar["measured"]["median"] for bar in prints["bars"]]
    flips, exchanges, wrong = (
        sum(row[key] for row in prints["fuzz"]) for key in ("flips", "exchanges", "wrong")
    )
    size = 4 * prints["settings"]["elements"] >> 20
    return paragraph(
        f"Fingerprints (`bench_fingerprint.py`, {size} MiB of fp32) take {times[0]:.2f} of",
        f"the time of `torch.sum` of the same tensor with one thread and {times[1]:.2f} with two;",
        f"of {flips + exchanges:,} random changes ({flips:,} flipped bits, {exchanges:,} exchanged",
        f"elements) {wrong or 'none'} went unseen. `audit_every=100` adds {_share(gpt)} % to a",
        f"step of the GPT on two ranks, {_share(tiny)} % to one of {_tensors(tiny)} tiny",
        "parameters; one `fusedshard.audit` takes",
        f"{gpt['one_audit'][OURS]['median'] * 1e3:.0f} ms of the GPT (`bench_audit.py`).",
    )


def _tensors(report: Report) -> str:
    return f"{report['settings']['tensors']:,}"


def _share(report: Report) -> str:
    return f"{report['shares'][OURS]['median'] * 100:.2f}"


def checkpoints(reports: Reports) -> str:
    report = reports["checkpoint_2_ranks"]
    text = paragraph(
        "Saving and loading the optimizer's state of the GPT on two ranks (`bench_checkpoint.py`),",
        "by torch.distributed.checkpoint (DCP) and as one file that the first rank writes, the",
        "same calls for FSDP2: *beside* is the memory that a rank needed at most beyond what it",
        "had.",
    )
    columns = ["", "file", "save ms", "load ms", "beside it: save", "load"]
    rows = [
        [
            row["name"],
            volume(row["file_bytes"]),
            median(row, "save_seconds", 0, 1e3),
            median(row, "load_seconds", 0, 1e3),
            volume(row["save_peak_bytes"]["median"]),
            volume(row["load_peak_bytes"]["median"]),
        ]
        for row in report["results"]
    ]
    return f"{text}\n\n{table(columns, rows)}"


def claims(reports: Reports) -> str:
    """Every bar of every report: those that are missed in sight, the others folded away."""
    columns = ("report", "what is claimed", "wanted", "measured")
    rows = [(bar["met"], _claim(name, bar)) for name, bar in _bars(reports)]
    missed = [cells for met, cells in rows if not met]
    kept = [cells for met, cells in rows if met]
    lost = f"These are missed:\n\n{table(columns, missed)}\n\n" if missed else ""
    return (
        f"Of {len(rows)} claims that the benchmarks judge by themselves {len(kept)} are met. {lost}"
        f"<details><summary>Those that are met</summary>\n\n{table(columns, kept)}\n\n</details>"
    )


def _bars(reports: Reports) -> Iterator[tuple[str, Report]]:
    for name, report in reports.items():
        yield from ((name, bar) for bar in report.get("bars", ()))


def _claim(name: str, bar: Report) -> tuple[str, ...]:
    measured = f"{bar['measured']['median']:.2f}"
    if "ceiling" in bar:
        measured += f" of at most {bar['ceiling']['median']:.2f}"
    return f"`{name}`", bar["claim"], bar["wanted"], measured


def sources(reports: Reports) -> str:
    columns = ("report", "date", "commit", "cores that others kept busy", "processor")
    return table(columns, _sources(reports))


def _sources(reports: Reports) -> Iterator[tuple[str, ...]]:
    for name, report in reports.items():
        date, cpu = report["date"][:10], report["machine"]["cpu"]
        yield f"`{name}`", date, f"`{commit(report)}`", busiest(report), cpu


SECTIONS: list[Callable[[Reports], str]] = [
    introduction,
    step,
    kernel,
    mixed,
    scale,
    hooks,
    audits,
    checkpoints,
    claims,
    sources,
]
