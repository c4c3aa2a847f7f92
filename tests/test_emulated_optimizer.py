"""The optimizer on the CUDA kernels, run on emulated devices: the bits of the CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_backend import emulated_kernels
from mixed import CODED, FORMATS, Formats, train_mixed
from ranks import Rank, RankPool
from training import AWKWARD, assert_same_bits, gradient, make_params, train_ours
from transports import moving_by

import fusedshard

SHAPES = (*AWKWARD, (9_001,), (64, 130))
OPTIONS: list[dict[str, Any]] = [
    {"mode": mode, "reduction": reduction}
    for mode in ("sharded", "replicated")
    for reduction in ("ordered", "backend")
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options.values()))
def test_training_has_the_cpus_bits(
    ranks: RankPool, options: dict[str, Any], dtype: torch.dtype, emulated_module: Path
) -> None:
    options = {**options, "bucket_cap_mb": 0.02, "amsgrad": True, "eps": 1.0}
    ours = ranks.run(3, _train, emulated_module, dtype, options)
    assert_same_bits(ours, ranks.run(3, _train, None, dtype, options))


def _train(rank: Rank, module: Path | None, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    if module is None:
        return train_ours(rank, "AdamW", SHAPES, 3, dtype, **options)
    with emulated_kernels(module), moving_by("staged"):
        return train_ours(rank, "AdamW", SHAPES, 3, dtype, **options)


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_mixed_precision_has_the_cpus_bits(formats: Formats, emulated_module: Path) -> None:
    want = train_mixed(None, formats, amsgrad=True)
    with emulated_kernels(emulated_module):
        assert_same_bits(train_mixed(None, formats, amsgrad=True), want)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options.values()))
def test_mixed_precision_on_ranks_has_the_cpus_bits(
    ranks: RankPool, options: dict[str, Any], emulated_module: Path
) -> None:
    for formats in (FORMATS[0], Formats(None, CODED, True)):
        want = train_mixed(None, formats)
        for ours in ranks.run(3, _train_mixed, emulated_module, formats, options):
            assert_same_bits(ours, want)


def _train_mixed(rank: Rank, module: Path, formats: Formats, options: dict[str, Any]) -> Any:
    with emulated_kernels(module), moving_by("staged"):
        return train_mixed(rank, formats, **options)


def changing_job() -> Any:
    """Absent gradients, a frozen parameter that thaws, groups that change, a late group, moving
    gradients, and a state dict that is loaded: all that tables must follow."""
    params = make_params(SHAPES)
    params[1].requires_grad_(False)
    groups: list[dict[str, Any]] = [
        {"params": params[:4]},
        {"params": params[4:], "lr": 0.3, "weight_decay": 0.0},
    ]
    optimizer = fusedshard.AdamW(groups, lr=0.1, eps=1.0)
    late = make_params([(5_000,), (3,)], seed=1)
    for step in range(8):
        if step == 3:
            optimizer.add_param_group({"params": late, "maximize": True})
            params[1].requires_grad_(True)
        if step == 5:
            optimizer.load_state_dict(optimizer.state_dict())
        known = [param for group in optimizer.param_groups for param in group["params"]]
        for index, param in enumerate(known):
            present = (step + index) % 3 and param.requires_grad
            param.grad = gradient(param, step, index, 0) if present else None
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.step()
    return [p.detach().clone() for p in [*params, *late]], optimizer.state_dict()


def test_all_that_changes_between_steps(emulated_module: Path) -> None:
    want = changing_job()
    with emulated_kernels(emulated_module):
        ours = changing_job()
    assert_same_bits(ours, want)
    steps = [int(state["step"]) for state in want[1]["state"].values()]
    assert len(set(steps)) > 2  # so that a step count in the wrong place would show


def test_what_a_cuda_graph_uses_stays_in_its_place(emulated_module: Path) -> None:
    """A captured step goes on with what is loaded later."""
    with emulated_kernels(emulated_module):
        params = make_params(SHAPES)
        optimizer = fusedshard.AdamW(params, amsgrad=True)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        engine = optimizer._built
        used = [engine.steps, engine.step_mirror, engine._tables.device_words]
        used += [moment.values for flat in engine._flats for moment in flat.moments.values()]
        places = [tensor.data_ptr() for tensor in used]
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        assert [tensor.data_ptr() for tensor in used] == places
        now = [engine.steps, engine.step_mirror, engine._tables.device_words]
        assert all(a is b for a, b in zip(used, now, strict=False))
        assert engine.steps.tolist() == [2] * len(params)


def test_what_a_capture_would_repeat_is_refused(emulated_module: Path) -> None:
    """Making room for moments, and moving a parameter into flat memory."""
    with emulated_kernels(emulated_module) as backend:
        param, frozen = make_params([(5,), (3,)])
        frozen.requires_grad_(False)
        optimizer = fusedshard.AdamW([param, frozen])
        param.grad = torch.ones(5)
        optimizer.step()
        before = param.detach().clone(), frozen.detach().clone()
        backend.graph = True
        optimizer.param_groups[0]["amsgrad"] = True
        with pytest.raises(RuntimeError, match="amsgrad: is switched on while a CUDA graph is"):
            optimizer.step()
        optimizer.param_groups[0]["amsgrad"] = False
        frozen.requires_grad_(True)
        frozen.grad = torch.ones(3)
        with pytest.raises(RuntimeError, match="parameter 1: begins to train while a CUDA graph"):
            optimizer.step()
        assert_same_bits([param.detach(), frozen.detach()], list(before))


def test_room_for_amsgrad_is_there_before_the_first_step(emulated_module: Path) -> None:
    """Memory that a captured step made would be zero again at each replay."""
    with emulated_kernels(emulated_module) as backend:
        (param,) = make_params([(5,)])
        optimizer = fusedshard.Adam([param], amsgrad=True)
        param.grad = torch.ones(5)
        backend.graph = True
        optimizer.step()
        assert optimizer.state[param]["max_exp_avg_sq"].gt(0).all()


def test_what_a_graph_writes_to_outlives_it(emulated_module: Path) -> None:
    """add_param_group replaces tables and step counts."""
    with emulated_kernels(emulated_module) as backend:
        params = make_params([(5,), (6,), (7,)])
        optimizer = fusedshard.AdamW(params[:1])
        engine = optimizer._built
        replaced = engine.steps, engine.step_mirror, engine._tables, engine._packing
        optimizer.add_param_group({"params": params[1:2]})
        assert engine._retired == []
        params[0].grad = torch.ones(5)
        backend.graph = True
        optimizer.step()
        backend.graph = False
        captured = engine.steps, engine.step_mirror, engine._tables, engine._packing
        optimizer.add_param_group({"params": params[2:]})
        kept = {id(item) for item in engine._retired}
        assert {id(item) for item in captured} <= kept
        assert not {id(item) for item in replaced} & kept
