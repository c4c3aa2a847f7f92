"""What users do to an optimizer behind its back: an error on every rank, and nothing changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Rank, RankPool
from torch.testing._internal.two_tensor import TwoTensor
from training import assert_same_bits, make_params

import fusedshard

Edit = Callable[[fusedshard.AdamW, list[torch.nn.Parameter]], None]


def _slice(optimizer: fusedshard.AdamW, params: list[torch.nn.Parameter]) -> None:
    params[1].data = params[1].data[:3]  # the address stays


def _resize_gradient(optimizer: fusedshard.AdamW, params: list[torch.nn.Parameter]) -> None:
    assert params[1].grad is not None
    params[1].grad.resize_(2)


def _wrap_gradient(optimizer: fusedshard.AdamW, params: list[torch.nn.Parameter]) -> None:
    params[1].grad = TwoTensor(torch.ones(5), torch.ones(5))


def _cast_frozen(optimizer: fusedshard.AdamW, params: list[torch.nn.Parameter]) -> None:
    params[2].data = params[2].data.double()


def _remove_group(optimizer: fusedshard.AdamW, params: list[torch.nn.Parameter]) -> None:
    del optimizer.param_groups[1]


def _append_parameter(optimizer: fusedshard.AdamW, params: list[torch.nn.Parameter]) -> None:
    optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(2)))


def _swap_groups(optimizer: fusedshard.AdamW, params: list[torch.nn.Parameter]) -> None:
    optimizer.param_groups.reverse()


def _bad_betas(optimizer: fusedshard.AdamW, params: list[torch.nn.Parameter]) -> None:
    optimizer.param_groups[0]["betas"] = None


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (_slice, "parameter 1: cast or reshaped"),
        (_resize_gradient, "parameter 1: got a gradient of shape (2,)"),
        (_wrap_gradient, "parameter 1: got a gradient of type TwoTensor"),
        (_cast_frozen, "parameter 2: cast or reshaped"),
        (_remove_group, "param_groups: groups or parameters were"),
        (_append_parameter, "param_groups: groups or parameters were"),
        (_swap_groups, "param_groups: groups or parameters were"),
        (_bad_betas, "NoneType"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_edit_on_one_rank_raises_on_all(
    ranks: RankPool, mode: str, edit: Edit, named: str
) -> None:
    for text, before, after in ranks.run(2, _edit, mode, edit):
        assert named in text
        assert_same_bits(before, after)


def _edit(rank: Rank, mode: str, edit: Edit) -> Any:
    params = make_params([(17, 257), (5,), (4,)])
    params[2].requires_grad_(False)
    groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "lr": 0.0}]
    optimizer = fusedshard.AdamW(groups, mode=mode, process_group=rank.group)
    for param in params[:2]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    if rank.rank == 1:
        edit(optimizer, params)

    def snapshot() -> Any:
        steps = optimizer._built.steps.clone()
        moment = optimizer.state[params[0]]["exp_avg"].clone()
        return [p.detach().clone() for p in params], steps, moment

    before = snapshot()
    with pytest.raises((RuntimeError, TypeError)) as caught:
        optimizer.step()
    return str(caught.value), before, snapshot()


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_external_gradients_on_some_ranks_only(ranks: RankPool, mode: str) -> None:
    for text in ranks.run(2, _partial_external, mode):
        assert text.startswith("parameter 1: got a gradient on some ranks only")


def _partial_external(rank: Rank, mode: str) -> str:
    params = make_params([(17, 257), (5,)])
    options: dict[str, Any] = {"grad_sync": "external", "mode": mode, "process_group": rank.group}
    optimizer = fusedshard.AdamW(params, **options)
    params[0].grad = torch.ones(17, 257)
    params[1].grad = torch.ones(5) if rank.rank == 1 else None
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


def _other_steps(state: dict[str, Any]) -> None:
    state["state"][0]["step"] += 5


def _entry_missing(state: dict[str, Any]) -> None:
    del state["state"][1]


def _not_a_tensor(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg"] = 3


def _step_is_nan(state: dict[str, Any]) -> None:
    state["state"][0]["step"] = torch.tensor(torch.nan)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_other_steps, "the ranks bring different ones"),
        (_entry_missing, "the ranks bring different ones"),
        (_not_a_tensor, "parameter 0: exp_avg is a int"),
        (_step_is_nan, "parameter 0: step is nan"),
    ],
)
def test_state_dicts_that_differ_between_ranks(ranks: RankPool, spoil: Any, named: str) -> None:
    for text, before, after in ranks.run(2, _load, spoil):
        assert named in text
        assert_same_bits(before, after)


def _load(rank: Rank, spoil: Any) -> Any:
    params = make_params([(17, 257), (5,)])
    optimizer = fusedshard.AdamW(params, process_group=rank.group)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before, other = optimizer.full_state_dict(), optimizer.full_state_dict()
    other["param_groups"][0]["lr"] = 7.0
    if rank.rank == 1:
        spoil(other)
    with pytest.raises(ValueError) as caught:
        optimizer.load_state_dict(other)
    return str(caught.value), before, optimizer.full_state_dict()


def test_a_state_dict_without_amsgrad_turns_it_off() -> None:
    plain = fusedshard.AdamW(make_params([(5,)]))
    plain.param_groups[0]["params"][0].grad = torch.ones(5)
    plain.step()
    optimizer = fusedshard.AdamW(make_params([(5,)]), amsgrad=True)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["amsgrad"] is False
    assert_same_bits(optimizer.state_dict(), plain.state_dict())


def test_load_hooks_run_before_the_check() -> None:
    donor, optimizer = (fusedshard.AdamW(make_params([(5,)])) for _ in range(2))
    donor.param_groups[0]["params"][0].grad = torch.ones(5)
    donor.step()

    def unwrap(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        inner: dict[str, Any] = state_dict["optimizer"]
        return inner

    hook = optimizer.register_load_state_dict_pre_hook(unwrap)
    optimizer.load_state_dict({"optimizer": donor.state_dict()})
    assert_same_bits(optimizer.state_dict(), donor.state_dict())
    hook.remove()
    optimizer.load_state_dict(donor.state_dict())  # and the check itself is gone again
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 0


def test_parameters_that_share_memory_are_refused() -> None:
    base = torch.randn(12)
    a, b = torch.nn.Parameter(base), torch.nn.Parameter(base.view(3, 4))
    with pytest.raises(ValueError, match=r"parameter 1: shares memory with parameter 0"):
        fusedshard.AdamW([a, b])
    parts = [torch.nn.Parameter(part) for part in base.split(6)]  # beside each other is fine
    fusedshard.AdamW(parts)


def test_a_frozen_parameter_that_shares_memory_is_refused() -> None:
    base = torch.zeros(6)
    moving = torch.nn.Parameter(base[:4])
    frozen = torch.nn.Parameter(base[2:], requires_grad=False)
    with pytest.raises(ValueError, match=r"parameter 1: shares memory with parameter 0"):
        fusedshard.AdamW([moving, frozen])


def test_frozen_parameters_that_share_memory_cannot_thaw() -> None:
    base = torch.zeros(6)
    params = [torch.nn.Parameter(base.view(-1), requires_grad=False) for _ in range(2)]
    optimizer = fusedshard.AdamW([*make_params([(3,)]), *params])
    params[1].requires_grad_(True)
    params[1].grad = torch.ones(6)
    with pytest.raises(ValueError, match=r"shares memory with parameter"):
        optimizer.step()


def test_a_late_view_of_a_known_parameter_is_refused() -> None:
    (known,) = make_params([(6,)])
    optimizer = fusedshard.AdamW([known])
    with pytest.raises(ValueError, match=r"shares memory with parameter"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(known.data[:2])]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_two_parameters_with_one_gradient_tensor(ranks: RankPool, mode: str) -> None:
    """On one rank; the means are of each parameter's own all the same."""
    for first, second in ranks.run(2, _one_gradient_for_two, mode):
        assert first == pytest.approx([0.15] * 3) and second == pytest.approx([0.45] * 3)


