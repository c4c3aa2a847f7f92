"""Checkpoints that are damaged, do not fit, or are not to be had: every rank hears of it, and the
optimizer's state is what it was, to the bit."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Rank, RankPool, RanksFailed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from training import MODES, assert_same_bits, gradient

import fusedshard
from fusedshard.sharded_state import ShardedState

SAVED_ON, LOADED_ON = 3, 2
REMEDY = "call full_state_dict() on every rank"


class Trained:
    """A model whose optimizer has state, saved and loaded by its parameters' names."""

    def __init__(self, rank: Rank, steps: int, width: int = 41, **options: Any) -> None:
        torch.manual_seed(0)
        self.rank = rank
        layers = (torch.nn.Linear(37, width), torch.nn.Linear(width, 5))
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = fusedshard.AdamW(
            self.model.parameters(), lr=0.1, process_group=rank.group, **options
        )
        for step in range(steps):
            self.step(step)

    def step(self, step: int) -> None:
        for index, param in enumerate(self.model.parameters()):
            param.grad = gradient(param, step, index, self.rank.rank)
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"optim": get_optimizer_state_dict(self.model, self.optimizer)}

    def save(self, folder: Path, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about itself
            writer = FileSystemWriter(folder, **options)
            save(self.state_dict(), storage_writer=writer, process_group=self.rank.group)

    def load(self, folder: Path, *, into_copies: bool = False) -> None:
        state_dict = self.state_dict()
        if into_copies:
            state_dict = copy.deepcopy(state_dict)
        load(state_dict, checkpoint_id=folder, process_group=self.rank.group)
        set_optimizer_state_dict(self.model, self.optimizer, state_dict["optim"])

    def whole(self) -> Any:
        params = [p.detach().clone() for p in self.model.parameters()]
        return params, self.optimizer.full_state_dict()


def _save(rank: Rank, folder: Path) -> Any:
    trained = Trained(rank, steps=3)
    trained.save(folder)
    return trained.whole()[1]


@pytest.fixture(scope="module")
def sound(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of three ranks, and what it holds."""
    folder = tmp_path_factory.mktemp("sound") / "checkpoint"
    return folder, ranks.run(SAVED_ON, _save, folder)[0]


def _shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 5])


DATA = "__1_0.distcp"  # of the second rank
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file is shortened": (lambda folder: _shorten(folder / DATA), "failed reading zip archive"),
    "a file is empty": (lambda folder: (folder / DATA).write_bytes(b""), "EOFError"),
    "a rank's file is missing": (lambda folder: (folder / DATA).unlink(), DATA),
    "metadata is shortened": (lambda folder: _shorten(folder / ".metadata"), "truncated"),
    "no metadata": (lambda folder: (folder / ".metadata").unlink(), ".metadata"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint(
    ranks: RankPool, sound: tuple[Path, Any], tmp_path: Path, damage: str, mode: str
) -> None:
    """Of replicated state, which is the optimizer's own memory, a copy is loaded into."""
    spoil, named = DAMAGES[damage]
    folder = shutil.copytree(sound[0], tmp_path / "checkpoint")
    spoil(folder)
    check_refused(ranks, folder, sound, named, mode)


def check_refused(
    ranks: RankPool,
    folder: Path,
    sound: tuple[Path, Any],
    named: str,
    mode: str = "sharded",
    **other: Any,
) -> None:
    """Every rank raises the same and goes on as if nothing had been, with a step, and with a
    checkpoint that is sound."""
    for text, before, after, went_on, twin, loaded in ranks.run(
        LOADED_ON, _try, folder, sound[0], other, mode
    ):
        assert named in text
        assert_same_bits(before, after)
        assert_same_bits(went_on, twin)
        if not other:
            assert_same_bits(loaded, sound[1])


def _try(rank: Rank, folder: Path, sound: Path, other: dict[str, Any], mode: str) -> Any:
    trained, twin = (Trained(rank, steps=2, mode=mode, **other) for _ in range(2))
    before = trained.whole()
    with pytest.raises(CheckpointException) as caught:
        trained.load(folder, into_copies=mode == "replicated")
    after = trained.whole()
    for job in (trained, twin):
        job.step(2)
    went_on = trained.whole()
    if not other:
        trained.load(sound)
    text = str(caught.value)
    return text, before, after, went_on, twin.whole(), trained.whole()[1]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"width": 40}, "for optim.state.0.weight.exp_avg"),
        ({"amsgrad": True}, "Missing key in checkpoint state_dict: optim.state.0.weight.max_exp"),
    ],
    ids=["shapes", "amsgrad"],
)
def test_a_checkpoint_of_something_else(
    ranks: RankPool, sound: tuple[Path, Any], other: dict[str, Any], named: str
) -> None:
    check_refused(ranks, sound[0], sound, named, **other)


