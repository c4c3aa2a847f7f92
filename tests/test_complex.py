"""Complex parameters: beside torch.optim on the same complex tensors, fed the mean gradients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_backend import emulated_kernels
from ranks import Rank, RankPool
from training import AWKWARD, assert_close, assert_same_bits, gradient, mean_gradient, train
from transports import moving_by

import fusedshard

MODES = ("sharded", "replicated")
each_mode = pytest.mark.parametrize("mode", MODES)
WORLDS = [(1, "sharded"), *((n, mode) for n in (2, 3) for mode in MODES)]
each_world = pytest.mark.parametrize(("world_size", "mode"), WORLDS)
C64, C128, F32, F64 = torch.complex64, torch.complex128, torch.float32, torch.float64
HYPER: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2, "eps": 1.0}

Kinds = Sequence[tuple[tuple[int, ...], torch.dtype]]
ALL_C64: Kinds = [(shape, C64) for shape in (*AWKWARD, (301, 33))]
MIXED: Kinds = [
    ((7,), F32), ((17, 5), C64), ((), C128), ((0,), C64), ((), C64),
    ((9, 2), F64), ((301,), C64), ((64, 40), F32), ((33, 3), C128),
]  # fmt: skip


def make(kinds: Kinds, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=d)) for s, d in kinds]


def train_ours(
    rank: Rank, kind: str, kinds: Kinds, steps: int, options: dict[str, Any]
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    params = make(kinds, seed=rank.rank)  # rank 0's must win
    optimizer = getattr(fusedshard, kind)(params, process_group=rank.group, **options)
    external = options.get("grad_sync") == "external"

    def grad(p: torch.Tensor, t: int, i: int) -> torch.Tensor:
        return mean_gradient(p, t, i, rank.world_size) if external else gradient(p, t, i, rank.rank)

    train(optimizer, params, range(steps), grad)
    return [p.detach().clone() for p in params], optimizer.full_state_dict()


def train_torch(
    world_size: int, kind: str, kinds: Kinds, steps: int, **options: Any
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    params = make(kinds)
    optimizer = getattr(torch.optim, kind)(params, **options)
    train(optimizer, params, range(steps), lambda p, t, i: mean_gradient(p, t, i, world_size))
    return [p.detach() for p in params], optimizer.state_dict()


@each_world
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_shp_08_complex_parameters(
    ranks: RankPool, world_size: int, mode: str, amsgrad: bool, kind: str
) -> None:
    """As torch's on the complex tensor, and as torch's on pairs of reals."""
    options = {"lr": 0.1, "weight_decay": 0.2, "amsgrad": amsgrad}
    whole, pairs = (torch.nn.Parameter(torch.tensor([1 + 2j, -0.5j])) for _ in range(2))
    pairs = torch.nn.Parameter(torch.view_as_real(pairs.detach()))
    grad = torch.tensor([0.3 - 0.4j, 2])
    for param, its in ((whole, grad), (pairs, torch.view_as_real(grad))):
        reference = getattr(torch.optim, kind)([param], **options)
        train(reference, [param], range(5), lambda p, t, i, its=its: its.clone())  # type: ignore[misc]
    for param in ranks.run(world_size, _shp_08, kind, {**options, "mode": mode}):
        torch.testing.assert_close(param, whole.detach(), rtol=0, atol=1e-6)
        torch.testing.assert_close(torch.view_as_real(param), pairs.detach(), rtol=0, atol=1e-6)


def _shp_08(rank: Rank, kind: str, options: dict[str, Any]) -> torch.Tensor:
    """On each rank another gradient, whose mean is the recipe's to the bit: its decayed imaginary
    part is 0."""
    param = torch.nn.Parameter(torch.tensor([1 + 2j, -0.5j]))
    optimizer = getattr(fusedshard, kind)([param], process_group=rank.group, **options)
    share = {1: [1], 2: [2, 0], 3: [2, 1, 0]}[rank.world_size][rank.rank]
    for _ in range(5):
        param.grad = torch.tensor([0.3 - 0.4j, 2]) * share
        optimizer.step()
    return param.detach()


@each_world
@pytest.mark.parametrize("kinds", [ALL_C64, MIXED], ids=["complex", "mixed"])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_shapes_and_mixed_models(
    ranks: RankPool, world_size: int, mode: str, kinds: Kinds, amsgrad: bool
) -> None:
    options = {**HYPER, "amsgrad": amsgrad}
    want = train_torch(world_size, "Adam", kinds, 4, **options)
    results = ranks.run(world_size, train_ours, "Adam", kinds, 4, {**options, "mode": mode})
    for ours in results:
        assert_close(ours, want)
        assert_same_bits(ours, results[0])


OPTIONS: list[dict[str, Any]] = [
    {"bucket_cap_mb": 1e-3},
    {"reduction": "backend"},
    {"grad_sync": "external"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_and_modes(ranks: RankPool, options: dict[str, Any]) -> None:
    kinds = [*MIXED, ((100_001,), C64)]  # which two ranks share in several buckets
    want = train_torch(2, "AdamW", kinds, 3, **HYPER)
    options = {**HYPER, **options}
    by_mode = [
        ranks.run(2, train_ours, "AdamW", kinds, 3, {**options, "mode": mode}) for mode in MODES
    ]
    for results in by_mode:
        for ours in results:
            assert_close(ours, want)
            assert_same_bits(ours, by_mode[0][0] if "reduction" not in options else results[0])


@each_mode
def test_training_on_emulated_gpus_has_the_cpus_bits(
    ranks: RankPool, mode: str, emulated_module: Path
) -> None:
    options = {**HYPER, "mode": mode, "amsgrad": True}
    ours = ranks.run(3, _emulated, emulated_module, options)
    assert_same_bits(ours, ranks.run(3, train_ours, "AdamW", MIXED, 3, options))


def _emulated(rank: Rank, module: Path, options: dict[str, Any]) -> Any:
    with emulated_kernels(module), moving_by("staged"):
        return train_ours(rank, "AdamW", MIXED, 3, options)


@each_world
def test_parameters_stay_themselves_and_moments_are_complex(
    ranks: RankPool, world_size: int, mode: str
) -> None:
    """In sharded mode a rank's moments are pieces, in storage order, of complex numbers."""
    results = ranks.run(world_size, _forms, mode)
    for index, dtype in enumerate((C64, C128)):
        whole = results[0][1]["state"][index]["exp_avg"]
        in_order = whole.as_strided((whole.numel(),), (1,))
        for rank, (kept, _, pieces) in enumerate(results):
            assert kept and pieces[index].dtype == whole.dtype == dtype
            if world_size == 1 or mode == "replicated":
                assert_same_bits(pieces[index], whole, f"rank {rank}")
        if world_size > 1 and mode == "sharded":
            assert all(pieces[index].dim() == 1 for _, _, pieces in results)
            joined = torch.cat([pieces[index] for _, _, pieces in results])
            assert_same_bits(joined, in_order)