def _one_gradient_for_two(rank: Rank, mode: str) -> list[list[float]]:
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = fusedshard.Adam(params, mode=mode, process_group=rank.group)
    if rank.rank == 0:
        params[0].grad = params[1].grad = torch.ones(3)
    else:
        params[0].grad, params[1].grad = torch.full((3,), 2.0), torch.full((3,), 8.0)
    optimizer.step()
    state = optimizer.full_state_dict()["state"]
    return [state[i]["exp_avg"].tolist() for i in range(2)]


def test_gradients_of_efficient_zeros_are_zeros() -> None:
    (param,), (plain,) = make_params([(3,)]), make_params([(3,)])
    param.grad, plain.grad = torch._efficientzerotensor(3), torch.zeros(3)
    for p in (param, plain):
        fusedshard.AdamW([p], weight_decay=0.5).step()
    assert torch.equal(param, plain)


def test_inference_mode_around_it_does_no_harm() -> None:
    """What is made inside must be of use outside."""
    (param,) = make_params([(3,)])
    with torch.inference_mode():
        optimizer = fusedshard.AdamW([param], amsgrad=True)
        param.grad = torch.ones(3)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    param.grad = None
    (2 * param).sum().backward()
    assert param.grad is not None and param.grad.tolist() == [2.0] * 3
    optimizer.step()
    assert optimizer.state[param]["step"] == 2


