"""fusedshard plan: what it prints and refuses, the models that it reads, and its formulas by
hand."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedshard import cli
from fusedshard.planning.models import Model, Parameter, UnusableModel, read, transformer
from fusedshard.planning.plan import Question, least_ranks, ways

README = Path(__file__).resolve().parent.parent / "README.md"
Capsys = pytest.CaptureFixture[str]


def planned(capsys: Capsys, *arguments: str) -> dict[str, Any]:
    assert cli.main(["plan", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def by_name(plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {way["name"]: way for way in plan["ways"]}


# -- formulas -------------------------------------------------------------------------------------


def test_traffic_and_times_by_hand(tmp_path: Path, capsys: Capsys) -> None:
    """A million fp32 numbers on 4 ranks, at 6 GB/s on the wire and 7 GB/s in memory."""
    (tmp_path / "m.json").write_text('{"w": {"shape": [1000, 1000], "dtype": "fp32"}}')
    plan = planned(
        capsys, "--model", "m.json", "--ranks", "4", "--bandwidth", "6GB/s",
        "--memory-bandwidth", "7GB/s", "--backend", "gloo",
    )  # fmt: skip
    found = by_name(plan)
    # 2 (N-1)/N of 4 MB at 6 GB/s; 7 times 4 MB at 7 GB/s.
    assert found["DDP"]["sent"] == {"all_reduce": 6_000_000}
    assert found["DDP"]["seconds"] == pytest.approx({"wire": 1e-3, "update": 4e-3})
    # The one tensor is on one rank, and broadcast from there.
    zero = found["ZeroRedundancyOptimizer"]
    assert zero["sent"] == {"all_reduce": 6_000_000, "broadcast": 3_000_000}
    assert zero["seconds"] == pytest.approx({"wire": 1.5e-3, "update": 4e-3})
    fsdp = found["FSDP2"]
    assert fsdp["sent"] == {"all_gather": 3_000_000, "reduce_scatter": 3_000_000}
    assert fsdp["seconds"] == pytest.approx({"wire": 1e-3, "update": 1e-3})
    # Shards of 250,000 numbers are padded to 250,016, a multiple of 32.
    ours = found["sharded fp32"]
    share = 3 * 4 * 250_016
    assert ours["sent"] == {"all_to_all": share, "all_gather": share, "status": 3 * 12}
    assert ours["moved"] == 28 * 250_016
    assert ours["seconds"]["wire"] == pytest.approx((2 * share + 36) / 6e9)
    assert ours["seconds"]["update"] == pytest.approx(28 * 250_016 / 7e9)


def test_blocks_are_gathered_twice_and_the_root_once(tmp_path: Path, capsys: Capsys) -> None:
    """fp32 shards of bf16 blocks on 2 ranks; 3 rows are padded to 4."""
    shapes = {"head": [8, 10], "layers.0.w": [3, 10], "layers.1.w": [4, 10], "layers.1.v": [2]}
    (tmp_path / "m.json").write_text(json.dumps(shapes))
    fsdp = by_name(planned(capsys, "--model", "m.json", "--ranks", "2"))["FSDP2, fp32 shards"]
    root, first, second = 80, 40, 42
    assert fsdp["sent"] == {
        "all_gather": 2 * (root + 2 * first + 2 * second) // 2,
        "reduce_scatter": 4 * (root + first + second) // 2,
    }
    assert fsdp["memory"] == {
        "parameters": 4 * (root + first + second) // 2,
        "gradients": 4 * (root + first + second) // 2,
        "masters": 0,
        "exp_avg": 4 * (40 + 20 + 20 + 1),
        "exp_avg_sq": 4 * (40 + 20 + 20 + 1),
        "steps": 16,
        "buffers": {
            "gathered": 2 * (root + second),
            "arriving": 2 * first,
            "unreduced": 2 * second,
            "scattered": 4 * first,
        },
    }


def test_fewest_ranks_are_those_found_one_by_one() -> None:
    shapes = [(f"layers.{i}.w", (40, 1000)) for i in range(12)]
    model = Model(tuple(Parameter(*pair, torch.bfloat16) for pair in shapes), "test")
    found, _ = ways(Question(model, 1, states=("fp32", "8bit"), bucket_cap_mb=0.1))
    answers = set()
    for way in found:
        fits = {ranks: way.usage(ranks).total for ranks in range(1, 65)}
        for room in (700_000, 2_500_000, 3_600_000, 5_500_000):
            least = least_ranks(way, room)
            fitting = [ranks for ranks, total in fits.items() if total <= room]
            if least is None:
                assert not {1, 2, 4, 8, 16, 32, 64} & set(fitting)
            else:
                assert fitting[0] == least
            answers.add(least)
    assert {None, 1, 3} < answers and max(answer or 0 for answer in answers) > 8


@pytest.mark.parametrize("numel", [1, 10_000_000, 124_000_000, 10_000_000_001, 10**12])
def test_a_transformer_has_as_many_parameters_as_asked(numel: int) -> None:
    model = transformer(numel, torch.bfloat16)
    assert model.numel == numel
    blocks = {p.block for p in model.parameters} - {None}
    rest = model.parameters[-1]
    assert rest.name == "rest"
    if blocks:
        layer = sum(p.numel for p in model.parameters if p.block == "layers.0")
        assert rest.numel < layer, "another layer would have fitted"
        assert f"{len(blocks)} layers of width" in model.origin


# -- output ---------------------------------------------------------------------------------------


def test_the_tables_say_what_the_json_says(capsys: Capsys) -> None:
    arguments = ["--params", "10B", "--ranks", "8", "--gpu-memory", "60GiB"]
    arguments += ["--bandwidth", "450GB/s", "--memory-bandwidth", "3.35TB/s"]
    plan = planned(capsys, *arguments)
    assert cli.main(["plan", *arguments]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80
    assert plan["model"]["parameters"] == 10**10 and "10,000,000,000 parameters" in printed
    for way in plan["ways"]:
        held, traffic = [line for line in lines if line.strip().startswith(f"{way['name']} ")]
        least = [str(way["least_ranks"])] if way["least_ranks"] else ["none"]
        wanted = [f"{way['total'] / 2**30:.2f}", *least, "✓" if way["fits"] else "✗"]
        assert held.split()[-len(wanted) :] == wanted
        assert f"{way['total_sent'] / 1e9:.2f}" in traffic.split()
    for word in ("activations", "arXiv:1910.02054", "(N-1)/N", "decoder-only transformer"):
        assert word in printed


def test_the_readme_shows_what_is_printed(capsys: Capsys) -> None:
    section = README.read_text().partition("## Plan")[2]
    command, *shown = section.partition("```\n$ fusedshard ")[2].partition("```")[0].splitlines()
    assert cli.main(command.split()) == 0
    printed = iter([line.rstrip() for line in capsys.readouterr().out.splitlines()])
    for line in shown:
        assert line in printed, "in that order"


def test_every_precision_on_demand(capsys: Capsys) -> None:
    plan = planned(capsys, "--params", "1M", "--ranks", "2", "--state", "all")
    names = [way["name"] for way in plan["ways"] if way["library"] == "fusedshard"]
    masters = ("remainders", "masters")
    for mode in ("sharded", "replicated"):
        for state in ("fp32", "bf16", "8bit"):
            assert {f"{mode} {state} + {kind}" for kind in masters} < set(names)
            assert f"{mode} {state} alone" in names
    assert len(names) == 18
    fp16 = by_name(planned(capsys, "--params", "1M", "--ranks", "2", "--dtype", "fp16"))
    assert fp16["sharded fp32 + masters"]["memory"]["masters"] >= 4 * 500_000


def test_options_reach_the_optimizers(capsys: Capsys) -> None:
    arguments = ["--params", "10M", "--ranks", "4", "--dtype", "fp32"]
    default = by_name(planned(capsys, *arguments))["sharded fp32"]
    assert default["memory"]["buffers"]["receive"] == 0  # NCCL adds
    ordered = by_name(planned(capsys, *arguments, "--reduction", "ordered"))["sharded fp32"]
    gloo = by_name(planned(capsys, *arguments, "--backend", "gloo"))["sharded fp32"]
    buffers = [way["memory"]["buffers"] for way in (ordered, gloo)]
    assert buffers[0]["receive"] == buffers[0]["send"] == buffers[1]["receive"] * 4 // 3
    small = by_name(planned(capsys, *arguments, "--bucket-cap-mb", "2.5"))["sharded fp32"]
    assert small["memory"]["buffers"]["send"] < default["memory"]["buffers"]["send"] / 3
    external = by_name(planned(capsys, *arguments, "--grad-sync", "external"))["sharded fp32"]
    assert external["memory"]["buffers"]["ddp_buckets"] == 40_000_000
    assert external["sent"]["ddp_all_reduce"] == 60_000_000


# -- models ---------------------------------------------------------------------------------------


def safetensors(path: Path, entries: dict[str, Any]) -> None:
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))


def entry(dtype: str, *shape: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [0, 0]}


def test_a_safetensors_file(tmp_path: Path) -> None:
    entries = {"__metadata__": {"format": "pt"}, "a.0.w": entry("BF16", 3, 5)}
    safetensors(tmp_path / "m.safetensors", {**entries, "b": entry("F32"), "ids": entry("I64", 9)})
    model = read(tmp_path / "m.safetensors", None)
    assert model.parameters == (
        Parameter("a.0.w", (3, 5), torch.bfloat16),
        Parameter("b", (), torch.float32),
    )
    assert model.origin == "m.safetensors, without 1 of integers"
    assert read(tmp_path / "m.safetensors", torch.float16).dtypes == [torch.float16]


def test_an_index_of_safetensors_files(tmp_path: Path) -> None:
    safetensors(tmp_path / "1.safetensors", {"b": entry("F16", 2), "a": entry("F64", 4)})
    safetensors(tmp_path / "2.safetensors", {"c": entry("BF16", 7)})
    index = tmp_path / "model.safetensors.index.json"
    weight_map = {"a": "1.safetensors", "c": "2.safetensors", "b": "1.safetensors"}
    index.write_text(json.dumps({"metadata": {"total_size": 50}, "weight_map": weight_map}))
    assert read(index, None).parameters == (
        Parameter("a", (4,), torch.float64),
        Parameter("c", (7,), torch.bfloat16),
        Parameter("b", (2,), torch.float16),
    )
    index.write_text(json.dumps({"weight_map": {**weight_map, "d": "2.safetensors"}}))
    with pytest.raises(UnusableModel, match=r"2\.safetensors: has no d, which model"):
        read(index, None)
    index.write_text(json.dumps({"weight_map": {"a": "../1.safetensors"}}))
    with pytest.raises(UnusableModel, match="wanted for each name a file beside the index"):
        read(index, None)


def test_a_json_of_shapes(tmp_path: Path) -> None:
    text = '{"a": [2, 3], "b": {"shape": [4], "dtype": "torch.float32"}, "c": {"shape": []}}'
    (tmp_path / "m.json").write_text(text)
    assert read(tmp_path / "m.json", None).parameters == (
        Parameter("a", (2, 3), torch.bfloat16),
        Parameter("b", (4,), torch.float32),
        Parameter("c", (), torch.bfloat16),
    )


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("--params", "10X", "a count from 1 to 10T, as 10B"),
        ("--params", "0", "a count from 1 to 10T"),
        ("--params", "-5B", "a count from 1 to 10T"),
        ("--params", "nan", "a count from 1 to 10T"),
        ("--params", "11T", "a count from 1 to 10T"),
        ("--ranks", "0", "an integer from 1 to 65536"),
        ("--ranks", "2.5", "an integer from 1 to 65536"),
        ("--gpu-memory", "80", "a size above 0 as 80GiB"),
        ("--gpu-memory", "0GiB", "a size above 0"),
        ("--bandwidth", "450GB", "a rate above 0 as 450GB/s"),
        ("--memory-bandwidth", "fast", "a rate above 0"),
        ("--bucket-cap-mb", "0", "a number above 0"),
    ],
)
def test_numbers_that_make_no_sense(option: str, value: str, wanted: str, capsys: Capsys) -> None:
    arguments = {"--params": "1M", "--ranks": "2", option: value}
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *(f"{name}={text}" for name, text in arguments.items())])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"argument {option}: got '{value}', wanted {wanted}" in error


def test_an_unknown_dtype(capsys: Capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "--params", "1M", "--ranks", "2", "--dtype", "fp8"])
    assert ended.value.code == 2
    assert "argument --dtype: invalid choice: 'fp8'" in capsys.readouterr().err


def header_of(length: int, text: bytes) -> bytes:
    return struct.pack("<Q", length) + text


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("m.json", None, "No such file"),
        ("m.json", b"{", "cannot be read as JSON"),
        ("m.json", b"\xff\xfe", "cannot be read as JSON"),
        ("m.pt", b"PK\x03\x04", "got a file of torch.save, wanted JSON or safetensors"),
        ("m.json", b"[" * 100_000, "cannot be read as JSON"),
        ("m.json", b"[1, 2]", "got a list, wanted names with shapes"),
        ("m.json", b"{}", "got 0 parameters, wanted 1 to"),
        ("m.json", b'{"w": [0]}', "got 0 parameters, wanted 1 to"),
        ("m.json", b'{"w": [281474976710655, 9]}', "parameters, wanted 1 to 10,000,000,000,000"),
        ("m.json", b'{"w": 5}', "w: got 5, wanted a shape as [3, 5] or"),
        ("m.json", b'{"w": [3, -1]}', "w: got [3, -1], wanted a shape"),
        ("m.json", b'{"w": [3, true]}', "w: got [3, True], wanted a shape"),
        ("m.json", b'{"w": [1.5]}', "w: got [1.5], wanted a shape"),
        ("m.json", b'{"w": [140737488355328, 140737488355328, 0]}', "wanted a shape"),
        ("m.json", b'{"weight_map": {"w": "x\\u0000"}}', "weight_map: wanted for each name a file"),
        ("m.bin", header_of(50, b'{"w": {}}'), "got 17 bytes that announce a header of 50"),
        ("m.json", b'{"w": {"dtype": "bf16"}}', "wanted a shape"),
        ("m.json", b'{"w": {"shape": [3], "dtype": 7}}', "w: got dtype 7, wanted its name"),
        ("m.json", b'{"w": {"shape": [3], "dtype": "fp8"}}', "w: got dtype 'fp8', wanted one of"),
        ("m.json", b'{"weight_map": 3}', "weight_map: wanted for each name a file"),
        ("m.json", b'{"weight_map": {"w": "x.safetensors"}}', "x.safetensors"),
        ("m.safetensors", b"", "got 0 bytes that announce a header of 0"),
        ("m.safetensors", b"\x05\x00", "got 2 bytes that announce"),
        ("m.safetensors", header_of(50, b'{"w": {}}'), "got 17 bytes that announce a header of 50"),
        ("m.safetensors", header_of(2**60, b"{}"), "wanted a safetensors file with a whole one"),
        ("m.safetensors", header_of(3, b"{]}"), "cannot be read as JSON"),
    ],
)
def test_files_that_are_no_model(
    name: str, content: bytes | None, wanted: str, tmp_path: Path, capsys: Capsys
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert cli.main(["plan", "--model", str(path), "--ranks", "2"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fusedshard plan: error: ") and error.count("\n") == 1
    assert wanted in error and str(tmp_path) in error


def test_without_rich_there_is_json(monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert cli.main(["plan", "--params", "1M", "--ranks", "2"]) == 2
    assert "needs rich: pip install 'fusedshard[demo]'" in capsys.readouterr().err
    assert planned(capsys, "--params", "1M", "--ranks", "2")["ranks"] == 2
