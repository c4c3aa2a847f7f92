"""What the demo trains, and how its ranks compare tensors."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fusedshard.demo.model import GPT, Batches, load_corpus
from fusedshard.demo.train import difference, probe_steps


def test_corpus_is_the_sources_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_bytes(b"second")
    (tmp_path / "a.py").write_bytes(b"first")
    (tmp_path / "c.txt").write_bytes(b"not a source")
    assert load_corpus(tmp_path) == b"firstsecond"
    assert load_corpus(tmp_path, limit=7) == b"firstse"


def test_batches_come_from_a_slice_for_each_rank() -> None:
    text = bytes(range(250)) * 6
    seen = []
    for rank in range(2):
        batches = Batches(text[:1000], rank, 2, seed=0, batch=8, context=100)
        inputs, targets = batches.next()
        assert inputs.shape == targets.shape == (8, 100)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        seen.append(inputs)
        again = Batches(text[:1000], rank, 2, seed=0, batch=8, context=100)
        assert torch.equal(again.next()[0], inputs)
        other = Batches(text[:1000], rank, 2, seed=1, batch=8, context=100)
        assert not torch.equal(other.next()[0], inputs)
    assert not torch.equal(*seen)


def test_a_slice_is_the_ranks_own() -> None:
    text = b"a" * 500 + b"b" * 500
    for rank, byte in enumerate(text[::999]):
        inputs, targets = Batches(text, rank, 2, seed=0, batch=8, context=100).next()
        assert (inputs == byte).all()
        assert (targets == byte).all()


def test_a_short_text_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 1: got 50 bytes, wanted at least 101"):
        Batches(b"x" * 100, 1, 2, seed=0, batch=1, context=100)


def test_model_sees_no_byte_after_its_own() -> None:
    torch.manual_seed(0)
    model = GPT(width=32, depth=2, heads=2, context=16)
    inputs = torch.randint(256, (2, 16))
    targets = torch.randint(256, (2, 16))
    targets[:, 8:] = -100  # F.cross_entropy leaves these out
    loss = model(inputs, targets)
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)
    inputs[:, 8:] += 1
    assert torch.equal(model(inputs % 256, targets), loss)
    inputs[:, 7] += 1
    assert not torch.equal(model(inputs % 256, targets), loss)


@pytest.mark.parametrize(
    ("values", "reference", "identical", "max_abs"),
    [
        ([1.0, 2.0], [1.0, 2.0], True, 0.0),
        ([0.0], [-0.0], False, 0.0),
        ([1.0, 2.5], [1.0, 2.0], False, 0.5),
        ([1.0000001], [1.0], False, 2**-23),
    ],
)
def test_difference_compares_bits(
    values: list[float], reference: list[float], identical: bool, max_abs: float
) -> None:
    found = difference(torch.tensor(values), torch.tensor(reference))
    assert (found.identical, found.max_abs) == (identical, max_abs)


def test_difference_of_nan_is_nan() -> None:
    assert math.isnan(difference(torch.tensor([math.nan, 1.0]), torch.ones(2)).max_abs)


@pytest.mark.parametrize("steps", [2, 5, 6, 100, 1001])
def test_first_and_last_steps_are_compared(steps: int) -> None:
    probes = probe_steps(steps)
    assert probes == sorted(set(probes))
    assert probes[: min(5, steps)] == list(range(1, min(5, steps) + 1))
    assert probes[-1] == steps
    assert len(probes) <= 60
