"""What goes wrong on one rank: all hear of it in time, keep what they had, and may go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ranks import Rank, RankPool
from training import PATIENCE, Job, assert_close, assert_same_bits, backward, impatient, make_params

import fusedshard

MODES = ("sharded", "replicated")
each_mode = pytest.mark.parametrize("mode", MODES)


Call = Callable[[], Any]
Fault = Callable[[Job, bool], Iterator[Call]]


def sparse_gradient(job: Job, here: bool) -> Iterator[Call]:
    if here:
        job.params[0].grad = torch.ones(job.params[0].shape).to_sparse()
    yield job.optimizer.step


def wrong_shape(job: Job, here: bool) -> Iterator[Call]:
    if here and job.params[1].grad is not None:
        job.params[1].grad.resize_(2)
    yield job.optimizer.step


def cast_parameter(job: Job, here: bool) -> Iterator[Call]:
    home = job.params[1].data
    if here:
        job.params[1].data = home.double()
        job.params[1].grad = None
    yield job.optimizer.synchronize
    job.params[1].data = home


def closure(job: Job, here: bool) -> Iterator[Call]:
    def fail() -> None:
        if here:
            raise KeyError("mine")

    yield lambda: job.optimizer.step(fail)


def wrong_norm(job: Job, here: bool) -> Iterator[Call]:
    yield lambda: job.optimizer.clip_grad_norm_(1.0, norm_type=-1.0 if here else 2.0)


def infinite_norm(job: Job, here: bool) -> Iterator[Call]:
    backward(job.params[1:], [torch.full((5,), torch.inf if here else 0.0)])
    yield lambda: job.optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


def wrong_state(job: Job, here: bool) -> Iterator[Call]:
    state = job.optimizer.full_state_dict()
    if here:
        state["state"][1]["exp_avg"] = torch.zeros(6)
    yield lambda: job.optimizer.load_state_dict(state)


def known_parameter(job: Job, here: bool) -> Iterator[Call]:
    added = job.params[1] if here else make_params([(5,)])[0]
    yield lambda: job.optimizer.add_param_group({"params": [added]})


def no_betas(job: Job, here: bool) -> Iterator[Call]:
    group = job.optimizer.param_groups[0]
    betas = group["betas"]
    if here:
        group["betas"] = None
    yield job.optimizer.step
    group["betas"] = betas


FAULTS: list[tuple[Fault, str]] = [
    (sparse_gradient, "sparse"),
    (wrong_shape, "parameter 1: got a gradient of shape (2,)"),
    (cast_parameter, "parameter 1: cast or reshaped"),
    (closure, "mine"),
    (wrong_norm, "norm_type: got -1.0"),
    (infinite_norm, "norm of order 2.0 for gradients is inf"),
    (wrong_state, "parameter 1: exp_avg has shape (6,)"),
    (known_parameter, "more than one parameter group"),
    (no_betas, "NoneType"),
]


@each_mode
@pytest.mark.parametrize(("fault", "named"), FAULTS, ids=lambda x: getattr(x, "__name__", ""))
def test_training_goes_on_once_a_fault_is_mended(
    ranks: RankPool, mode: str, fault: Fault, named: str
) -> None:
    results = ranks.run(3, _mend, mode, fault)
    reference = Job.reference(3, 4)
    for text, before, after, end in results:
        assert named in text
        assert_same_bits(before, after)
        assert_close(end, reference)
        assert_same_bits(end, results[0][3])


def _mend(rank: Rank, mode: str, fault: Fault) -> Any:
    job = Job(rank, mode)
    job.steps(range(2))
    before = job.local()
    job.gradients(7)
    with contextmanager(fault)(job, rank.rank == 1) as call, pytest.raises(Exception) as caught:
        call()
    after = job.local()
    job.optimizer.zero_grad()
    job.steps(range(2, 4))
    return str(caught.value), before, after, job.whole()


HYPER: dict[str, Any] = {
    "lr": 0.2,
    "betas": (0.9, 0.98),
    "eps": 1e-3,
    "weight_decay": 0.5,
    "amsgrad": True,
    "maximize": True,
    "decoupled_weight_decay": False,
}


@each_mode
def test_each_hyperparameter_that_differs_is_named(ranks: RankPool, mode: str) -> None:
    for texts, before, after, end in ranks.run(2, _unlike, mode):
        for text, name in zip(texts, HYPER, strict=True):
            word = {"betas": "beta2", "decoupled_weight_decay": "decoupled"}.get(name, name)
            assert text.startswith(f"param_groups[0]: {word} is ")
            assert "on rank 1 and" in text
        assert_same_bits(before, after)
        assert_close(end, Job.reference(2, 4))


def _unlike(rank: Rank, mode: str) -> Any:
    job = Job(rank, mode)
    job.steps(range(2))
    before, texts = job.local(), []
    (group,) = job.optimizer.param_groups
    for name, value in HYPER.items():
        kept = group[name]
        if rank.rank == 1:
            group[name] = value
        job.gradients(7)
        with pytest.raises(RuntimeError) as caught:
            job.optimizer.step()
        texts.append(str(caught.value))
        group[name] = kept
    after = job.local()
    job.steps(range(2, 4))
    return texts, before, after, job.whole()


@each_mode
def test_a_rank_that_does_not_come(ranks: RankPool, mode: str) -> None:
    """As one that has left its loop by an error of its own: the next call of the others ends in
    time, and all after it at once."""
    for seconds, before, after in ranks.run(3, _absent, mode)[:2]:
        assert seconds[0] < PATIENCE + 10
        assert all(later < PATIENCE / 2 for later in seconds[1:])
        assert_same_bits(before, after)


def _absent(rank: Rank, mode: str) -> Any:
    job = Job(rank, mode, impatient(3))
    job.steps(range(2))
    state = job.optimizer.full_state_dict()
    if rank.rank == 2:
        return None  # its connections live on
    job.gradients(2)
    before, seconds = job.local(), []
    for call in (
        job.optimizer.step,
        lambda: job.optimizer.clip_grad_norm_(1.0),
        job.optimizer.synchronize,
        lambda: job.optimizer.load_state_dict(state),
        lambda: job.optimizer.add_param_group({"params": make_params([(3,)])}),
    ):
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            call()
        seconds.append(time.monotonic() - start)
    return seconds, before, job.local()


Calls = tuple[Callable[[Job], Any], Callable[[Job], Any]]


def step(job: Job) -> None:
    job.optimizer.step()


def synchronize(job: Job) -> None:
    job.optimizer.synchronize()


def clip(job: Job) -> None:
    job.optimizer.clip_grad_norm_(1.0)


def clip_more(job: Job) -> None:
    job.optimizer.clip_grad_norm_(0.5)


def clip_another_norm(job: Job) -> None:
    job.optimizer.clip_grad_norm_(1.0, norm_type=1.0)


def clip_some(job: Job) -> None:
    job.optimizer.clip_grad_norm_(1.0, parameters=job.params[:1])


def unscale(job: Job) -> None:
    scaler = fusedshard.GradScaler("cpu", init_scale=8.0 * (1 + job.rank.rank))
    scaler.scale(torch.ones(()))
    scaler.unscale_(job.optimizer)


def load(job: Job) -> None:
    job.optimizer.load_state_dict({})


def test_a_rank_that_loads_where_the_other_steps(ranks: RankPool) -> None:
    for failed, before, after in ranks.run(2, _apart, "sharded", (step, load)):
        assert failed
        assert_same_bits(before, after)


@each_mode
@pytest.mark.parametrize(
    "calls",
    [
        (clip, clip_more),
        (clip, clip_another_norm),
        (clip, clip_some),
        (unscale, unscale),
        (step, synchronize),
        (clip, synchronize),
    ],
    ids=lambda calls: " against ".join(call.__name__ for call in calls),
)
def test_ranks_that_call_different_things(ranks: RankPool, mode: str, calls: Calls) -> None:
    """Else each shard or replica would get a step of its own."""
    for failed, before, after in ranks.run(2, _apart, mode, calls):
        assert failed
        assert_same_bits(before, after)


def _apart(rank: Rank, mode: str, calls: Calls) -> Any:
    job = Job(rank, mode, impatient(2))
    job.steps(range(2))
    before = job.local()
    job.gradients(2)
    try:
        calls[rank.rank](job)
    except (RuntimeError, ValueError):
        return True, before, job.local()
    return False, before, job.local()
