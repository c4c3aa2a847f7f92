"""`fusedshard demo` as a user runs it: to its end, and ended before."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedshard import cli
from fusedshard.demo import command as demo
from fusedshard.demo import plot as demo_plot
from fusedshard.demo import report as demo_report
from fusedshard.demo.model import GPT, Batches, load_corpus, standard_library
from fusedshard.demo.train import VARIANTS, Settings

SETTINGS = Settings(ranks=3, steps=5, seed=5)
NUMEL = [parameter["numel"] for parameter in demo_report.describe_parameters(SETTINGS)]


# -- the whole command ----------------------------------------------------------------------------


@dataclass
class Finished:
    output: str
    folder: Path
    report: dict[str, Any]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One run of the command with every option, from a folder that is not the source tree."""
    folder = tmp_path_factory.mktemp("demo")
    options = {"--ranks": 3, "--steps": 5, "--seed": 5, "--out": "a report"}
    arguments = [str(part) for option in options.items() for part in option]
    result = subprocess.run(
        [sys.executable, "-m", "fusedshard.cli", "demo", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    out = folder / "a report"
    return Finished(result.stdout, out, json.loads((out / "report.json").read_text()))


def test_demo_prints_a_row_a_variant(finished: Finished) -> None:
    rows = [line.split() for line in finished.output.splitlines()]
    table = {row[0]: row[1:] for row in rows if row and row[0] in VARIANTS and len(row) >= 13}
    assert set(table) == set(VARIANTS)
    for variant, found in finished.report["variants"].items():
        assert table[variant][:2] == [f"{found['loss'][0]:.3f}", f"{found['loss'][-1]:.3f}"]
        assert table[variant][7] == f"{max(found['moment_bytes']) / 1e6:.1f}"
    assert table["ddp"][4].startswith("(")
    assert [table[variant][8] for variant in ("ddp", "sharded")] == ["8.00", "2.67"]
    assert table["replicated"][10:13] == ["identical"] * 3
    assert table["sharded"][10:15] == ["own", "shard", "own", "shard", "identical"]
    assert table["mistake"][10:13] == ["different"] * 3


def test_demo_prints_a_line_a_variant_and_a_verdict(finished: Finished) -> None:
    for variant in VARIANTS:
        assert len(re.findall(rf"^{variant}: 5 steps, loss \d", finished.output, re.M)) == 1
    assert len(re.findall(r"^ok  \S", finished.output, re.M)) == 8
    assert "have diverged from step 1 on" in finished.output
    assert "FAILED" not in finished.output
    assert "\x1b" not in finished.output


def test_report_says_what_was_run(finished: Finished) -> None:
    report = finished.report
    assert report["ok"] is True
    assert [verdict["ok"] for verdict in report["verdicts"]] == [True] * 8
    assert (report["settings"]["ranks"], report["settings"]["seed"]) == (3, 5)
    assert report["torch"] == torch.__version__
    assert report["machine"]["threads_per_rank"] == demo.threads_per_rank(3)
    assert [parameter["numel"] for parameter in report["parameters"]] == NUMEL


def test_report_holds_documented_keys_alone(finished: Finished) -> None:
    documentation = demo_report.__doc__ or ""
    head, of_a_variant = documentation.split("A variant holds:")
    for keys, text in (
        (finished.report.keys(), head),
        (finished.report["variants"]["ddp"].keys(), of_a_variant),
    ):
        rows = re.findall(r"^(\w+(?:, \w+)*) {2,}", text, re.M)
        documented = {key for row in rows for key in row.split(", ")}
        assert documented == set(keys)


def batches_of(text: bytes, rank: int) -> Batches:
    return Batches(text, rank, SETTINGS.ranks, SETTINGS.seed, SETTINGS.batch, SETTINGS.context)


def test_losses_are_those_of_training_on_the_mean_gradient(finished: Finished) -> None:
    """An oracle in one process, on two steps, since the second depends on the first's update."""
    text = load_corpus(standard_library())
    torch.manual_seed(SETTINGS.seed)
    model = GPT(SETTINGS.width, SETTINGS.depth, SETTINGS.heads, SETTINGS.context)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=SETTINGS.lr, weight_decay=SETTINGS.weight_decay
    )
    slices = [batches_of(text, rank) for rank in range(3)]
    for step in range(3):
        losses = [model(*batches.next()) for batches in slices]
        mean = torch.stack(losses).mean()
        for variant in ("ddp", "replicated", "sharded"):
            found = finished.report["variants"][variant]["loss"][step]
            assert found == pytest.approx(mean.item(), abs=1e-4)
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert finished.report["variants"]["ddp"]["loss"][-1] < losses[0].item()
    mistaken = finished.report["variants"]["mistake"]["loss"]
    assert mistaken[0] == finished.report["variants"]["ddp"]["loss"][0]
    assert mistaken[2] != pytest.approx(mean.item(), abs=1e-4)


def test_bytes_are_those_of_the_algorithms(finished: Finished) -> None:
    """Parameters and moments are fp32; with padding below one per cent."""
    size = 4 * sum(NUMEL)
    variants = finished.report["variants"]
    for variant in ("ddp", "replicated", "mistake"):
        for held in variants[variant]["moment_bytes"]:
            assert 2 * size <= held <= 2 * size * 1.01
    for held in variants["sharded"]["moment_bytes"]:
        assert held == pytest.approx(2 * size / 3, rel=0.01)
    assert 2 * size <= sum(variants["sharded"]["moment_bytes"]) <= 2 * size * 1.01
    assert all(found["master_bytes"] == [0] * 3 for found in variants.values())
    for variant in ("ddp", "replicated", "sharded"):
        for sent in variants[variant]["wire_bytes"]:
            assert sent == pytest.approx(2 * (3 - 1) / 3 * size, rel=0.01)
    assert max(variants["mistake"]["wire_bytes"]) < 1000


def test_times_add_up_to_a_step(finished: Finished) -> None:
    for variant, found in finished.report["variants"].items():
        ms = found["ms"]
        assert ms["forward_backward"] > 0
        assert ms["update"] > 0
        assert (ms["gather"] > 0) == (variant != "ddp")
        assert ms["exchange"] > 0
        assert max(ms["forward_backward"], ms["exchange"], ms["update"]) < ms["total"]


def test_audits_find_what_each_variant_is(finished: Finished) -> None:
    audits = {name: found["audit"] for name, found in finished.report["variants"].items()}
    for name in ("ddp", "replicated"):
        assert audits[name] == {
            "kind": "replicated", "ok": True, "headline": "replicated, identical"
        }  # fmt: skip
    assert audits["sharded"]["headline"] == "sharded, each element owned once"
    assert (audits["mistake"]["kind"], audits["mistake"]["ok"]) == ("diverged", False)
    said = " ".join(finished.output.split())
    for name, audit in audits.items():
        assert f'{name}: "{audit["headline"]}"' in said


def test_an_audit_stops_the_mistake_on_every_rank(finished: Finished) -> None:
    caught = finished.report["caught"]
    assert caught["audit_every"] == 5  # not more than the steps
    assert len(caught["by_rank"]) == 3
    for told in caught["by_rank"]:
        assert (told["step"], told["part"]) == (5, "grad")
        assert "grad of token.weight differs" in told["message"]
    assert f"every rank stops: {caught['by_rank'][0]['message']}" in " ".join(
        finished.output.split()
    )


def test_picture_shows_the_four_variants_and_the_ranks(finished: Finished) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    data = (finished.folder / "report.png").read_bytes()
    assert struct.unpack(">II", data[16:24]) == (1600, 1000)
    seen = imread(finished.folder / "report.png")[:, :, :3]
    colours = [*demo_plot.RANK_COLOURS[:3], demo_plot.VARIANT_COLOURS["mistake"]]
    for colour in colours:
        distance = abs(seen - to_rgb(colour)).max(axis=2)
        assert (distance < 0.01).sum() > 100


# -- ends before its end --------------------------------------------------------------------------


def session_of(leader: int) -> dict[int, str]:
    """Running processes of a session: number to command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            if int(session) == leader and state not in "ZX":
                found[int(folder.name)] = (folder / "cmdline").read_text()
        except OSError:  # it has ended meanwhile
            continue
    return found


def ranks_of(leader: int) -> list[int]:
    return sorted(pid for pid, command in session_of(leader).items() if "spawn_main" in command)


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


@contextmanager
def endless_demo(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The command in a session of its own, with more steps than anybody waits for."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fusedshard.cli", "demo", "--steps", "1000000"],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background jobs ignore it, and so would all that they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        yield process
    finally:
        for pid in session_of(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def wait_until_ranks_meet(folder: Path, leader: int) -> None:
    wait_for(lambda: any(path.stat().st_size for path in folder.glob("*/rendezvous")))
    assert len(ranks_of(leader)) == 2


def without_gloo(error: str) -> str:
    """Without what gloo itself logs when a peer dies while it connects."""
    return "".join(line for line in error.splitlines(True) if "/gloo/transport/" not in line)


INTERRUPTED = "fusedshard demo: interrupted, all ranks ended\n"


@pytest.mark.parametrize("training", [False, True], ids=["starting", "training"])
@pytest.mark.parametrize(
    ("number", "to_group", "status", "error"),
    [
        (signal.SIGINT, True, 130, INTERRUPTED),
        (signal.SIGTERM, False, 143, ""),
    ],
    ids=["ctrl_c", "sigterm"],
)
def test_a_signal_ends_all_ranks(
    training: bool, number: int, to_group: bool, status: int, error: str, tmp_path: Path
) -> None:
    with endless_demo(tmp_path) as process:
        wait_for(lambda: len(ranks_of(process.pid)) == 2)
        if training:
            wait_until_ranks_meet(tmp_path, process.pid)
        (os.killpg if to_group else os.kill)(process.pid, number)
        assert process.wait(timeout=30) == status
        wait_for(lambda: not session_of(process.pid), seconds=10)
        assert without_gloo(process.communicate()[1]) == error
    assert list(tmp_path.iterdir()) == []


def test_a_killed_rank_ends_the_command(tmp_path: Path) -> None:
    with endless_demo(tmp_path) as process:
        wait_until_ranks_meet(tmp_path, process.pid)
        os.kill(ranks_of(process.pid)[-1], signal.SIGKILL)
        error = process.communicate(timeout=30)[1]
        assert process.returncode == 1
        message = r"fusedshard demo: error: rank \d of 2 was killed by SIGKILL\n"
        assert re.fullmatch(message, without_gloo(error))
        wait_for(lambda: not session_of(process.pid), seconds=10)
    assert list(tmp_path.iterdir()) == []


def test_ranks_end_when_the_command_is_killed(tmp_path: Path) -> None:
    with endless_demo(tmp_path) as process:
        wait_until_ranks_meet(tmp_path, process.pid)
        process.kill()
        wait_for(lambda: not session_of(process.pid), seconds=10)


def test_an_error_of_a_rank_is_reported_with_its_traceback() -> None:
    with pytest.raises(demo.RankFailed, match=r"rank \d of 2 failed: RuntimeError: ") as failed:
        demo.run_ranks(Settings(ranks=2, steps=2, batch=-1), lambda step: None)
    assert "in next\n" in failed.value.details


def test_no_sources_to_train_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "standard_library", lambda: tmp_path)
    assert cli.main(["demo"]) == 1
    assert f"{tmp_path} has none" in capsys.readouterr().err