def _forms(rank: Rank, mode: str) -> Any:
    values = torch.randn(250, 3, dtype=C64).t(), torch.randn(1, 2, 3, 5, dtype=C128)
    params = [
        torch.nn.Parameter(values[0]),
        torch.nn.Parameter(values[1].to(memory_format=torch.channels_last)),
    ]
    before = [(id(p), p.size(), p.stride(), p.dtype) for p in params]
    optimizer = fusedshard.AdamW(params, process_group=rank.group, mode=mode)
    kept = rank.rank != 0 or all(map(torch.equal, params, values))
    for index, param in enumerate(params):
        param.grad = gradient(param, 0, index, rank.rank)
    optimizer.step()
    full = optimizer.full_state_dict()
    after = [(id(p), p.size(), p.stride(), p.dtype) for p in params]
    strides = [full["state"][i]["exp_avg"].stride() for i in range(2)]
    kept = kept and after == before and strides == [p.stride() for p in params]
    return kept, full, [optimizer.state[p]["exp_avg"].clone() for p in params]


def lazily_conjugated(grad: torch.Tensor) -> torch.Tensor:
    return grad.conj().resolve_conj().conj()


def lazily_negated(grad: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(-grad)


def transposed(grad: torch.Tensor) -> torch.Tensor:
    return grad.t().contiguous().t()


def conjugated_and_transposed(grad: torch.Tensor) -> torch.Tensor:
    return grad.mH.contiguous().mH


@each_world
@pytest.mark.parametrize(
    "form", [lazily_conjugated, lazily_negated, transposed, conjugated_and_transposed]
)
def test_gradients_that_show_other_values_than_their_memory(
    ranks: RankPool, world_size: int, mode: str, form: Any
) -> None:
    """What a rank is left with in p.grad is its own, or in replicated mode the mean."""
    kinds: Kinds = [((5, 4), C64), ((3, 33), C128)]
    want = train_torch(world_size, "AdamW", kinds, 3, **HYPER)
    for rank, (params, grads) in enumerate(ranks.run(world_size, _lazy, mode, kinds, form)):
        torch.testing.assert_close(params, want[0], rtol=0, atol=1e-6)
        for index, grad in enumerate(grads):
            own = gradient(params[index], 2, index, rank)
            mean = mean_gradient(params[index], 2, index, world_size)
            expected = mean if mode == "replicated" else own
            torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-6)


