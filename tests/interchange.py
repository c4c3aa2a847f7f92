"""Jobs of every kind of optimizer on one model, that save, load, and go on."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from mixed import HYPER, exact_gradient
from ranks import Rank
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from training import assert_same_bits

import fusedshard

STEPS = 3  # before anything is saved
# Groups in another order than the model's, and interleaved with it. FSDP2 takes no parameters
# without dimensions, and leaves the last group alone.
GROUPS: tuple[dict[str, Any], ...] = (
    {"params": ("five", "turned", "one"), "name": "a", "lr_mult": 1, "weight_decay": 0.0},
    {"params": ("wide", "seven", "conv", "thirteen"), "name": "b", "lr_mult": 2, "amsgrad": True},
    {"params": ("scalar", "empty"), "name": "c", "lr_mult": 3, "lr": 0.02},
)
ALONE = GROUPS[2]["params"]
COMPARED = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "name", "lr_mult")


class Whole(NamedTuple):
    """All of a job: tensors by the parameters' names, and the groups."""

    params: dict[str, torch.Tensor]
    state: dict[str, dict[str, torch.Tensor]]
    groups: list[dict[str, Any]]


class Net(torch.nn.Module):
    """Parameters of sizes that no number of ranks divides, in several orders of strides."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        conv = randn(5, 3, 3, 3).contiguous(memory_format=torch.channels_last)
        values = {
            "wide": randn(17, 257),
            "five": randn(5),
            "conv": conv,
            "turned": randn(30, 41).t(),
            "scalar": randn(),
            "seven": randn(7),
            "one": randn(1),
            "empty": randn(0),
            "thirteen": randn(13),
        }
        for name, value in values.items():
            self.register_parameter(name, torch.nn.Parameter(value))

    def forward(self, factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A loss whose gradients are ``factors``."""
        products = [(p * factors[name]).sum() for name, p in self.named_parameters()]
        return torch.stack(products).sum()


