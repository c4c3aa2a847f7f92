"""The audit of less usual jobs: every format of ours, replicas of shards, other optimizers; and
what cannot be audited."""

from __future__ import annotations

import json
from typing import Any

import audited
import pytest
import torch
from audited import param_of
from ranks import Rank, RankPool
from test_audit import WEIGHT, one_report, part_of

import fusedshard
from fusedshard.auditing.report import AuditReport

FORMATS: list[tuple[torch.dtype, dict[str, Any], set[str]]] = [
    (torch.float32, {"amsgrad": True}, {"max_exp_avg_sq"}),
    (torch.float64, {}, set()),
    (torch.bfloat16, {}, {"master_weights", "master_weights_checks"}),
    (torch.float16, {"state_dtype": torch.bfloat16}, {"master_weights"}),
    (torch.float32, {"state_dtype": torch.uint8}, {"exp_avg_exponents", "exp_avg_sq_exponents"}),
]


def wide_job(
    rank: Rank, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[torch.nn.Module, fusedshard.Adam]:
    """Several buckets, parameters that span some, and one large enough for 8-bit moments."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 517), torch.nn.Linear(517, 3)).to(dtype)
    optimizer = fusedshard.Adam(
        model.named_parameters(), process_group=rank.group, bucket_cap_mb=0.01, **options
    )
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.01 * (1 + rank.rank))
    optimizer.step()
    return model, optimizer


def _in_format(rank: Rank, dtype: torch.dtype, options: dict[str, Any]) -> list[AuditReport]:
    reports = []
    for mode in ("sharded", "replicated"):
        _, optimizer = wide_job(rank, dtype, {"mode": mode, **options})
        reports.append(fusedshard.audit(optimizer))
    return reports


@pytest.mark.parametrize(("dtype", "options", "parts"), FORMATS)
def test_every_format(
    ranks: RankPool, dtype: torch.dtype, options: dict[str, Any], parts: set[str]
) -> None:
    answers = ranks.run(3, _in_format, dtype, options)
    sharded, replicated = (one_report([answer[mode] for answer in answers]) for mode in (0, 1))
    assert (sharded.kind, replicated.kind) == ("sharded", "replicated")
    always = {"param", "step", "exp_avg", "exp_avg_sq"}
    for report in (sharded, replicated):
        assert {part.part for part in report.parameters[0].parts} == always | parts
    owners = {r for share in part_of(sharded, "0.weight", "exp_avg").shares for r in share.ranks}
    assert owners == {0, 1, 2}


def _complex(rank: Rank) -> AuditReport:
    param = torch.nn.Parameter(torch.randn(700, 2, dtype=torch.complex64))
    optimizer = fusedshard.Adam([param], process_group=rank.group)
    param.grad = torch.ones_like(param) * (1 + 2j) * rank.rank
    optimizer.step()
    return fusedshard.audit(optimizer)


def test_complex_parameters(ranks: RankPool) -> None:
    report = one_report(ranks.run(2, _complex))
    assert report.kind == "sharded" and report.parameters[0].name == "parameter 0"
    assert part_of(report, "parameter 0", "exp_avg").shape == (1400,)


def _before_the_first_step(rank: Rank) -> list[str]:
    jobs = [audited.ddp, audited.zero, audited.fsdp2, audited.ours]
    return [str(fusedshard.audit(*job(rank)[::-1], process_group=rank.group)) for job in jobs]


def test_before_the_first_step(ranks: RankPool) -> None:
    """Ours has its moments, of zeros, from the beginning."""
    none, once = "no optimizer state yet; parameters: ", "sharded, each element owned once"
    said = [none + "replicated, identical", none + "replicated, identical", none + once, once]
    assert ranks.run(2, _before_the_first_step) == [said] * 2


def _hybrid(rank: Rank, spoil: bool) -> AuditReport:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)  # fully_shard leaves it to the user that replicas begin alike
    model = torch.nn.Linear(5, 7)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3, 5) * rank.rank).sum().backward()
    optimizer.step()
    if spoil and rank.rank == 3:
        optimizer.state[model.weight]["exp_avg"].to_local()[0, 2] = 5.0
    return fusedshard.audit(optimizer, model)


@audited.needs_fsdp_on_cpus
def test_replicas_of_shards(ranks: RankPool) -> None:
    report = one_report(ranks.run(4, _hybrid, False))
    assert (report.ok, report.kind) == (True, "hybrid")
    assert report.headline == "sharded, each element on 2 ranks, identical"
    report = one_report(ranks.run(4, _hybrid, True))
    [found] = part_of(report, "weight", "exp_avg").differences
    assert report.kind == "diverged"
    # 7 rows in shards of 4 and 3; with two copies there is no majority.
    assert (found.rank, found.reference, found.first_index) == (3, 1, (4, 2))


def _after_evaluation(rank: Rank) -> AuditReport:
    model, optimizer = audited.trained(rank, audited.fsdp2)
    with torch.no_grad():
        model(torch.ones(1, 3, 4, 4))  # leaves the root's parameters gathered
    return fusedshard.audit(optimizer, model, process_group=rank.group)


@audited.needs_fsdp_on_cpus
def test_fsdp2_after_a_forward_alone(ranks: RankPool) -> None:
    report = one_report(ranks.run(2, _after_evaluation))
    assert report.kind == "sharded"
    assert all(part.copies == 1 for p in report.parameters for part in p.parts if part.shape)
    assert [len(p.parts) for p in report.parameters] == [4] * 6


def _spoiled(rank: Rank, what: str) -> AuditReport:
    model, optimizer = audited.trained(rank, audited.ddp)
    inner = model.get_submodule("module")
    inner.register_buffer("seen", torch.full((2,), float(rank.rank)))
    state = optimizer.state[param_of(model, WEIGHT)]
    if what == "strides" and rank.rank == 1:
        state["exp_avg"] = state["exp_avg"].t().contiguous().t()
    elif what == "missing" and rank.rank == 1:
        del state["exp_avg_sq"]
    elif what == "shape" and rank.rank == 1:
        state["exp_avg"] = torch.zeros(3)
    elif what == "step" and rank.rank == 1:
        state["step"] += 1
    elif what == "lr" and rank.rank == 1:
        optimizer.param_groups[0]["lr"] = 0.5
    elif what == "numbers":
        state["step"] = int(state["step"])
        state["seen"] = {"losses": [0.5 * rank.rank, int(rank.rank == 1)]}
    return fusedshard.audit(optimizer, model, process_group=rank.group)


@pytest.mark.parametrize(
    ("what", "part", "verdict", "said"),
    [
        ("strides", "exp_avg", "identical", ""),
        ("missing", "exp_avg_sq", "missing", "not on rank 1"),
        ("shape", "exp_avg", "different", "shape (3,) on rank 1"),
        ("step", "step", "different", "4 here, 3 there"),
        ("lr", "lr", "different", "hyperparameters; the first: lr of param_groups[0]: rank 1"),
        ("numbers", "seen.losses.0", "different", "1 here, 0 there"),
    ],
)
def test_plain_state(ranks: RankPool, what: str, part: str, verdict: str, said: str) -> None:
    report = one_report(ranks.run(3, _spoiled, what))
    if part == "lr":
        assert [p.part for p in report.groups[0].parts if not p.ok] == ["lr"]
    else:
        assert part_of(report, WEIGHT, part).verdict == verdict
    assert report.kind == ("replicated" if verdict == "identical" else "diverged")
    assert said in report.headline
    # Buffers are told, and do not count.
    assert report.buffers[0].name == "seen" and not report.buffers[0].ok
    assert json.loads(report.to_json())["buffers"][0]["parts"][0]["verdict"] == "different"


def _wrapped_state(rank: Rank) -> AuditReport:
    torch.manual_seed(rank.rank)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return fusedshard.audit(optimizer, process_group=rank.group)


def test_other_optimizers_by_number(ranks: RankPool) -> None:
    """Weights of which nobody made sure that they are the same, without a model to name them."""
    report = one_report(ranks.run(2, _wrapped_state))
    assert report.kind == "diverged" and "the first: param of parameter 0:" in report.headline
    assert part_of(report, "parameter 0", "momentum_buffer").ok


def _misuse(rank: Rank, what: str) -> str:
    model = torch.nn.Linear(2, 3 if what == "shape" and rank.rank == 1 else 2)
    optimizer: Any = torch.optim.SGD(model.parameters())
    arguments: list[Any] = [optimizer, model]
    if what == "optimizer" and rank.rank == 1:
        arguments = [model, model]
    if what == "model" and rank.rank == 1:
        arguments = [optimizer, 3]
    if what == "frozen" and rank.rank == 1:
        model.bias.requires_grad_(False)
    if what == "group":
        ours = fusedshard.Adam(model.parameters(), process_group=rank.group)
        arguments, group = [ours], torch.distributed.group.WORLD
    else:
        group = rank.group
    with pytest.raises((TypeError, ValueError)) as caught:
        fusedshard.audit(*arguments, process_group=group)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("optimizer", "optimizer: got Linear, wanted a torch.optim.Optimizer"),
        ("model", "model: got int, wanted a torch.nn.Module or None"),
        ("shape", "number 0 is 'weight' of shape (3, 2) on rank 1 and 'weight' of shape (2, 2)"),
        ("frozen", "requires_grad is not the same on all"),
    ],
)
def test_every_rank_raises(ranks: RankPool, what: str, said: str) -> None:
    for text in ranks.run(2, _misuse, what):
        assert said in text


def test_without_torch_distributed() -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = fusedshard.Adam(model.parameters())
    report = fusedshard.audit(optimizer, model)
    assert (report.ok, report.kind, report.world_size) == (True, "single", 1)
    assert report.headline == "one rank: nothing to compare"


def test_fsdp1_is_refused() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    param._is_flat_param = True  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="FullyShardedDataParallel"):
        fusedshard.audit(torch.optim.SGD([param]))
