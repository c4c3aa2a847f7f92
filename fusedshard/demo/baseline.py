"""What the demo compares fusedshard with: DistributedDataParallel, and torch's AdamW, in bf16 with
fp32 master weights; and how its exchange is timed."""

# No `from __future__ import annotations`: DDP reads the annotations of a communication hook.

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


class MasterAdamW(torch.optim.AdamW):
    """torch's fused AdamW on fp32 copies of bf16 parameters, as mixed-precision training is usually
    written: without them most updates are smaller than half a bf16's last place, and lost."""

    def __init__(self, parameters: Sequence[nn.Parameter], **options: Any) -> None:
        self._parameters = list(parameters)
        self.masters = [nn.Parameter(p.detach().float()) for p in self._parameters]
        super().__init__(self.masters, fused=True, **options)

    def step(self, closure: Any = None) -> Any:
        for parameter, master in zip(self._parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        super().step(closure)
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self.masters, strict=True):
                parameter.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for parameter in self._parameters:
            parameter.grad = None


class DDPMeter:
    """Times DDP's all-reduces, which overlap backward, from the first start to the last end."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._started = self._ended = 0.0
        self._reduced_bytes = 0
        model.register_comm_hook(self, DDPMeter.all_reduce)

    def all_reduce(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        self._started = self._started or time.perf_counter()
        self._reduced_bytes += bucket.buffer().nbytes
        group = dist.group.WORLD
        assert group is not None
        return allreduce_hook(group, bucket).then(self._finish)

    def _finish(self, reduced: torch.futures.Future[Tensor]) -> Tensor:
        self._ended = time.perf_counter()
        return reduced.value()

    def read(self, step_seconds: float) -> tuple[dict[str, float], int]:
        seconds = {
            "exchange": self._ended - self._started,
            "update": step_seconds,
            "gather": 0.0,
        }
        world_size = dist.get_world_size()
        sent = 2 * (world_size - 1) * self._reduced_bytes // world_size
        self._started, self._reduced_bytes = 0.0, 0
        return seconds, sent