class Job:
    """Torch's own optimizer in one process."""

    def __init__(self, rank: Rank, kind: str, seed: int = 0, **options: Any) -> None:
        self.rank, self.kind, self.options = rank, kind, options
        self.net = Net(seed, options.pop("dtype", torch.float32))
        self.model = self.wrapped()
        self.params = {name.removeprefix("module."): p for name, p in self.model.named_parameters()}
        named = [{**g, "params": [self.params[name] for name in g["params"]]} for g in GROUPS]
        self.names = [name for group in GROUPS for name in group["params"]]
        self.optimizer = self.built(named, **HYPER)

    def wrapped(self) -> torch.nn.Module:
        return self.net

    def built(self, groups: Any, **options: Any) -> Any:
        return getattr(torch.optim, self.kind)(groups, **options)

    def gradient(self, name: str, step: int, number: int, of: int) -> torch.Tensor:
        """Of one of so many ranks; the mean over them is the same for any number."""
        index = list(self.params).index(name)
        return exact_gradient(self.params[name], step, index, number, of)

    def step(self, number: int, without: Sequence[str] = ()) -> None:
        for name, param in self.params.items():
            param.grad = None if name in without else self.gradient(name, number, 0, 1)
        self.optimizer.step()

    def train(self, without: Sequence[str] = ()) -> None:
        for number in range(STEPS):
            self.step(number, without)

    # -- all of it ---------------------------------------------------------------------------------

    def full_state(self) -> dict[str, Any]:
        state: dict[str, Any] = copy.deepcopy(self.optimizer.state_dict())
        return state

    def values(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.params.items()}

    def whole(self) -> Whole | None:
        """None on ranks that get none. Collective."""
        full = self.full_state()
        if not full:
            return None
        order = [key for group in full["param_groups"] for key in group["params"]]
        state = {name: full["state"].get(key) for name, key in zip(self.names, order, strict=True)}
        # torch.distributed.checkpoint makes lists of tuples.
        groups = [
            {key: group[key] for key in COMPARED} | {"betas": tuple(group["betas"])}
            for group in full["param_groups"]
        ]
        return Whole(self.values(), {k: v for k, v in state.items() if v}, groups)

    # -- routes: one file of whole tensors, or torch.distributed.checkpoint ------------------------

    def save_file(self, path: Path) -> None:
        """What torch's own optimizer would save in one process."""
        content = {"model": self.values(), "optim": self.full_state()}
        if self.rank.rank == 0:
            torch.save(content, path)

    def load_file(self, path: Path) -> None:
        self.load(torch.load(path, weights_only=True))

    def load(self, content: dict[str, Any]) -> None:
        self.take(content["model"])
        self.optimizer.load_state_dict(content["optim"])

    def take(self, values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(values[name])

    def shown(self, **options: Any) -> dict[str, Any]:
        wanted = StateDictOptions(**options)
        optim = get_optimizer_state_dict(self.model, self.optimizer, options=wanted)
        return {"model": get_model_state_dict(self.model), "optim": optim}

    def save_folder(self, folder: Path, **options: Any) -> None:
        dcp.save(  # type: ignore[attr-defined]
            self.shown(**options), checkpoint_id=folder, process_group=self.rank.group
        )

    def load_folder(self, folder: Path, planner: Any = None, **options: Any) -> None:
        content = self.shown(**options)
        dcp.load(  # type: ignore[attr-defined]
            content, checkpoint_id=folder, process_group=self.rank.group, planner=planner
        )
        wanted = StateDictOptions(**options)
        set_model_state_dict(self.model, content["model"])
        set_optimizer_state_dict(self.model, self.optimizer, content["optim"], options=wanted)


class Ours(Job):
    """Each rank has gradients of its own."""

    mode = "sharded"

    def built(self, groups: Any, **options: Any) -> Any:
        return getattr(fusedshard, self.kind)(
            groups, process_group=self.rank.group, mode=self.mode, **options, **self.options
        )

    def gradient(self, name: str, step: int, number: int, of: int) -> torch.Tensor:
        return super().gradient(name, step, self.rank.rank, self.rank.world_size)

    def full_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.full_state_dict()
        return state

    def whole(self) -> Whole:
        whole = super().whole()
        assert whole is not None
        return whole


class Replicated(Ours):
    mode = "replicated"


class InDdp(Job):
    """DDP averages the ranks' own gradients."""

    def wrapped(self) -> torch.nn.Module:
        return DistributedDataParallel(self.net, process_group=self.rank.group)

    def step(self, number: int, without: Sequence[str] = ()) -> None:
        self.optimizer.zero_grad()
        here = (self.rank.rank, self.rank.world_size)
        self.model({name: self.gradient(name, number, *here) for name in self.params}).backward()
        self.optimizer.step()


class Fsdp2(Job):
    def wrapped(self) -> torch.nn.Module:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        for param in self.net.parameters():
            param.data = param.detach().contiguous()
        left_alone = {self.net.get_parameter(name) for name in ALONE}
        mesh = DeviceMesh.from_group(self.rank.group, "cpu")
        fully_shard(self.net, mesh=mesh, ignored_params=left_alone)
        return self.net

    def gradient(self, name: str, step: int, number: int, of: int) -> torch.Tensor:
        whole = torch.empty(self.params[name].shape)
        grad = exact_gradient(whole, step, list(self.params).index(name), number, of)
        return self._placed(name, grad)

    def _placed(self, name: str, value: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import distribute_tensor

        param: Any = self.params[name]
        if name in ALONE:
            return value
        return distribute_tensor(value, param.device_mesh, param.placements)

    def values(self) -> dict[str, torch.Tensor]:
        return {name: _gathered(p.detach()).clone() for name, p in self.params.items()}

    def full_state(self) -> dict[str, Any]:
        shown = super().full_state()
        state = {
            key: {name: _gathered(value) for name, value in values.items()}
            for key, values in shown["state"].items()
        }
        return {**shown, "state": state}

    def load(self, content: dict[str, Any]) -> None:
        self.take({name: self._placed(name, v) for name, v in content["model"].items()})
        options = StateDictOptions(full_state_dict=True)
        named = by_name(content["optim"], self.names)
        set_optimizer_state_dict(self.model, self.optimizer, named, options=options)


class Zero(Job):
    def built(self, groups: Any, **options: Any) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        kind = getattr(torch.optim, self.kind)
        return ZeroRedundancyOptimizer(groups, kind, process_group=self.rank.group, **options)

    def full_state(self) -> dict[str, Any]:
        self.optimizer.consolidate_state_dict(to=0)
        return super().full_state() if self.rank.rank == 0 else {}


def _gathered(value: Any) -> torch.Tensor:
    whole: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole


def by_name(full: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A state dict as `set_optimizer_state_dict` takes it, whatever its keys."""
    keys = [key for group in full["param_groups"] for key in group["params"]]
    name_of = dict(zip(keys, names, strict=True))
    groups = [{**g, "params": [name_of[k] for k in g["params"]]} for g in full["param_groups"]]
    state = {name_of[key]: values for key, values in full["state"].items()}
    return {"state": state, "param_groups": groups}


def assert_same(ours: Whole, theirs: Whole, what: str) -> None:
    """Equal to the bit."""
    for our, their in zip(ours, theirs, strict=True):
        assert_same_bits(our, their, what)


def assert_close(ours: Whole, theirs: Whole, what: str) -> None:
    """As near as our arithmetic and torch's are."""
    options: Any = {"rtol": 1e-6, "atol": 1e-6, "msg": lambda text: f"{what}: {text}"}
    torch.testing.assert_close(ours.params, theirs.params, **options)
    torch.testing.assert_close(ours.state, theirs.state, **options)
    assert ours.groups == theirs.groups


# Of a job that saves: what it saved, and what it is one step later.
Donated = tuple[Whole, Whole]
NOTHING: Mapping[str, Any] = {}
FLAT = {"flatten_optimizer_state_dict": True}


def donate(
    rank: Rank,
    job: type[Job],
    kind: str,
    folder: Path,
    options: Mapping[str, Any] = NOTHING,
    without: Sequence[str] = (),
) -> tuple[Whole | None, Whole | None]:
    """Save by every route; parameters ``without`` a gradient have their first one afterwards."""
    donor = job(rank, kind, **options)
    donor.train(without)
    donor.save_file(folder / "file.pt")
    if job is not Zero:
        donor.save_folder(folder / "folder")
        donor.save_folder(folder / "flat", **FLAT)
    saved = donor.whole()
    donor.step(STEPS)
    return saved, donor.whole()


def take(
    rank: Rank,
    job: type[Job],
    kind: str,
    folder: Path,
    routes: Sequence[str],
    options: Mapping[str, Any] = NOTHING,
    again: Path | None = None,
) -> dict[str, tuple[Whole | None, Whole | None]]:
    """Load by some routes (of folders with ", partial" what is there), into a new job with other
    weights and groups each time, and take a step; before it save to a file in a folder, too."""
    results = {}
    for route in routes:
        taker = job(rank, kind, seed=9 + rank.rank, **options)
        for group in taker.optimizer.param_groups:
            group.update(lr=0.5, weight_decay=0.5, name="other", lr_mult=0)
        if route.endswith(".pt"):
            taker.load_file(folder / route)
        else:
            name, _, partial = route.partition(", ")
            planner = dcp.DefaultLoadPlanner(  # type: ignore[attr-defined]
                allow_partial_load=bool(partial)
            )
            taker.load_folder(folder / name, planner, **(FLAT if name == "flat" else {}))
        if again is not None:
            taker.save_file(again / "file.pt")
        loaded = taker.whole()
        taker.step(STEPS)
        results[route] = (loaded, taker.whole())
    return results
