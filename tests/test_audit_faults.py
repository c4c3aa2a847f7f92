"""Faults that a vote of the ranks would not find, jobs that look odd and are sound, and state that
cannot be measured."""

from __future__ import annotations

from pathlib import Path

import audited
import pytest
import torch
from audited import param_of
from ranks import Rank, RankPool
from saved_jobs import audit, change, files_of
from test_audit import WEIGHT, one_report, part_of

import fusedshard
from fusedshard.auditing.report import AuditReport


def _loses(rank: Rank, job: str, what: str) -> AuditReport:
    """On the last rank alone."""
    model, optimizer = audited.trained(rank, getattr(audited, job))
    if rank.rank == rank.world_size - 1:
        for state in list(optimizer.state.values()):
            if what == "all":
                state.clear()
            else:
                del state[what]
    return fusedshard.audit(optimizer, model, process_group=rank.group)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("what", ["all", "exp_avg_sq"])
def test_a_rank_without_its_copies(ranks: RankPool, world_size: int, what: str) -> None:
    """All of them: no parameter is left to show what is usual."""
    report = one_report(ranks.run(world_size, _loses, "ddp", what))
    assert report.kind == "diverged"
    assert f"not on rank {world_size - 1}" in report.headline
    assert all(
        part_of(report, p.name, "exp_avg_sq").verdict == "missing" for p in report.parameters
    )


def _sole_owner(rank: Rank, what: str) -> AuditReport:
    """Two parameters, each of which one rank owns alone."""
    params = [torch.nn.Parameter(torch.ones(64)) for _ in range(2)]
    optimizer = fusedshard.Adam(params, process_group=rank.group)
    for param in params:
        param.grad = torch.full((64,), float(rank.rank))
    optimizer.step()
    for state in list(optimizer.state.values()):
        if what == "all":
            state.clear()
        else:
            state.pop(what)
    return fusedshard.audit(optimizer)


@pytest.mark.parametrize("what", ["all", "exp_avg"])
def test_state_that_no_rank_shows_any_more(ranks: RankPool, what: str) -> None:
    report = one_report(ranks.run(2, _sole_owner, what))
    assert report.kind == "misowned"
    for name in ("parameter 0", "parameter 1"):
        part = part_of(report, name, "exp_avg")
        assert (part.verdict, part.gap_elements, part.shares) == ("misowned", 64, ())


def _a_part_of_zero(rank: Rank) -> AuditReport:
    model, optimizer = audited.trained(rank, audited.zero)
    for state in optimizer.optim.state.values() if rank.rank == 1 else ():
        del state["exp_avg_sq"]
    return fusedshard.audit(optimizer, model, process_group=rank.group)


def test_a_part_of_all_that_a_rank_owns(ranks: RankPool) -> None:
    report = one_report(ranks.run(2, _a_part_of_zero))
    lost = [p.name for p in report.parameters if not part_of(report, p.name, "exp_avg_sq").ok]
    assert report.kind == "misowned" and 0 < len(lost) < len(report.parameters)


def _shown_steps(rank: Rank, what: str) -> AuditReport:
    model, optimizer = audited.trained(rank, audited.ours)
    state = optimizer.state[param_of(model, WEIGHT)]
    if rank.rank == 1 and what == "edited":
        state["step"] += 5
    elif rank.rank == 1:
        del state["step"]
    return fusedshard.audit(optimizer, model)


@pytest.mark.parametrize(
    ("what", "said"), [("edited", "8 here, 3 there"), ("gone", "not on rank 1")]
)
def test_step_counts_that_are_shown(ranks: RankPool, what: str, said: str) -> None:
    report = one_report(ranks.run(3, _shown_steps, what))
    assert report.kind == "diverged" and said in report.headline
    assert not part_of(report, WEIGHT, "step").ok


def _freezes(rank: Rank, mode: str) -> list[bool]:
    """On one rank, which has then no gradient of it: the others' counts on all."""
    model, optimizer = audited.ours(rank, mode=mode, audit_every=1, grad_sync="step")
    bias = param_of(model, "2.bias")
    audited.train(rank, model, optimizer, steps=1)
    bias.requires_grad_(rank.rank != 1)
    audited.train(rank, model, optimizer, steps=1)
    bias.requires_grad_()
    audited.train(rank, model, optimizer, steps=1)
    return [bool(state["step"] == 3) for state in optimizer.state.values()]


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_ranks_that_freeze_unlike_are_watched_alike(ranks: RankPool, mode: str) -> None:
    assert ranks.run(2, _freezes, mode) == [[True] * 6] * 2


