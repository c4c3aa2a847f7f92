"""torch.distributed.checkpoint's helpers with our optimizer: options, asynchronous saving, what is
in the folders, and what is not."""

from __future__ import annotations

import io
import math
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from interchange import NOTHING, STEPS, Job, Ours, assert_same, by_name, donate, take
from mixed import BF16
from ranks import MAX_RANKS, Rank, RankPool
from saved_jobs import audit
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from training import assert_same_bits

import fusedshard
from fusedshard.sharded_state import Stretch

GATHERED = StateDictOptions(full_state_dict=True)
GATHERED_TO_HOST = StateDictOptions(full_state_dict=True, cpu_offload=True)


# -- asynchronous saving ---------------------------------------------------------------------------


@pytest.mark.parametrize("own_writer", [False, True])
def test_a_step_while_async_save_runs(ranks: RankPool, tmp_path: Path, own_writer: bool) -> None:
    for saved, loaded, probe in ranks.run(3, _async, tmp_path, own_writer):
        if probe:
            pytest.skip("async_save of this torch takes no copy of tensors in host memory")
        assert_same_bits(loaded, saved)


def _async(rank: Rank, folder: Path, own_writer: bool) -> Any:
    """What was there when it was called, and what is loaded."""
    job = Ours(rank, "AdamW", dtype=BF16)
    job.train()
    saved, probe, may_write = job.whole(), torch.zeros(3), threading.Event()
    content = {**job.shown(), "probe": probe}
    if own_writer:  # as torch stages then, one number cannot be on one rank alone
        del content["optim"]["state"]["scalar"]
    with mock.patch.object(FileSystemWriter, "write_data", _held(may_write)):
        future: Any = dcp.async_save(  # type: ignore[attr-defined]
            content,
            checkpoint_id=folder,
            storage_writer=FileSystemWriter(folder) if own_writer else None,
            process_group=dist.new_group(list(range(rank.world_size))),  # not the step's
        )
        probe.fill_(1)
        for number in range(STEPS, 2 * STEPS):
            job.step(number)
        may_write.set()
        future.result()
    again = Ours(rank, "AdamW", seed=5, dtype=BF16)
    found = {**again.shown(), "probe": torch.ones(3)}
    if own_writer:
        del found["optim"]["state"]["scalar"]
    dcp.load(found, checkpoint_id=folder, process_group=rank.group)  # type: ignore[attr-defined]
    again.load(found)
    loaded = again.whole()
    for whole in (saved, loaded) if own_writer else ():
        whole.state.pop("scalar", None)
    return saved.state, loaded.state, found["probe"][0].item()


def _held(may_write: threading.Event) -> Callable[..., Any]:
    write = FileSystemWriter.write_data

    def wait_and_write(*args: Any) -> Any:
        assert may_write.wait(60)
        return write(*args)

    return wait_and_write


# -- whole state dicts by name ---------------------------------------------------------------------


def test_gathering_is_by_consolidate_state_dict(ranks: RankPool) -> None:
    """`get_optimizer_state_dict` cannot gather what is no DTensor; on the rank that has
    consolidated it finds the whole, as often as it is asked."""
    first, *others = ranks.run(MAX_RANKS, _gather)
    assert others == [([], [])] * (MAX_RANKS - 1)
    found, expected = first
    for state in found:
        torch.testing.assert_close(state, expected, rtol=0, atol=0)


def _gather(rank: Rank) -> Any:
    job = Ours(rank, "AdamW")
    job.train()
    found = []
    job.optimizer.consolidate_state_dict()
    for _ in range(3):
        shown = get_optimizer_state_dict(job.model, job.optimizer, options=GATHERED_TO_HOST)
        found += [shown["state"]] if shown else []
    expected = job.whole().state
    return found, expected if rank.rank == 0 else []


def _save_to_file(job: Job, gathered: Any, folder: Path) -> None:
    torch.save(gathered, io.BytesIO())


def _compute(job: Job, gathered: Any, folder: Path) -> None:
    gathered["state"]["wide"]["exp_avg"] + 1


def _step_with_torch(job: Job, gathered: Any, folder: Path) -> None:
    alone = Job(job.rank, "AdamW")
    alone.optimizer.load_state_dict(gathered)
    alone.step(STEPS)


