"""`fusedshard plan` of torch's own ways, with what they really allocate and send."""

# No `from __future__ import annotations`: DDP reads the annotations of a communication hook.

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from audited import needs_fsdp_on_cpus
from mixed import BF16, FP32
from ranks import Rank, RankPool
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from training import stored_bytes

from fusedshard.demo.baseline import MasterAdamW
from fusedshard.planning.models import Model, Parameter
from fusedshard.planning.torchs import FSDP2, ddp, zero_redundancy
from fusedshard.planning.usage import Usage


class Block(torch.nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, inner)
        self.down = torch.nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Net(torch.nn.Module):
    """Blocks of unequal sizes, and first dimensions that ranks do not divide, or that are fewer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Linear(7, 33)
        self.layers = torch.nn.ModuleList(Block(33, inner) for inner in (50, 211, 130))
        self.head = torch.nn.Linear(33, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model_of(net: torch.nn.Module, dtype: torch.dtype | None = None) -> Model:
    named = net.named_parameters()
    return Model(
        tuple(Parameter(name, tuple(p.shape), dtype or p.dtype) for name, p in named), "test"
    )


class Found(NamedTuple):
    """Bytes of storages, each counted once, after two steps."""

    parameters: int
    gradients: int
    moments: int
    steps: int
    masters: int = 0
    buffers: int = 0


def compare(planned: Usage, found: Found) -> None:
    assert planned.parameters == found.parameters
    assert planned.gradients == found.gradients
    assert (planned.exp_avg, planned.exp_avg_sq) == (found.moments // 2,) * 2
    assert planned.steps == found.steps
    assert planned.masters == found.masters


def train(net: torch.nn.Module, optimizer: Any, dtype: torch.dtype) -> None:
    for _ in range(2):  # the first one's gradients order the buckets
        optimizer.zero_grad()
        net(torch.ones(3, 7, dtype=dtype)).sum().backward()
        optimizer.step()


def state_bytes(optimizer: Any) -> tuple[int, int]:
    """Moments and steps."""
    states = [
        {name: local(tensor) for name, tensor in state.items()}
        for state in optimizer.state.values()
    ]
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
    return stored_bytes(moments), stored_bytes([state["step"] for state in states])


def local(tensor: Any) -> torch.Tensor:
    mine: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return mine


def gradients(params: Sequence[Any]) -> list[torch.Tensor]:
    return [local(param.grad) for param in params if param.grad is not None]


# -- DDP ------------------------------------------------------------------------------------------


class Buckets:
    """Those that DDP gave a communication hook last."""

    def __init__(self, net: DistributedDataParallel, group: dist.ProcessGroup) -> None:
        self.group = group
        self.seen: dict[int, torch.Tensor] = {}
        net.register_comm_hook(self, Buckets.hook)

    def hook(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        self.seen[bucket.index()] = bucket.buffer()
        return allreduce_hook(self.group, bucket)


def run_ddp(rank: Rank, dtype: torch.dtype, masters: bool, bucket_view: bool) -> Found:
    net = DistributedDataParallel(
        Net().to(dtype),
        process_group=rank.group,
        bucket_cap_mb=0.03,
        gradient_as_bucket_view=bucket_view,
    )
    params = list(net.parameters())
    buckets = Buckets(net, rank.group)
    optimizer: Any = MasterAdamW(params) if masters else torch.optim.AdamW(params)
    train(net, optimizer, dtype)
    assert len(buckets.seen) > 1
    own, carried = gradients(params), list(buckets.seen.values())
    if bucket_view:
        assert stored_bytes(own) == stored_bytes(own + carried)
    copies = optimizer.masters if masters else []
    buffers = stored_bytes([] if bucket_view else carried) + stored_bytes(gradients(copies))
    moments, steps = state_bytes(optimizer)
    stored = stored_bytes(params), stored_bytes(own)
    return Found(*stored, moments, steps, stored_bytes(copies), buffers)


DDP_CASES = [
    (dtype, masters, view)
    for dtype, masters in ((FP32, False), (BF16, False), (BF16, True))
    for view in (False, True)
]


def run_all_ddp(rank: Rank) -> list[Found]:
    return [run_ddp(rank, *case) for case in DDP_CASES]


@pytest.mark.parametrize("world_size", [1, 3])
def test_ddp_holds_what_is_planned(ranks: RankPool, world_size: int) -> None:
    for results in ranks.run(world_size, run_all_ddp):
        for (dtype, masters, view), found in zip(DDP_CASES, results, strict=True):
            model = model_of(Net(), dtype)
            planned = ddp(model, world_size, masters=masters, bucket_view=view)
            compare(planned, found)
            assert sum(planned.buffers.values()) == found.buffers


# -- ZeroRedundancyOptimizer ----------------------------------------------------------------------


def run_zero(rank: Rank) -> Found:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = DistributedDataParallel(Net(), process_group=rank.group)
    params = list(net.parameters())
    optimizer = ZeroRedundancyOptimizer(
        params, torch.optim.AdamW, process_group=rank.group, lr=0.01
    )
    train(net, optimizer, FP32)
    moments, steps = state_bytes(optimizer.optim)
    return Found(stored_bytes(params), stored_bytes(gradients(params)), moments, steps)


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_zero_redundancy_holds_what_is_planned(ranks: RankPool, world_size: int) -> None:
    model = model_of(Net())
    results = ranks.run(world_size, run_zero)
    for rank, found in enumerate(results):
        compare(zero_redundancy(model, world_size, rank), found)
    fullest = max(found.moments for found in results)
    assert zero_redundancy(model, world_size).exp_avg == fullest // 2


# -- FSDP2 ----------------------------------------------------------------------------------------

# By whichever of its names a release of torch calls them.
COLLECTIVES = {
    "all_gather": ("all_gather_into_tensor", "all_gather_single"),
    "reduce_scatter": ("reduce_scatter_tensor", "reduce_scatter_single"),
}


@contextlib.contextmanager
def watched() -> Iterator[dict[str, list[int]]]:
    """The bytes of all ranks' parts together, of each collective."""
    seen: dict[str, list[int]] = {kind: [] for kind in COLLECTIVES}

    def watching(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
            seen[kind].append(max(tensor.nbytes for tensor in given))
            return real(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for kind, names in COLLECTIVES.items():
            for name in names:
                if hasattr(dist, name):
                    call = watching(kind, getattr(dist, name))
                    stack.enter_context(mock.patch.object(dist, name, call))
        yield seen


def run_fsdp(rank: Rank, dtype: torch.dtype, mixed: bool) -> tuple[Found, dict[str, list[int]]]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if mixed:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=FP32)
    net: Any = Net().to(FP32 if mixed else dtype)
    mesh = DeviceMesh.from_group(rank.group, "cpu")
    for module in (*net.layers, net):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    params: list[Any] = list(net.parameters())
    optimizer = torch.optim.AdamW(params)
    train(net, optimizer, FP32 if mixed else dtype)
    with watched() as seen:
        net(torch.ones(3, 7, dtype=FP32 if mixed else dtype)).sum().backward()
    stored = stored_bytes([local(p) for p in params]), stored_bytes(gradients(params))
    moments, steps = state_bytes(optimizer)
    net.unshard()
    net.layers[1].unshard()
    roots = [*net.stem.parameters(), *net.head.parameters(), *net.layers[1].parameters()]
    gathered = stored_bytes(roots)
    for module in (net, net.layers[1]):
        module.reshard()
    return Found(*stored, moments, steps, buffers=gathered), seen


FSDP_CASES = [(FP32, False), (BF16, False), (BF16, True)]


def run_all_fsdp(rank: Rank) -> list[tuple[Found, dict[str, list[int]]]]:
    return [run_fsdp(rank, *case) for case in FSDP_CASES]


@needs_fsdp_on_cpus
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_fsdp2_holds_and_sends_what_is_planned(ranks: RankPool, world_size: int) -> None:
    for rank, results in enumerate(ranks.run(world_size, run_all_fsdp)):
        for (dtype, mixed), (found, seen) in zip(FSDP_CASES, results, strict=True):
            planned = FSDP2(model_of(Net(), dtype), mixed=mixed).usage(world_size, rank)
            compare(planned, found)
            assert planned.buffers["gathered"] == found.buffers
            for kind, sizes in seen.items():
                # In steps of whole bytes: each rank sends N-1 parts of N.
                assert planned.sent[kind] == sum(sizes) * (world_size - 1) // world_size
            _, second, _ = sorted(planned_blocks(seen["all_gather"]))
            assert planned.buffers["arriving"] == second
            assert planned.buffers["scattered"] in seen["reduce_scatter"]


def planned_blocks(gathered: Sequence[int]) -> list[int]:
    """Sizes of the blocks, which are gathered twice, unlike the root."""
    return [size for size in set(gathered) if gathered.count(size) == 2]


def test_fsdp2_says_what_it_cannot_shard() -> None:
    scalar = Model((Parameter("scale", (), FP32), Parameter("w", (3, 2), FP32)), "test")
    assert "takes no parameters of 0 dimensions, as scale" in FSDP2(scalar).problem
    two = Model((Parameter("a", (2,), FP32), Parameter("b", (2,), BF16)), "test")
    assert "got several in that of a" in FSDP2(two).problem
    assert not FSDP2(two, mixed=True).problem