def _drop_moment(state: dict[str, Any]) -> None:
    del state["0.bias"]["exp_avg_sq"]


def _reshape(state: dict[str, Any]) -> None:
    own = state["0.weight"]["exp_avg"]
    shape, strides = (own.size(1), own.size(0)), (own.size(0), 1)
    state["0.weight"]["exp_avg"] = ShardedState(
        shape, strides, own.dtype, own.device, own.stretches
    )


def _endless_step(state: dict[str, Any]) -> None:
    state["1.bias"]["step"].fill_(float("inf"))


@pytest.mark.parametrize("damage", [name for name in DAMAGES if "metadata" not in name])
def test_what_was_loaded_in_part_is_refused_by_name(
    ranks: RankPool, sound: tuple[Path, Any], tmp_path: Path, damage: str
) -> None:
    """By a job that goes on with it."""
    folder = shutil.copytree(sound[0], tmp_path / "checkpoint")
    DAMAGES[damage][0](folder)
    for text, before, after in ranks.run(LOADED_ON, _load_in_part, folder):
        assert re.search(r"parameter \d: exp_avg\w*: \d+ of this rank's elements were not", text)
        assert_same_bits(before, after)


def _load_in_part(rank: Rank, folder: Path) -> Any:
    trained = Trained(rank, steps=2)
    before, state_dict = trained.whole(), trained.state_dict()
    with contextlib.suppress(CheckpointException):
        load(state_dict, checkpoint_id=folder, process_group=rank.group)
    with pytest.raises(ValueError) as caught:
        set_optimizer_state_dict(trained.model, trained.optimizer, state_dict["optim"])
    return str(caught.value), before, trained.whole()


@pytest.mark.parametrize("on_all", [True, False], ids=["all", "one"])
@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_drop_moment, "parameter 1: exp_avg_sq is missing in the state dict"),
        (_reshape, "parameter 0: exp_avg has shape (37, 41) in the state dict, wanted (41, 37)"),
        (_endless_step, "parameter 3: step is inf in the state dict"),
    ],
    ids=["missing moment", "shape", "step"],
)
def test_ckp_07_shards_that_were_spoilt_after_loading(
    ranks: RankPool, sound: tuple[Path, Any], spoil: Any, named: str, on_all: bool
) -> None:
    for text, before, after in ranks.run(LOADED_ON, _spoil, sound[0], spoil, on_all):
        assert named in text
        assert_same_bits(before, after)


def _spoil(rank: Rank, folder: Path, spoil: Any, on_all: bool) -> Any:
    trained = Trained(rank, steps=2)
    before = trained.whole()
    state_dict = trained.state_dict()
    load(state_dict, checkpoint_id=folder, process_group=rank.group)
    if on_all or rank.rank == 1:
        spoil(state_dict["optim"]["state"])
    with pytest.raises(ValueError) as caught:
        set_optimizer_state_dict(trained.model, trained.optimizer, state_dict["optim"])
    return str(caught.value), before, trained.whole()


