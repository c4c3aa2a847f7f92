"""The optimizers on CUDA parameters, one rank: the bits of a CPU, and what only a GPU has."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_tools import DEVICE, on_host, require_gpu
from training import AWKWARD, assert_close, assert_same_bits, gradient, make_params

import fusedshard

require_gpu()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True"),
]

# The last two are cut into buckets and lie in memory in another order than their gradients.
SHAPES = [*AWKWARD, (300_001,)]
CHANNELS_LAST = (8, 3, 5, 5)
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"kind": "AdamW", "weight_decay": 0.1},
    "Adam": {"kind": "Adam", "weight_decay": 0.1},
    "amsgrad": {"kind": "AdamW", "amsgrad": True},
    "maximize": {"kind": "Adam", "maximize": True},
    "fp64": {"kind": "AdamW", "dtype": torch.float64},
    "replicated": {"kind": "AdamW", "mode": "replicated"},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


class Job:
    """Training on a device, with gradients that depend on nothing but the step and parameter.

    Args:
        library: where the optimizer comes from.
    """

    def __init__(
        self,
        device: str,
        kind: str = "AdamW",
        dtype: torch.dtype = torch.float32,
        library: Any = fusedshard,
        **options: Any,
    ) -> None:
        made = [*make_params(SHAPES, dtype=dtype), *make_params([CHANNELS_LAST], 1, dtype)]
        made[-1].data = made[-1].data.to(memory_format=torch.channels_last)
        # Small ones, where 1e-6 is many roundings: torch decays weights by other operations.
        self.params = [torch.nn.Parameter(param.detach().mul(0.1).to(device)) for param in made]
        self.ours = library is fusedshard
        if self.ours:
            options = {"bucket_cap_mb": 0.5} | options
        self.optimizer = getattr(library, kind)(self.params, **{"lr": 1e-2} | options)

    def set_gradients(self, step: int, absent: Collection[int] = ()) -> None:
        """In the memory of the last ones, where there are some; for torch, whose fused optimizer
        insists on it, in the parameters' order of strides."""
        for index, param in enumerate(self.params):
            grad = gradient(param, step, index, 0).to(param.device)
            if not self.ours:
                grad = torch.empty_like(param).copy_(grad)
            if index in absent:
                param.grad = None
            elif param.grad is None:
                param.grad = grad
            else:
                param.grad.copy_(grad)

    def step(self, number: int, absent: Collection[int] = ()) -> None:
        self.set_gradients(number, absent)
        self.optimizer.step()

    def steps(self, numbers: range) -> None:
        for number in numbers:
            self.step(number)

    def result(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Parameters and state in host memory."""
        state = self.optimizer.full_state_dict() if self.ours else self.optimizer.state_dict()
        return on_host((list(self.params), state))


def pair(**options: Any) -> tuple[Job, Job]:
    return Job(DEVICE, **options), Job("cpu", **options)


@each_option
def test_twenty_steps_have_the_bits_of_a_cpu(options: dict[str, Any]) -> None:
    ours, theirs = pair(**options)
    for job in (ours, theirs):
        job.steps(range(20))
    assert_same_bits(ours.result(), theirs.result())


@each_option
def test_twenty_steps_against_torchs_fused_optimizer(options: dict[str, Any]) -> None:
    ours = Job(DEVICE, **options)
    shared = {name: value for name, value in options.items() if name != "mode"}
    theirs = Job(DEVICE, library=torch.optim, fused=True, **shared)
    for job in (ours, theirs):
        job.steps(range(20))
    assert_close(ours.result(), theirs.result())


@pytest.mark.parametrize("amsgrad", [False, True])
def test_parameters_without_a_gradient_are_left_alone(amsgrad: bool) -> None:
    ours, theirs = pair(amsgrad=amsgrad, weight_decay=0.1)
    absences = [(0, 2, 6), (), (1, 2), range(len(ours.params)), (7, 8)]
    for job in (ours, theirs):
        for number, absent in enumerate(absences):
            job.step(number, absent)
    assert_same_bits(ours.result(), theirs.result())


def test_a_group_that_is_added_later() -> None:
    ours, theirs = pair()
    for job in (ours, theirs):
        job.steps(range(3))
        device = job.params[0].device
        late = [torch.nn.Parameter(p.detach().to(device)) for p in make_params([(5,), (70, 3)], 9)]
        job.optimizer.add_param_group({"params": late, "lr": 0.1, "amsgrad": True})
        job.params += late
        job.steps(range(3, 6))
    assert_same_bits(ours.result(), theirs.result())


def test_state_goes_to_a_cpu_and_back() -> None:
    straight, first, third = (Job(DEVICE, amsgrad=True) for _ in range(3))
    second = Job("cpu", amsgrad=True)
    straight.steps(range(6))
    first.steps(range(2))
    for job, before, numbers in ((second, first, range(2, 4)), (third, second, range(4, 6))):
        for param, old in zip(job.params, before.params, strict=True):
            param.data.copy_(old.detach())
        job.optimizer.load_state_dict(before.optimizer.full_state_dict())
        job.steps(numbers)
    assert_same_bits(third.result(), straight.result())


def test_a_state_dict_of_torchs_that_was_loaded_onto_the_cpu(tmp_path: Path) -> None:
    theirs = Job(DEVICE, library=torch.optim, fused=True)
    theirs.steps(range(3))
    torch.save(theirs.optimizer.state_dict(), tmp_path / "state.pt")
    ours = Job(DEVICE)
    for param, old in zip(ours.params, theirs.params, strict=True):
        param.data.copy_(old.detach())
    loaded = torch.load(tmp_path / "state.pt", map_location="cpu", weights_only=True)
    ours.optimizer.load_state_dict(loaded)
    for job in (ours, theirs):
        job.steps(range(3, 6))
    assert_close(ours.result(), theirs.result())
    for param in ours.params:
        state = ours.optimizer.state[param]
        assert all(value.device == param.device for value in state.values())


def test_the_step_count_is_on_the_device() -> None:
    job = Job(DEVICE)
    job.steps(range(3))
    for param in job.params:
        step = job.optimizer.state[param]["step"]
        assert step.device == param.device and step.dtype == torch.float32
        assert step.dim() == 0 and step.item() == 3


@pytest.fixture
def no_synchronization() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("default")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("no_synchronization")
@pytest.mark.parametrize("lr_on_device", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_step_does_not_wait_for_the_device(amsgrad: bool, lr_on_device: bool) -> None:
    lr = torch.tensor(1e-2, device=DEVICE) if lr_on_device else 1e-2
    job = Job(DEVICE, amsgrad=amsgrad, lr=lr, capturable=lr_on_device)
    job.step(0)
    job.set_gradients(1, absent=[2])
    torch.cuda.set_sync_debug_mode("error")
    job.optimizer.step()


@pytest.mark.usefixtures("no_synchronization")
def test_clipping_and_scaling_do_not_wait_for_the_device() -> None:
    job = Job(DEVICE)
    scaler = fusedshard.GradScaler("cuda")
    for step in range(2):
        scale = scaler.scale(torch.ones((), device=DEVICE))
        job.set_gradients(step)
        for param in job.params:
            if param.grad is not None:
                param.grad.mul_(scale)
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        scaler.unscale_(job.optimizer)
        job.optimizer.clip_grad_norm_(1.0)
        scaler.step(job.optimizer)
        scaler.update()
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "with inf"])
def test_clipping_and_scaling_are_torchs(bad: bool) -> None:
    ours, theirs = Job(DEVICE), Job(DEVICE, library=torch.optim, fused=True)
    for job, scaler in (
        (ours, fusedshard.GradScaler("cuda", init_scale=1024.0)),
        (theirs, torch.amp.GradScaler("cuda", init_scale=1024.0)),
    ):
        for step in range(4):
            scale = scaler.scale(torch.ones((), device=DEVICE))
            job.set_gradients(step)
            grads = [param.grad for param in job.params if param.grad is not None]
            for grad in grads:
                grad.mul_(scale)
            if bad and step == 1:
                grads[-1][1, 2, 3, 4] = float("inf")
            scaler.unscale_(job.optimizer)
            if job.ours:
                job.optimizer.clip_grad_norm_(1.0)
            else:
                torch.nn.utils.clip_grad_norm_([p for p in job.params if p.numel()], 1.0)
            scaler.step(job.optimizer)
            scaler.update()
        assert scaler.get_scale() == (512.0 if bad else 1024.0)
    torch.testing.assert_close(list(ours.params), list(theirs.params), rtol=0, atol=1e-6)


def test_deterministic_mode() -> None:
    ours, theirs = pair(amsgrad=True)
    torch.use_deterministic_algorithms(True)
    try:
        ours.steps(range(3))
    finally:
        torch.use_deterministic_algorithms(False)
    theirs.steps(range(3))
    assert_same_bits(ours.result(), theirs.result())


def test_a_step_on_a_stream_of_its_own() -> None:
    ours, theirs = pair()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ours.steps(range(4))
    stream.synchronize()
    theirs.steps(range(4))
    assert_same_bits(ours.result(), theirs.result())


def captured(job: Job) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job.optimizer.step()
    return graph


@pytest.mark.parametrize("amsgrad", [False, True])
def test_replays_of_a_step_have_the_bits_of_eager_steps(amsgrad: bool) -> None:
    """Gradients and learning rate change between replays; now and then a step is eager."""
    jobs = [
        Job(
            DEVICE,
            lr=torch.tensor(1e-2, device=DEVICE),
            weight_decay=0.1,
            amsgrad=amsgrad,
            capturable=True,
        )
        for _ in range(2)
    ]
    replayed, eager = jobs
    for job in jobs:
        job.steps(range(2))
    graph = captured(replayed)
    for number in range(2, 12):
        for job in jobs:
            job.optimizer.param_groups[0]["lr"].fill_(0.1 / number)
            job.set_gradients(number)
        eager.optimizer.step()
        if number in (5, 6, 9):
            replayed.optimizer.step()
        else:
            graph.replay()
        assert_same_bits(replayed.result(), eager.result(), f"step {number}")
    assert replayed.optimizer.state[replayed.params[0]]["step"].item() == 12


def test_two_graphs_of_one_optimizer() -> None:
    """Each keeps the parameters that had gradients when it was captured."""
    replayed, eager = (Job(DEVICE, capturable=True) for _ in range(2))
    for job in (replayed, eager):
        job.step(0)
    kept = [param.grad for param in replayed.params]
    graphs: dict[tuple[int, ...], torch.cuda.CUDAGraph] = {}
    absences: list[tuple[int, ...]] = [(), (2, 7), (2, 7), (), (2, 7)]
    for absent in absences[:2]:
        for index, (param, grad) in enumerate(zip(replayed.params, kept, strict=True)):
            param.grad = None if index in absent else grad
        graphs[absent] = captured(replayed)
    for param, grad in zip(replayed.params, kept, strict=True):
        param.grad = grad
    for number, absent in enumerate(absences, 1):
        replayed.set_gradients(number)
        graphs[absent].replay()
        eager.step(number, absent)
        assert_same_bits(replayed.result(), eager.result(), f"step {number}")


def test_capture_wants_capturable() -> None:
    ours, theirs = pair()
    for job in (ours, theirs):
        job.step(0)
    ours.set_gradients(1)
    with pytest.raises(RuntimeError, match="capturable is False"):
        captured(ours)
    for job in (ours, theirs):
        job.step(1)
    assert_same_bits(ours.result(), theirs.result())


def test_a_model_that_was_moved_afterwards() -> None:
    model = torch.nn.Linear(3, 2).to(DEVICE)
    optimizer = fusedshard.AdamW(model.named_parameters())
    model.to("cpu")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=r"'weight'.*moved after the optimizer was built"):
        optimizer.step()


def test_parameters_on_two_kinds_of_devices() -> None:
    params = [("first", torch.nn.Parameter(torch.ones(3, device=DEVICE)))]
    params.append(("second", torch.nn.Parameter(torch.ones(3))))
    for order in (params, params[::-1]):
        (_, wanted), (name, param) = order
        message = f"parameter 1 ({name!r}): got device {param.device}, wanted {wanted.device}"
        with pytest.raises(ValueError, match=re.escape(message)):
            fusedshard.AdamW(order)
