"""Checkpoints that go anywhere: every job in `interchange` takes what every other saved, by every
route that both know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from audited import needs_fsdp_on_cpus
from interchange import (
    Donated,
    Fsdp2,
    InDdp,
    Job,
    Ours,
    Replicated,
    Whole,
    Zero,
    assert_close,
    assert_same,
    donate,
    take,
)
from mixed import BF16, CODED, FP16, FP32
from mixed_oracle import CODES, to_bf16
from ranks import RankPool
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from training import KINDS, assert_same_bits

JOBS: dict[str, tuple[type[Job], int]] = {
    "ours on 1": (Ours, 1),
    "ours on 2": (Ours, 2),
    "ours on 3": (Ours, 3),
    "ours on 4": (Ours, 4),
    "replicated on 2": (Replicated, 2),
    "torch": (Job, 1),
    "DDP on 2": (InDdp, 2),
    "FSDP2 on 3": (Fsdp2, 3),
    "ZeroRedundancyOptimizer on 2": (Zero, 2),
}


# Before torch 2.8 its groups have no "decoupled_weight_decay", which ours have.
TORCH_SAYS_DECOUPLED = "decoupled_weight_decay" in torch.optim.Adam([torch.zeros(1)]).defaults


def is_ours(name: str) -> bool:
    return issubclass(JOBS[name][0], Ours)


def pairs() -> list[Any]:
    found = [(a, b) for a in JOBS for b in JOBS if is_ours(a) or is_ours(b)]
    return [
        pytest.param(
            *pair, marks=needs_fsdp_on_cpus if "FSDP2 on 3" in pair else (), id=" to ".join(pair)
        )
        for pair in found
    ]


class Donations:
    """What every job saved, once for each kind and format."""

    def __init__(self, ranks: RankPool, scratch: Path) -> None:
        self._ranks, self._scratch = ranks, scratch
        self._known: dict[tuple[str, ...], tuple[Path, Donated]] = {}

    def of(self, name: str, kind: str, *more: Any) -> tuple[Path, Donated]:
        """By further arguments of `donate`."""
        key = (name, kind, repr(more))
        if key not in self._known:
            folder = self._scratch / str(len(self._known))
            folder.mkdir()
            job, size = JOBS[name]
            first, *_ = self._ranks.run(size, donate, job, kind, folder, *more)
            if job is not Zero:
                dcp_to_torch_save(folder / "folder", folder / "converted.pt")
            self._known[key] = (folder, first)
        return self._known[key]


@pytest.fixture(scope="module")
def donations(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Donations:
    return Donations(ranks, tmp_path_factory.mktemp("donations"))


@pytest.mark.parametrize(("donor", "taker"), pairs())
def test_interchange(ranks: RankPool, donations: Donations, donor: str, taker: str) -> None:
    """What is loaded is what was saved, to the bit, and the next step is the donor's: among ours
    to the bit."""
    numbers = [list(JOBS).index(name) for name in (donor, taker)]
    kind = KINDS[sum(numbers) % 2]
    folder, (saved, later) = donations.of(donor, kind)
    job, size = JOBS[taker]
    routes = ["file.pt"]
    if Zero not in (job, JOBS[donor][0]):  # which knows numbers alone, not names
        lacks_a_key = is_ours(taker) and not is_ours(donor) and not TORCH_SAYS_DECOUPLED
        partial = ", partial" if lacks_a_key else ""
        routes.append(f"folder{partial}")
        # Each kind of job gives and takes by either of these.
        routes.append(f"flat{partial}" if numbers[0] // 2 % 2 == numbers[1] % 2 else "converted.pt")
    same_step = assert_same if is_ours(donor) and is_ours(taker) else assert_close
    results = ranks.run(size, take, job, kind, folder, routes)
    for result in results if job is not Zero else results[:1]:
        for route, (loaded, step_later) in result.items():
            assert_same(loaded, saved, route)
            same_step(step_later, later, f"{route}, a step later")


FORMATS: dict[str, dict[str, Any]] = {
    "bf16 with remainders": {"dtype": BF16},
    "bf16 and bf16 moments": {"dtype": BF16, "state_dtype": BF16, "master_weights": True},
    "bf16 and 8-bit moments": {"dtype": BF16, "state_dtype": CODED},
    "fp16 and bf16 moments": {"dtype": FP16, "state_dtype": BF16},
    "fp32 and 8-bit moments": {"dtype": FP32, "state_dtype": CODED},
}


def flattened_dicts_may_lack_keys() -> bool:
    """Whether torch, when it takes a flattened dict apart, bears with keys of ``optimizer.state``
    that are not in it, as the exponents of 8-bit moments."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    optimizer.state[model.bias]["more"] = torch.zeros(1)
    try:
        set_optimizer_state_dict(model, optimizer, flat, options=options)
    except KeyError:
        return False
    return True