def _save_folder(job: Job, gathered: Any, folder: Path) -> None:
    on_host = get_optimizer_state_dict(job.model, job.optimizer, options=GATHERED_TO_HOST)
    dcp.save({"optim": on_host}, checkpoint_id=folder)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("use", "kinds", "text"),
    [
        (_save_to_file, TypeError, "call full_state_dict() on every rank"),
        (_compute, RuntimeError, "call full_state_dict() on every rank"),
        (_step_with_torch, RuntimeError, "call full_state_dict() on every rank"),
        (_save_folder, CheckpointException, "Failed to validate global plan"),
    ],
)
def test_what_was_not_gathered_is_of_no_use(
    ranks: RankPool, tmp_path: Path, use: Any, kinds: Any, text: str
) -> None:
    for message in ranks.run(MAX_RANKS, _use, use, kinds, tmp_path):
        assert text in message


def _use(rank: Rank, use: Callable[..., None], kinds: Any, folder: Path) -> str:
    job = Ours(rank, "AdamW")
    job.train()
    before = job.whole()
    gathered = get_optimizer_state_dict(job.model, job.optimizer, options=GATHERED)
    with pytest.raises(kinds) as caught:
        use(job, gathered, folder)
    dist.barrier(rank.group)
    assert_same(job.whole(), before, "the optimizer")
    return str(caught.value)


WHOLE: dict[str, dict[str, Any]] = {
    "on all ranks": {"full_state_dict": True},
    "broadcast": {"full_state_dict": True, "broadcast_from_rank0": True},
    "broadcast to the host": {
        "full_state_dict": True,
        "broadcast_from_rank0": True,
        "cpu_offload": True,
    },
}


@pytest.mark.parametrize(
    ("name", "steps"), [("on all ranks", 2), ("broadcast", 0), ("broadcast to the host", 2)]
)
def test_a_whole_dict_is_loaded_by_name(ranks: RankPool, name: str, steps: int) -> None:
    """By an optimizer that has taken steps, or none."""
    for (loaded, step_later), (saved, later) in ranks.run(MAX_RANKS, _load_whole, name, steps):
        assert_same(loaded, saved, name)
        assert_same(step_later, later, f"{name}, a step later")


def _load_whole(rank: Rank, name: str, steps: int) -> Any:
    job, again = Ours(rank, "AdamW"), Ours(rank, "AdamW", seed=5)
    job.train()
    for number in range(steps):
        again.step(number + 7)
    saved, given = job.whole(), by_name(job.full_state(), job.names)
    for state in given["state"].values():  # torch broadcasts memory, whatever its strides
        state.update({part: value.contiguous() for part, value in state.items()})
    again.take(job.values())
    has_it = name == "on all ranks" or rank.rank == 0
    options = StateDictOptions(**WHOLE[name])
    set_optimizer_state_dict(again.model, again.optimizer, given if has_it else {}, options=options)
    loaded = again.whole()
    job.step(STEPS)
    again.step(STEPS)
    return (loaded, again.whole()), (saved, job.whole())


def test_ranks_that_bring_shards_and_wholes_do_not_mix_them(ranks: RankPool) -> None:
    for text in ranks.run(2, _mix):
        assert text == "state_dict: the ranks bring different ones"


def _mix(rank: Rank) -> str:
    job = Ours(rank, "AdamW")
    job.train()
    whole = by_name(job.full_state(), job.names)
    with pytest.raises(ValueError) as caught:
        job.optimizer.load_state_dict(whole if rank.rank == 0 else job.shown()["optim"])
    return str(caught.value)


def test_a_folder_with_a_gap_is_not_loaded(ranks: RankPool, tmp_path: Path) -> None:
    """As newer versions of torch write where one rank saves its shards alone; they load it, too."""
    wanted = "exp_avg: 1248 of this rank's elements were not loaded: the checkpoint lacks them"
    for text in ranks.run(MAX_RANKS, _use, _load_with_a_gap, ValueError, tmp_path):
        assert wanted in text