def _meshes(rank: Rank) -> list[str]:
    """FSDP2 beside tensor parallelism; over all ranks, and over each kind of group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU())
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.full((2, 8), 1.0 + mesh.get_local_rank("dp"))).sum().backward()
    optimizer.step()
    groups = [None, mesh.get_group("dp"), mesh.get_group("tp")]
    found = [str(fusedshard.audit(optimizer, model, process_group=group)) for group in groups]
    if rank.rank == 3:
        del optimizer.state[model.get_parameter("0.weight")]
    return [*found, fusedshard.audit(optimizer, model).kind]


@audited.needs_fsdp_on_cpus
def test_meshes_of_two_dimensions(ranks: RankPool) -> None:
    once = "sharded, each element owned once"
    assert ranks.run(4, _meshes) == [[once, once, once, "misowned"]] * 4


def _two_models(rank: Rank) -> list[str]:
    torch.manual_seed(3)
    models = [torch.nn.Linear(3, 3) for _ in range(2)]
    groups = [{"params": list(model.named_parameters())} for model in models]
    optimizer = fusedshard.Adam(groups, process_group=rank.group)
    report = fusedshard.audit(optimizer, models[1])
    return [report.kind, *(parameter.name for parameter in report.parameters)]


def test_two_models_that_call_their_parameters_alike(ranks: RankPool) -> None:
    names = ["weight", "bias", "weight (2)", "bias (2)"]
    assert ranks.run(2, _two_models) == [["sharded", *names]] * 2


def _some_of_the_model(rank: Rank) -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = ZeroRedundancyOptimizer(
        model[0].parameters(), torch.optim.Adam, process_group=rank.group
    )
    for param in model.parameters():
        torch.nn.init.ones_(param)
        param.grad = torch.ones_like(param)
    optimizer.step()
    return str(fusedshard.audit(optimizer, model, process_group=rank.group))


def test_what_another_optimizer_has_is_not_lost(ranks: RankPool) -> None:
    assert ranks.run(2, _some_of_the_model) == ["sharded, each element owned once"] * 2


def _own_numbers(rank: Rank) -> str:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.LBFGS([param])

    def closure() -> float:
        param.grad = torch.full((3,), 0.1)
        return 1.0 + rank.rank  # a rank's own loss

    optimizer.step(closure)
    return str(fusedshard.audit(optimizer, process_group=rank.group))


def test_a_rank_s_own_numbers_are_not_compared(ranks: RankPool) -> None:
    assert ranks.run(2, _own_numbers) == ["replicated, identical"] * 2


def test_a_scalar_among_shards(ranks: RankPool) -> None:
    assert ranks.run(2, _scalar) == ["sharded"] * 2


def _scalar(rank: Rank) -> str:
    params = [torch.nn.Parameter(torch.ones(300)), torch.nn.Parameter(torch.ones(()))]
    return fusedshard.audit(fusedshard.Adam(params, process_group=rank.group)).kind


def _odd_state(rank: Rank) -> AuditReport:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param])
    values = torch.tensor([1 + 2j, 3 + 1j * rank.rank])
    bits = torch.tensor([1, 2 + rank.rank], dtype=torch.uint8)
    optimizer.state[param] = {"conjugate": values.conj(), "opaque": bits.view(torch.bits8)}
    return fusedshard.audit(optimizer, process_group=rank.group)


def test_views_and_dtypes_that_are_no_numbers(ranks: RankPool) -> None:
    report = one_report(ranks.run(2, _odd_state))
    [conjugate] = part_of(report, "parameter 0", "conjugate").differences
    assert (conjugate.first_index, conjugate.max_abs) == ((1,), 1.0)
    assert (complex(conjugate.here), complex(conjugate.there)) == (3 - 1j, 3)
    [opaque] = part_of(report, "parameter 0", "opaque").differences
    assert (opaque.elements, opaque.here, opaque.there) == (1, "bytes 03", "bytes 02")


def test_a_file_without_state(saved: Path) -> None:
    files = files_of(saved / "ddp")
    for kept in (files[:2], files):
        change(files[1], lambda content: content["optimizer"].update({"state": {}}))
        report = audit(*kept)
        assert report.kind == "diverged" and "not on rank1.pt" in report.headline