@pytest.mark.parametrize("name", FORMATS)
def test_low_precision_among_ours(ranks: RankPool, donations: Donations, name: str) -> None:
    """Masters and moments to the bit, and the next step, on any number of ranks."""
    options = FORMATS[name]
    folder, (saved, later) = donations.of("ours on 3", "AdamW", options)
    assert ("master_weights" in saved.state["wide"]) == (options["dtype"] != FP32)
    for taker in ("ours on 1", "ours on 2", "ours on 4", "replicated on 2"):
        job, size = JOBS[taker]
        routes = ["folder", "file.pt", "converted.pt"]
        if options.get("state_dtype") != CODED or flattened_dicts_may_lack_keys():
            routes.append("flat")
        for result in ranks.run(size, take, job, "AdamW", folder, routes, options):
            for route, (loaded, step_later) in result.items():
                what = f"{route} by {taker}"
                assert_same(loaded, saved, what)
                assert_same(step_later, later, f"{what}, a step later")


@pytest.mark.parametrize("name", FORMATS)
def test_fp32_state_into_low_precision_and_back(
    ranks: RankPool, donations: Donations, tmp_path: Path, name: str
) -> None:
    """Moments are rounded to the nearest once: what was loaded, saved, and loaded again, also by
    way of torch, is the same. Parameters are their own masters."""
    options = FORMATS[name]
    folder, (saved, _) = donations.of("torch", "AdamW")
    expected = rounded(saved, options)
    # What ours has beside torch's state is in no checkpoint of torch's.
    routes = ["file.pt", "converted.pt", "folder, partial"]
    for result in ranks.run(3, take, Ours, "AdamW", folder, routes, options, tmp_path):
        for route, (loaded, _) in result.items():
            assert_same(loaded, expected, route)
    [(by_torch, _)] = ranks.run(1, take, Job, "AdamW", tmp_path, ["file.pt"], {}, tmp_path)[
        0
    ].values()
    assert_same_bits(by_torch.state, expected.state)
    for result in ranks.run(2, take, Ours, "AdamW", tmp_path, ["file.pt"], options):
        assert_same(result["file.pt"][0], expected, "back")


def rounded(whole: Whole, options: dict[str, Any]) -> Whole:
    """What is left of a job in fp32."""
    params = {name: value.to(options["dtype"]) for name, value in whole.params.items()}
    state = {}
    for name, values in whole.state.items():
        state[name] = {
            part: value if part == "step" else _rounded(part, value, options.get("state_dtype"))
            for part, value in values.items()
        }
        if options["dtype"] != FP32 and params[name].numel():
            state[name]["master_weights"] = params[name].float()
    return Whole(params, state, whole.groups)


def _rounded(part: str, value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype == BF16:
        return to_bf16(value, None).float()
    if dtype != CODED or value.numel() < 4096:
        return value
    assert value.is_contiguous()  # blocks are stretches of memory
    code = CODES[["exp_avg", "exp_avg_sq", "max_exp_avg_sq"].index(part)]
    numbers = value.flatten()
    exponents = code.exponents(numbers)
    return code.decode(code.encode(numbers, exponents, None), exponents).view(value.shape)