def _load_with_a_gap(job: Job, gathered: Any, folder: Path) -> None:
    state = job.optimizer.state_dict()
    part = {"part": state["state"][job.names.index("wide")]}
    dcp.save(part, checkpoint_id=folder)  # type: ignore[attr-defined]
    if job.rank.rank == 0:
        index = pickle.loads((folder / ".metadata").read_bytes())
        del index.state_dict_metadata["part.exp_avg"].chunks[0:2]  # a rectangle, and a row's start
        (folder / ".metadata").write_bytes(pickle.dumps(index))
    dist.barrier(job.rank.group)
    dcp.load(part, checkpoint_id=folder)  # type: ignore[attr-defined]
    job.optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    "dtype", [BF16, torch.float32, torch.float64, torch.complex64, torch.complex128]
)
def test_numbers_that_do_not_come_are_counted(dtype: torch.dtype) -> None:
    """NaN that come count as such."""
    memory = torch.ones(10, dtype=dtype)
    awaited = Stretch(3, 10, lambda: memory).awaited()
    assert awaited.missing() == 10
    awaited.read()[:4] = float("nan")
    assert awaited.missing() == awaited.copied("cpu").missing() == 6
    awaited.read().copy_(memory)
    assert awaited.missing() == 0
    assert memory.eq(1).all()


# -- parameters that never had a gradient ----------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_ckp_06_what_never_had_a_gradient_is_in_no_folder(
    ranks: RankPool, tmp_path: Path, size: int
) -> None:
    """The others are loaded, and it begins with its first gradient."""
    donor = (Ours, "AdamW", tmp_path, NOTHING, ["seven", "conv"])
    first, *_ = ranks.run(3, donate, *donor)
    saved, later = first
    assert saved.state.keys() == later.state.keys() - {"seven", "conv"}
    assert later.state["seven"]["step"] == 1
    for loaded, step_later in ranks.run(size, _load_without, tmp_path):
        assert_same(loaded, saved, "without")
        assert_same(step_later, later, "its first gradient")
    for result in ranks.run(size, take, Ours, "AdamW", tmp_path, ["file.pt"]):
        assert_same(result["file.pt"][0], saved, "file")


def _load_without(rank: Rank, folder: Path) -> Any:
    job = Ours(rank, "AdamW", seed=5)
    content = job.shown()
    for name in ("seven", "conv"):
        del content["optim"]["state"][name]
    dcp.load(  # type: ignore[attr-defined]
        content, checkpoint_id=folder / "folder", process_group=rank.group
    )
    job.load(content)
    loaded = job.whole()
    job.step(STEPS)
    return loaded, job.whole()


# -- what is in a folder ---------------------------------------------------------------------------


def test_each_element_in_a_folder_is_owned_once(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(3, donate, Ours, "AdamW", tmp_path, {"dtype": BF16})
    for folder in ("folder", "flat"):
        report = audit(tmp_path / folder)
        assert (report.ok, report.kind) == (True, "sharded"), report.headline
        # Flattened ones are tensors of their own to the audit.
        sharded = [part for p in report.parameters for part in p.parts if len(part.shares) > 1]
        numels = [sum(math.prod(share.size) for share in part.shares) for part in sharded]
        assert numels.count(17 * 257) == 4  # moments and masters of `wide`


@pytest.mark.parametrize(("dtype", "bytes_each"), [(torch.float32, 8), (BF16, 12)])
def test_ckp_09_a_folder_is_no_larger_than_its_contents(
    ranks: RankPool, tmp_path: Path, dtype: torch.dtype, bytes_each: int
) -> None:
    """Two moments, and masters where there are any; of each rank its shard alone."""
    ranks.run(3, _save_large, tmp_path, dtype)
    sizes = [path.stat().st_size for path in tmp_path.glob("*.distcp")]
    content = 400 * 700 * bytes_each
    assert content <= sum(sizes) < 1.1 * content
    assert len(sizes) == 3 and max(sizes) < 1.1 * content / 3


def _save_large(rank: Rank, folder: Path, dtype: torch.dtype) -> None:
    param = torch.nn.Parameter(torch.ones(400, 700, dtype=dtype))
    optimizer = fusedshard.AdamW([param], process_group=rank.group)
    param.grad = torch.ones_like(param)
    optimizer.step()
    dcp.save(  # type: ignore[attr-defined]
        optimizer.state_dict(), checkpoint_id=folder, process_group=rank.group
    )
