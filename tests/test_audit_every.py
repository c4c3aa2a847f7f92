"""Audits every k steps: what each finds, when, and that they change nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import audited
import pytest
import torch
from audited import param_of
from ranks import Rank, RankPool
from torch.nn.parallel import DistributedDataParallel

import fusedshard

WEIGHT = "2.weight"


def diverged(call: Callable[[], Any]) -> fusedshard.DivergenceError:
    with pytest.raises(fusedshard.DivergenceError) as caught:
        call()
    return caught.value


def _forgets_to_average(rank: Rank, mode: str, every: int) -> tuple[Any, ...]:
    model, optimizer = audited.ours(rank, mode=mode, grad_sync="external", audit_every=every)
    audited.train(rank, model, optimizer, steps=every - 1)
    before = [p.detach().clone() for p in model.parameters()]
    error = diverged(lambda: audited.train(rank, model, optimizer, steps=1))
    unchanged = all(map(torch.equal, before, model.parameters()))
    return error.step, error.part, error.parameter, error.ranks, str(error), unchanged


@pytest.mark.parametrize(("mode", "every"), [("sharded", 1), ("replicated", 1), ("replicated", 4)])
def test_gradients_that_nobody_averaged(ranks: RankPool, mode: str, every: int) -> None:
    """The classic mistake, at the first audit, before it does any harm in that step."""
    answers = ranks.run(3, _forgets_to_average, mode, every)
    assert answers == [answers[0]] * 3
    step, part, parameter, differing, text, unchanged = answers[0]
    assert (step, part, parameter) == (every, "grad", "0.weight")
    assert len(differing) == 2 and unchanged
    assert "DistributedDataParallel" in text and f"step {every}" in text


def _goes_on(rank: Rank) -> tuple[Any, ...]:
    """A step that was stopped was not taken: the one in its place is audited, too."""
    model, optimizer = audited.ours(rank, mode="replicated", grad_sync="external", audit_every=3)
    audited.train(rank, model, optimizer, steps=2)
    errors = [diverged(lambda: audited.train(rank, model, optimizer, steps=1)) for _ in range(2)]
    averaged = audited.small_model()
    data = Rank(0, rank.world_size, rank.group)  # the same on every rank
    audited.train(data, averaged, torch.optim.SGD(averaged.parameters(), lr=0.0), steps=1)
    for param, other in zip(model.parameters(), averaged.parameters(), strict=True):
        param.grad = other.grad
        param.data.copy_(other)
        optimizer.state[param]["exp_avg"].zero_()
        optimizer.state[param]["exp_avg_sq"].zero_()
    optimizer.step()
    return tuple(error.step for error in errors)


def test_the_step_in_place_of_one_that_was_stopped(ranks: RankPool) -> None:
    assert ranks.run(2, _goes_on) == [(3, 3)] * 2


def _averages_after_the_step(rank: Rank) -> tuple[int, str]:
    model, optimizer = audited.ours(rank, mode="replicated", grad_sync="external", audit_every=2)

    def average(*_: Any) -> None:
        for param in model.parameters():
            torch.distributed.all_reduce(param.grad, group=rank.group)

    optimizer.register_step_post_hook(average)
    error = diverged(lambda: audited.train(rank, model, optimizer))
    return error.step, error.part


def test_gradients_averaged_after_the_step(ranks: RankPool) -> None:
    assert ranks.run(2, _averages_after_the_step) == [(2, "grad")] * 2


def _under_ddp(rank: Rank, every: int) -> list[torch.Tensor]:
    model = DistributedDataParallel(audited.small_model(), process_group=rank.group)
    optimizer = fusedshard.Adam(
        model.parameters(), process_group=rank.group, grad_sync="external", audit_every=every
    )
    audited.train(rank, model, optimizer, steps=4)
    assert optimizer.stats.calls["fingerprints"] == (0 if every == 0 else 2 * (4 // every))
    return [p.detach() for p in model.parameters()]


def test_sound_training_goes_on_with_the_same_bits(ranks: RankPool) -> None:
    plain, watched = (ranks.run(2, _under_ddp, every) for every in (0, 2))
    for ours, theirs in zip(watched, plain, strict=True):
        assert all(map(torch.equal, ours, theirs))


def _spoiled(rank: Rank, what: str, dtype: torch.dtype, options: dict[str, Any]) -> tuple[Any, ...]:
    model, optimizer = audited.ours(rank, dtype, mode="replicated", audit_every=2, **options)
    audited.train(rank, model, optimizer, steps=2)
    param = param_of(model, WEIGHT)
    if rank.rank == 1 and what == "step":
        optimizer._engine.steps[2] += 1  # of WEIGHT
    elif rank.rank == 1 and what == "master_weights":
        flat = optimizer._engine.flats[0]
        flat.masters.values[flat.pieces[2][0].owned_start + 40] ^= 1 << 12
    elif rank.rank == 1:
        tensor = param.data if what == "param" else optimizer.state[param][what]
        tensor.view(-1)[40] = 7.0  # not healed by the updates that follow
    audited.train(rank, model, optimizer, steps=1)
    error = diverged(lambda: audited.train(rank, model, optimizer, steps=1))
    worded = "on rank 1 differs from that on most" in str(error)
    return error.step, error.part, error.parameter, error.ranks, worded


@pytest.mark.parametrize(
    ("what", "dtype", "options"),
    [
        ("param", torch.float32, {}),
        ("exp_avg", torch.float32, {}),
        ("exp_avg_sq", torch.bfloat16, {"state_dtype": torch.bfloat16}),
        ("max_exp_avg_sq", torch.float32, {"amsgrad": True}),
        ("master_weights", torch.bfloat16, {}),
        ("step", torch.float32, {}),
    ],
)
def test_each_part_of_replicated_state(
    ranks: RankPool, what: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """One element on one rank; what it does to the parameter may be found first."""
    answers = ranks.run(3, _spoiled, what, dtype, options)
    assert answers == [answers[0]] * 3
    step, part, parameter, differing, worded = answers[0]
    assert (step, differing, worded) == (4, [1], True)
    assert part in (what, "param")
    assert parameter == WEIGHT


def _frozen(rank: Rank) -> tuple[Any, ...]:
    model = audited.small_model()
    param_of(model, "0.weight").requires_grad_(False)
    optimizer = fusedshard.Adam(
        model.named_parameters(), process_group=rank.group, audit_every=1, lr=0.01
    )
    audited.train(rank, model, optimizer, steps=2)
    if rank.rank == 0:
        param_of(model, "0.weight").data.view(torch.int32)[0, 0, 0, 0] ^= 1
    error = diverged(lambda: audited.train(rank, model, optimizer, steps=1))
    return error.step, error.part, error.parameter, error.ranks, "rank 0 and rank 1" in str(error)


def test_frozen_parameters_and_no_majority(ranks: RankPool) -> None:
    """In sharded mode, where an edit of what trains is overwritten by its owner's."""
    assert ranks.run(2, _frozen) == [(3, "param", "0.weight", [1], True)] * 2


