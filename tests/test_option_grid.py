"""Random training scripts beside torch.optim: options, shapes, presence, edits, restarts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ranks import RankPool
from scripts import MAX_PARAMS, Clip, Edit, Group, Param, Script, Step, Trace, play, play_torch
from training import assert_same_bits

# torch advises against gradients in another memory order, which are here on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout")

MAX_RANKS = 3
UNITS = {torch.float32: 1e-6, torch.float64: 1e-12}
SHAPES = [(), (1,), (0,), (7,), (33,), (0, 3), (3, 5), (5, 1), (2, 3, 2, 2), (17, 9)]
VALUES: dict[str, list[Any]] = {
    "lr": [0.0, 1e-3, 0.1, 1.0],
    "betas": [(0.9, 0.999), (0.0, 0.9), (0.5, 0.75), (0.99, 0.5), (0.0, 0.0)],
    "eps": [1e-8, 1e-3, 1.0],
    "weight_decay": [0.0, 0.01, 0.5],
    "amsgrad": [False, True],
    "maximize": [False, True],
}
WAYS = ["none", "keep", "zeros", "new", "new", "strided", "backward", "backward"]

params = st.sampled_from(SHAPES).flatmap(
    lambda shape: st.builds(
        Param,
        st.just(shape),
        st.permutations(range(len(shape))).map(tuple),
        st.sampled_from([torch.float32, torch.float64]),
        st.sampled_from([True, True, True, False]),
    )
)
groups = st.builds(
    Group,
    st.lists(params, min_size=0, max_size=3).map(tuple),
    st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in VALUES.items()}),
    st.sets(st.sampled_from(["lr", "betas"])).map(lambda s: tuple(sorted(s))),
)
clips = st.builds(
    Clip,
    st.sampled_from([0.0, 0.1, 1.0, 1e6]),
    st.sampled_from([0.5, 1, 2.0, 3.5, math.inf]),
    st.one_of(st.just(()), st.lists(st.booleans(), min_size=1, max_size=4).map(tuple)),
)
edits = st.sampled_from(sorted(VALUES)).flatmap(
    lambda key: st.builds(
        Edit,
        st.integers(0, 3),
        st.just(key),
        st.sampled_from(VALUES[key]),
        st.booleans() if key in ("lr", "betas") else st.just(False),
    )
)


def rarely(strategy: st.SearchStrategy[Any], otherwise: Any) -> st.SearchStrategy[Any]:
    """What most steps do without."""
    return st.integers(0, 4).flatmap(lambda n: strategy if n == 4 else st.just(otherwise))


ways = st.lists(st.sampled_from(WAYS), min_size=MAX_PARAMS, max_size=MAX_PARAMS).map(tuple)
steps = st.builds(
    Step,
    grads=st.lists(ways, min_size=MAX_RANKS, max_size=MAX_RANKS).map(tuple),
    zero_grad=st.sampled_from([None, None, True, False]),
    edits=rarely(st.lists(edits, min_size=1, max_size=3).map(tuple), ()),
    toggled=rarely(st.lists(st.integers(0, 8), min_size=1, max_size=3).map(tuple), ()),
    added=rarely(groups, None),
    reload=rarely(st.sampled_from(["ours", "torch"]), ""),
    clip=st.one_of(st.none(), st.none(), clips),
    in_closure=st.booleans(),
    synchronize=rarely(st.just(True), False),
)


def tidy(script: Script) -> Script:
    """At most `MAX_PARAMS` parameters; what is clipped is there before step()."""
    room = MAX_PARAMS - sum(len(group.params) for group in script.groups)
    tidied = []
    for step in script.steps:
        if step.added is not None and len(step.added.params) > room:
            step = dataclasses.replace(step, added=None)
        room -= len(step.added.params) if step.added else 0
        tidied.append(dataclasses.replace(step, in_closure=step.in_closure and not step.clip))
    return dataclasses.replace(script, steps=tuple(tidied))


scripts = st.builds(
    Script,
    st.sampled_from(["Adam", "AdamW"]),
    st.lists(groups, min_size=1, max_size=3).map(tuple),
    st.lists(steps, min_size=1, max_size=8).map(tuple),
    st.sampled_from([None, None, 0.5]),
).map(tidy)
options = st.fixed_dictionaries(
    {"mode": st.sampled_from(["sharded", "replicated"])},
    optional={
        "reduction": st.sampled_from(["ordered", "backend"]),
        "bucket_cap_mb": st.sampled_from([1e-4, 25]),
        "grad_sync": st.sampled_from(["step", "external"]),
    },
)
deterministic = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


def check(
    ours: Trace, script: Script, world_size: int, *, leaves_means: bool, coarse: bool = False
) -> None:
    """Within `UNITS` of torch's answer in fp64, and 4 times torch's own error in fp32; ``coarse``:
    in units of fp32 whatever the dtype."""
    exact, peer = (
        play_torch(script, world_size, leaves_means=leaves_means, dtype=dtype)
        for dtype in (torch.float64, None)
    )

    def compare(what: str, got: Any, want: Any, near: Any, scale: float) -> None:
        assert got.shape == want.shape and got.dtype == near.dtype, what
        finite = near.isfinite()  # fp32 may overflow where fp64 does not
        assert torch.equal(got.isfinite(), finite), what
        if finite.any():
            got, want, near = got[finite], want[finite], near[finite]
            unit = UNITS[torch.float32 if coarse else got.dtype]
            bound = unit * max(scale, float(want.abs().max())) + 4 * (near - want).abs().max()
            error = (got - want).abs().max()
            assert error <= bound, f"{what}: differs by {error:.3g}, wanted at most {bound:.3g}"

    assert ours.lrs == exact.lrs
    for got, want, near in zip(ours.norms, exact.norms, peer.norms, strict=True):
        compare("norm", got.float(), want.double(), near.float(), 0.01)
    for step, triples in enumerate(zip(ours.params, exact.params, peer.params, strict=True)):
        for index, (got, want, near) in enumerate(zip(*triples, strict=True)):
            compare(f"parameter {index} after step {step}", got, want, near, 1.0)
    assert ours.state.keys() == exact.state.keys()
    for index, state in exact.state.items():
        assert ours.state[index]["step"] == state["step"], f"step of parameter {index}"
        for name in state.keys() - {"step"}:
            # A maximum of nothing may be missing where amsgrad is off again.
            nothing = torch.zeros_like(ours.state[index]["exp_avg"])
            got, near = ours.state[index].get(name, nothing), peer.state[index][name]
            compare(f"{name} of parameter {index}", got, state[name], near, 0.01)


@settings(deterministic, max_examples=150)
@given(scripts)
def test_one_rank(script: Script) -> None:
    check(play(None, script, False, {}), script, 1, leaves_means=True)


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_ranks(ranks: RankPool, world_size: int) -> None:
    @settings(deterministic, max_examples=30)
    @given(scripts, options)
    def run(script: Script, chosen: dict[str, Any]) -> None:
        check_ranks(ranks, world_size, script, chosen)

    run()


def check_ranks(ranks: RankPool, world_size: int, script: Script, chosen: dict[str, Any]) -> None:
    if chosen["mode"] == "replicated":  # whose backward is collective, and ranks here run some only
        chosen = {"grad_sync": "step", **chosen}
    external = chosen.get("grad_sync") == "external"
    traces = ranks.run(world_size, play, script, external, chosen)
    check(
        traces[0],
        script,
        1 if external else world_size,
        leaves_means=external or chosen["mode"] == "replicated",
        # The backend adds in an order of its own, so norms of fp32 gradients are other numbers.
        coarse=chosen.get("reduction") == "backend" and any(step.clip for step in script.steps),
    )
    for trace in traces[1:]:
        assert_same_bits(dataclasses.asdict(trace), dataclasses.asdict(traces[0]))
