"""The demo with bf16 parameters and with moments of fewer bits, beside its fp32 run."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import MAX_RANKS, Rank, RankPool
from rich.console import Console

from fusedshard import cli
from fusedshard.demo import command as demo
from fusedshard.demo import report as demo_report
from fusedshard.demo.baseline import MasterAdamW
from fusedshard.demo.model import load_corpus, standard_library
from fusedshard.demo.train import VARIANTS, Settings, run_variants
from fusedshard.display import PLAIN_WIDTH

STEPS = 14
FORMATS = [("bf16", "fp32"), ("bf16", "bf16"), ("bf16", "8bit"), ("fp32", "8bit")]
MOMENT_BYTES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2.1}


def small(dtype: str, state_dtype: str) -> Settings:
    """Enough for every kind of parameter: large, and below the least size of 8-bit moments."""
    return Settings(
        ranks=MAX_RANKS, steps=STEPS, batch=2, context=32, width=64, depth=1, heads=2, lr=3e-3,
        dtype=dtype, state_dtype=state_dtype,
    )  # fmt: skip


def run(rank: Rank, settings: Settings) -> dict[str, Any]:
    text = load_corpus(standard_library(), limit=200_000)
    return run_variants(settings, text, lambda variant, step, loss: None)


Reports = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def report_of(ranks: RankPool) -> Reports:
    """The demo's ranks are the default group: all of the pool."""

    @functools.cache
    def report(dtype: str, state_dtype: str) -> dict[str, Any]:
        settings = small(dtype, state_dtype)
        return demo_report.summarize(settings, ranks.run(MAX_RANKS, run, settings), 1, 1.0)

    return report


@pytest.mark.parametrize(("dtype", "state_dtype"), FORMATS)
def test_losses_bytes_and_verdicts(report_of: Reports, dtype: str, state_dtype: str) -> None:
    report, in_fp32 = report_of(dtype, state_dtype), report_of("fp32", "fp32")
    assert report["ok"], report["verdicts"]
    tolerance = 0.02 if state_dtype == "8bit" else 0.01
    numel = sum(parameter["numel"] for parameter in report["parameters"])
    for variant in ("ddp", "replicated", "sharded"):
        found, want = report["variants"][variant], in_fp32["variants"][variant]
        assert found["loss"][-1] == pytest.approx(want["loss"][-1], rel=tolerance)
        assert found["loss"][-1] < 0.8 * found["loss"][0]
    shares = {"replicated": 1, "sharded": MAX_RANKS}
    for variant, share in shares.items():
        found, want = report["variants"][variant], in_fp32["variants"][variant]
        for moments, masters in zip(found["moment_bytes"], found["master_bytes"], strict=True):
            assert moments * share == pytest.approx(MOMENT_BYTES[state_dtype] * numel, rel=0.1)
            wanted = 2 * numel if dtype == "bf16" else 0
            assert masters * share == pytest.approx(wanted, rel=0.1)
    ddp = report["variants"]["ddp"]
    assert ddp["moment_bytes"] == [8 * numel] * MAX_RANKS
    assert ddp["master_bytes"] == [4 * numel if dtype == "bf16" else 0] * MAX_RANKS
    sent, before = (r["variants"]["sharded"]["wire_bytes"] for r in (report, in_fp32))
    narrower = 2 if dtype == "bf16" else 1
    assert narrower * sent[0] == pytest.approx(before[0], rel=0.1)


def test_the_table_shows_moments_and_masters(report_of: Reports) -> None:
    report = report_of("bf16", "bf16")
    text = io.StringIO()
    demo_report.show(report, Console(file=text, width=PLAIN_WIDTH, highlight=False))
    rows = [line.split() for line in text.getvalue().splitlines()]
    table = {row[0]: row[1:] for row in rows if row and row[0] in VARIANTS and len(row) >= 13}
    assert set(table) == set(VARIANTS)
    assert table["ddp"][8] == "8.00+4.00"
    numel = sum(parameter["numel"] for parameter in report["parameters"])
    for variant in ("replicated", "sharded", "mistake"):
        found = report["variants"][variant]
        parts = [max(found[key]) / numel for key in ("moment_bytes", "master_bytes")]
        assert table[variant][8] == "{:.2f}+{:.2f}".format(*parts)
        assert table[variant][7] == f"{sum(parts) * numel / 1e6:.1f}"
    assert "master_weights, step and parameters are identical on all 4 ranks" in text.getvalue()


def test_a_narrow_terminal_cuts_no_number(report_of: Reports) -> None:
    report = report_of("bf16", "bf16")

    def numbers(width: int) -> dict[str, list[str]]:
        """Of each variant, in all tables."""
        text = io.StringIO()
        console = Console(file=text, width=width, highlight=False)
        for table in demo_report.make_tables(report, console):
            console.print(table)
        rows = [line.split() for line in text.getvalue().splitlines()]
        return {v: [cell for row in rows if row[:1] == [v] for cell in row[1:]] for v in VARIANTS}

    whole = numbers(1000)
    assert all(len(cells) >= 13 for cells in whole.values())
    assert numbers(80) == numbers(50) == whole


def test_the_commands_formats_reach_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def remember(settings: Settings, out: Any) -> dict[str, Any]:
        seen.append(settings)
        return {"ok": True}

    monkeypatch.setattr(demo, "train_and_report", remember)
    assert cli.main(["demo", "--dtype", "bf16", "--state-dtype", "8bit"]) == 0
    assert cli.main(["demo"]) == 0
    assert [(s.dtype, s.state_dtype) for s in seen] == [("bf16", "8bit"), ("fp32", "fp32")]


@pytest.mark.parametrize("steps", [3, 300])
def test_baseline_is_adamw_in_fp32(steps: int) -> None:
    """To the bit, on the same gradients; without masters 300 updates of 1e-4 would leave a bf16 1.0
    where it is."""
    parameter = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    exact = torch.nn.Parameter(torch.ones(5))
    options: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
    ours, theirs = (
        MasterAdamW([parameter], **options),
        torch.optim.AdamW([exact], fused=True, **options),
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        ours.zero_grad()
        parameter.grad = (1 + torch.rand(5, generator=generator)).to(torch.bfloat16)
        exact.grad = parameter.grad.float()
        ours.step()
        theirs.step()
    assert torch.equal(ours.masters[0], exact)
    assert torch.equal(parameter, exact.to(torch.bfloat16))
    assert (exact < 1 - 0.9e-4 * steps).all()
    ours.zero_grad()
    assert parameter.grad is None