def _grows(rank: Rank) -> tuple[Any, ...]:
    """A parameter and amsgrad's moment that come later are watched, too; and so are copies."""
    model, optimizer = audited.ours(rank, mode="replicated", audit_every=1)
    audited.train(rank, model, optimizer, steps=1)
    added = torch.nn.Parameter(torch.ones(5))
    optimizer.add_param_group({"params": [("added", added)], "amsgrad": True})
    for group in optimizer.param_groups:
        group["amsgrad"] = True
    audited.train(rank, model, optimizer, steps=2)
    twin_model, twin = copy.deepcopy((model, optimizer))
    found = []
    for module, stepper in ((model, optimizer), (twin_model, twin)):
        if rank.rank == 1:
            moment = stepper.state[param_of(module, WEIGHT)]["max_exp_avg_sq"]
            moment[0, 0] = 1e9
        error = diverged(partial(audited.train, rank, module, stepper, steps=1))
        found.append((error.step, error.ranks))
    return tuple(found)


def test_later_memory_and_copies(ranks: RankPool) -> None:
    assert ranks.run(3, _grows) == [((4, [1]), (4, [1]))] * 3


def _traffic(rank: Rank, mode: str) -> tuple[int, int]:
    model, optimizer = audited.ours(rank, mode=mode, audit_every=2)
    audited.train(rank, model, optimizer, steps=3)
    return optimizer.stats.calls["fingerprints"], optimizer.stats.sent_bytes["fingerprints"]


def test_eight_bytes_a_tensor(ranks: RankPool) -> None:
    parameters = len(list(audited.small_model().parameters()))
    for mode, tensors in (("sharded", parameters + 1), ("replicated", 3 * parameters + 1)):
        assert ranks.run(3, _traffic, mode) == [(1, 2 * 8 * tensors)] * 3


@pytest.mark.parametrize("value", [-1, 1.5, True, None, "3"])
def test_bad_values(value: Any) -> None:
    with pytest.raises(ValueError, match=r"audit_every: got .*, wanted an integer, at least 0"):
        fusedshard.AdamW([torch.nn.Parameter(torch.ones(3))], audit_every=value)


def _captured(rank: Rank) -> tuple[str, bool]:
    model, optimizer = audited.ours(rank, audit_every=2)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusedshard.auditing.watch.capturing", lambda device: True)
        audited.train(rank, model, optimizer, steps=1)  # not due
        now = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(RuntimeError) as caught:
            audited.train(rank, model, optimizer, steps=1)
    unchanged = all(map(torch.equal, now, model.parameters()))
    return str(caught.value), unchanged and not torch.equal(before[0], now[0])


def test_a_captured_step_is_not_left_unaudited(ranks: RankPool) -> None:
    """Pretended here: a replay runs no Python."""
    for text, unchanged in ranks.run(2, _captured):
        assert "audit_every: this step is captured in a CUDA graph" in text and unchanged


def _unlike(rank: Rank) -> str:
    with pytest.raises(ValueError) as caught:
        audited.ours(rank, audit_every=rank.rank)
    return str(caught.value)


def test_ranks_must_audit_together(ranks: RankPool) -> None:
    for text in ranks.run(2, _unlike):
        assert "audit_every=0" in text and "audit_every=1" in text


def test_nothing_to_compare_on_one_rank() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = fusedshard.AdamW([param], audit_every=1)
    param.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.stats.calls["fingerprints"] == 0


def test_the_error_can_be_pickled() -> None:
    error = fusedshard.DivergenceError("why", 3, "w", "exp_avg", [1])
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == "why"
    assert (again.step, again.parameter, again.part, again.ranks) == (3, "w", "exp_avg", [1])