def _lazy(rank: Rank, mode: str, kinds: Kinds, form: Any) -> Any:
    params = make(kinds)
    optimizer = fusedshard.AdamW(params, process_group=rank.group, mode=mode, **HYPER)
    train(optimizer, params, range(3), lambda p, t, i: form(gradient(p, t, i, rank.rank)))
    grads = [p.grad.resolve_conj().resolve_neg() for p in params if p.grad is not None]
    return [p.detach().clone() for p in params], grads


@each_mode
def test_a_complex_network_whose_backward_conjugates(ranks: RankPool, mode: str) -> None:
    """Beside one process on both ranks' data, where torch wants gradients resolved; the parameters
    are lazily conjugated at first."""
    reference = make(NETWORK)
    optimizer = torch.optim.Adam(reference, lr=0.1, eps=1.0)
    for _ in range(5):
        optimizer.zero_grad()
        for rank in range(2):
            (network_loss(reference, rank) / 2).backward()
        for param in reference:
            assert param.grad is not None
            param.grad = param.grad.resolve_conj()
        optimizer.step()
    for lazy, params in ranks.run(2, _network, mode):
        assert lazy
        torch.testing.assert_close(params, [p.detach() for p in reference], rtol=0, atol=1e-6)


NETWORK: Kinds = [((8, 4), C64), ((8,), C64), ((8,), F32)]


def network_loss(params: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    weight, bias, scale = params
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(rank), dtype=C64)
    hidden = x @ weight.mH + bias
    return (scale * hidden.abs()).square().mean() + bias.conj().real.sum()


def _network(rank: Rank, mode: str) -> Any:
    plain = make(NETWORK)
    params = [torch.nn.Parameter(p.detach().conj().resolve_conj().conj()) for p in plain]
    lazy = [p.is_conj() for p in params] == [True, True, False]
    optimizer = fusedshard.Adam(params, 0.1, eps=1.0, process_group=rank.group, mode=mode)
    for _ in range(5):
        optimizer.zero_grad()
        network_loss(params, rank.rank).backward()
        lazy = lazy and bool(params[0].grad is not None and params[0].grad.is_conj())
        optimizer.step()
    return lazy, [p.detach().clone() for p in params]


@each_world
def test_frozen_thawing_and_late_parameters(ranks: RankPool, world_size: int, mode: str) -> None:
    want = changing_job(
        lambda p: torch.optim.AdamW(p, **HYPER), lambda p, t, i: mean_gradient(p, t, i, world_size)
    )
    results = ranks.run(world_size, _changing, mode)
    for params, state in results:
        assert_close((params, state), (want[0], want[1].state_dict()))
        assert_same_bits((params, state), results[0])


def changing_job(new: Any, grad: Any) -> Any:
    params, late = make(MIXED), make([((19,), C64), ((3,), F32)], seed=7)
    params[1].requires_grad_(False)
    params[2].requires_grad_(False)
    optimizer = new(params[:6])
    optimizer.add_param_group({"params": params[6:], "lr": 0.3})
    for step in range(4):
        if step == 2:
            params[1].requires_grad_(True)
            optimizer.add_param_group({"params": late, "weight_decay": 0.0})
        everyone = [p for group in optimizer.param_groups for p in group["params"]]
        for index, param in enumerate(everyone):
            param.grad = grad(param, step, index) if param.requires_grad else None
        optimizer.step()
    return [p.detach().clone() for p in [*params, *late]], optimizer


def _changing(rank: Rank, mode: str) -> Any:
    params, optimizer = changing_job(
        lambda p: fusedshard.AdamW(p, mode=mode, process_group=rank.group, **HYPER),
        lambda p, t, i: gradient(p, t, i, rank.rank),
    )
    return params, optimizer.full_state_dict()