@pytest.mark.parametrize("how", ["no dict", "hook"])
def test_a_load_that_fails_on_one_rank_raises_on_all(ranks: RankPool, how: str) -> None:
    for rank, (text, same) in enumerate(ranks.run(3, _load_fails, how)):
        assert same
        assert ("on rank 1: " in text) == (rank != 1)


def _load_fails(rank: Rank, how: str) -> tuple[str, bool]:
    (param,) = make_params([(6,)])
    optimizer = fusedshard.AdamW([param], process_group=rank.group)
    param.grad = torch.ones(6)
    optimizer.step()
    state: Any = optimizer.full_state_dict()
    if rank.rank == 1 and how == "no dict":
        state = None
    if rank.rank == 1 and how == "hook":

        def refuse(*_: Any) -> None:
            raise LookupError("not mine")

        optimizer.register_load_state_dict_pre_hook(refuse)
    before = optimizer.state[param]["exp_avg"].clone()
    with pytest.raises((RuntimeError, AttributeError, LookupError)) as error:
        optimizer.load_state_dict(state)
    return str(error.value), torch.equal(optimizer.state[param]["exp_avg"], before)


def test_hyperparameters_in_tensors_are_compared_as_numbers(ranks: RankPool) -> None:
    """Their text would name a device and round to four digits."""
    for text in ranks.run(2, _close_betas):
        assert "0.9000001" in text and "rank 1 has" in text


def _close_betas(rank: Rank) -> str:
    beta = torch.tensor(0.9 + 1e-7 * rank.rank, dtype=torch.float64)
    alike = (torch.tensor(0.9, dtype=torch.float64), torch.tensor(0.99, dtype=torch.float64))
    fusedshard.Adam(make_params([(3,)]), betas=alike, process_group=rank.group)
    with pytest.raises(ValueError) as error:
        fusedshard.Adam(make_params([(3,)]), betas=(beta, alike[1]), process_group=rank.group)
    return str(error.value)


def test_a_users_own_state_does_not_stop_a_load() -> None:
    (param,) = make_params([(3,)])
    optimizer = fusedshard.AdamW([param])
    param.grad = torch.ones(3)
    optimizer.step()
    optimizer.state["global"] = 3  # type: ignore[index]
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[param]["step"] == 1


def test_wrapper_subclasses_are_refused() -> None:
    param = torch.nn.Parameter(TwoTensor(torch.ones(5), torch.ones(5)))
    with pytest.raises(TypeError, match=r"parameter 0: got a .* without memory of its own"):
        fusedshard.AdamW([param])


def test_dtensor_parameters_are_refused(ranks: RankPool) -> None:
    for text in ranks.run(2, _fsdp2):
        assert "without memory of its own (DTensor" in text


def _fsdp2(rank: Rank) -> str:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=DeviceMesh.from_group(rank.group, "cpu"))
    with pytest.raises(TypeError) as caught:
        fusedshard.AdamW(model.parameters(), process_group=rank.group)
    return str(caught.value)


def test_empty_parameters_of_any_strides() -> None:
    param = torch.nn.Parameter(torch.randn(3, 0).t())
    optimizer = fusedshard.AdamW([param])
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert optimizer.state[param]["step"] == 1


def test_a_default_device_changes_nothing() -> None:
    params = make_params([(5,)])
    with torch.device("meta"):
        optimizer = fusedshard.AdamW(params, lr=1.0, eps=1.0, weight_decay=0.0)
    expected = params[0].detach() - 0.5
    params[0].grad = torch.ones(5)
    with torch.device("meta"):
        optimizer.step()
    torch.testing.assert_close(params[0].detach(), expected)


_LATE_GROUP = """
import os, torch, torch.distributed as dist, fusedshard
param = torch.nn.Parameter(torch.ones(3))
optimizer = fusedshard.AdamW([param])
dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}",
                        rank=int(os.environ["RANK"]), world_size=2)
param.grad = torch.ones(3)
try:
    optimizer.step()
except RuntimeError as error:
    assert "before init_process_group" in str(error) and param.sum() == 3
    print("refused")
"""


def test_built_before_the_process_group(tmp_path: Any) -> None:
    environment = {**os.environ, "STORE": str(tmp_path / "store")}
    command = [sys.executable, "-c", _LATE_GROUP]
    ranks = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(r)}, stdout=subprocess.PIPE, text=True
        )
        for r in range(2)
    ]
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["refused\n"] * 2