def test_loading_alone_changes_nothing(ranks: RankPool, sound: tuple[Path, Any]) -> None:
    """Before `load_state_dict`, what is loaded lies beside what the optimizer holds."""
    for before, after in ranks.run(LOADED_ON, _load_alone, sound[0]):
        assert_same_bits(before, after)


def _load_alone(rank: Rank, folder: Path) -> Any:
    trained = Trained(rank, steps=2)
    before = trained.whole()
    load(trained.state_dict(), checkpoint_id=folder, process_group=rank.group)
    return before, trained.whole()


def test_ckp_08_saving_shards_to_a_file_raises_at_once(ranks: RankPool, tmp_path: Path) -> None:
    """Before a tensor is written, on the rank that does it. With `full_state_dict=True`, which only
    gathers torch's own kinds of tensors, too."""
    (alone, size), _ = ranks.run(LOADED_ON, _save_to_file, tmp_path, None)
    assert REMEDY in alone and "torch.distributed.checkpoint" in alone and size < 1000
    for text, size in ranks.run(LOADED_ON, _save_to_file, tmp_path, True):
        assert REMEDY in text and size < 1000


def _save_to_file(rank: Rank, folder: Path, full: bool | None) -> tuple[str, int]:
    trained, path = Trained(rank, steps=1), folder / f"{rank.rank}.pt"
    if full:
        options = StateDictOptions(full_state_dict=True)
        given = get_optimizer_state_dict(trained.model, trained.optimizer, options=options)
    elif rank.rank == 0:
        given = {"optimizer": trained.optimizer.state_dict()}
    else:
        return "", 0
    with pytest.raises(TypeError) as caught:
        torch.save(given, path)
    return str(caught.value), path.stat().st_size


def test_a_rank_killed_while_it_saves(tmp_path: Path) -> None:
    """The others do not wait for it; the checkpoint before, in its own folder, is what it was, and
    the new one is none."""
    pool, first, second = RankPool(tmp_path), tmp_path / "first", tmp_path / "second"
    try:
        saved = pool.run(SAVED_ON, _save, first)[0]
        with pytest.raises(RanksFailed) as caught:
            pool.run(SAVED_ON, _die_while_saving, second)
        assert str(caught.value) == "rank 1: the process died"
        assert any(second.iterdir())  # it had begun
        for text, loaded in pool.run(LOADED_ON, _load_one_of, second, first):
            assert ".metadata" in text
            assert_same_bits(loaded, saved)
    finally:
        pool.stop()


def _die_while_saving(rank: Rank, folder: Path) -> None:
    trained = Trained(rank, steps=5)
    if rank.rank == 1:
        read, calls = ShardedState.__get_tensor_shard__, []

        def die_at_the_third(self: ShardedState, index: Any) -> torch.Tensor:
            calls.append(index)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return read(self, index)

        ShardedState.__get_tensor_shard__ = die_at_the_third  # type: ignore[method-assign]
    with pytest.raises((RuntimeError, CheckpointException)):
        trained.save(folder)


def _load_one_of(rank: Rank, unfinished: Path, finished: Path) -> Any:
    trained = Trained(rank, steps=1)
    with pytest.raises(CheckpointException) as caught:
        trained.load(unfinished)
    trained.load(finished)
    return str(caught.value), trained.whole()[1]


def test_a_folder_that_is_taken_is_refused_if_one_says_so(
    ranks: RankPool, sound: tuple[Path, Any], tmp_path: Path
) -> None:
    folder = shutil.copytree(sound[0], tmp_path / "checkpoint")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for text in ranks.run(SAVED_ON, _save_over, folder):
        assert "already exists" in text
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def _save_over(rank: Rank, folder: Path) -> str:
    trained = Trained(rank, steps=1)
    with pytest.raises(CheckpointException) as caught:
        trained.save(folder, overwrite=False)
    return str(caught.value)
