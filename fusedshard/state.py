"""The visible state of an optimizer over an engine's arrays: ``optimizer.state``, state dicts, and
copies of the whole."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fusedshard import checkpoint, state_checks
from fusedshard.auditing.watch import Watch
from fusedshard.comm import Communicator, describe_error, raise_shared
from fusedshard.engine import Engine
from fusedshard.options import ParallelOptions, check_groups
from fusedshard.stats import Stats

# What the engine has of a parameter's state.
ARRAYS = ("step", *checkpoint.MOMENTS, *checkpoint.EXPONENTS, checkpoint.MASTERS)


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose state lies in an `Engine`."""

    _engine: Engine | None

    def _begin(self, options: ParallelOptions) -> None:
        """What an optimizer has beside torch's attributes, before there is an engine."""
        self.stats = Stats()
        self._options = options
        self._engine = None
        self._watch = Watch(options.audit_every)
        self._scaler_agrees = self._warned_of_scaler = False
        self._loading: dict[str, Any] | None = None  # the state dict, until it is loaded
        self._agreed = False  # whether the ranks have told each other what they load
        self._consolidated: dict[str, Any] | None = None

    @property
    def _built(self) -> Engine:
        assert self._engine is not None, "the constructor did not finish"
        return self._engine

    def _show_state(self, indices: Iterable[int], *, renew: bool = False) -> None:
        """Make the engine's arrays visible in ``self.state``: those that are not, or all."""
        params = self._built.params
        amsgrad = {p for group in self.param_groups if group["amsgrad"] for p in group["params"]}

        def lacks(param: torch.Tensor) -> bool:
            state = self.state.get(param, {})
            return "step" not in state or (param in amsgrad and "max_exp_avg_sq" not in state)

        shown = {index for index in indices if renew or lacks(params[index])}
        if not shown:
            return
        for index, arrays in self._built.visible_state(shown).items():
            state = self.state[params[index]]  # beside what the user keeps there
            if params[index] not in amsgrad and "max_exp_avg_sq" not in state:
                arrays.pop("max_exp_avg_sq", None)
                arrays.pop("max_exp_avg_sq_exponents", None)
            state.update(arrays)

    def _show_saved(self, saved: Mapping[Any, Any]) -> None:
        """Replace ``self.state``: by the engine's arrays for the parameters that ``saved`` has
        state of, and by whatever else it holds."""
        numbers: dict[Any, int] = {param: i for i, param in enumerate(self._built.params)}
        self.state.clear()
        self.state.update(
            (key, state) for key, state in saved.items() if state or key not in numbers
        )
        self._show_state([numbers[key] for key in self.state if key in numbers], renew=True)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, without communication, so that any rank may call it by itself.

        In replicated mode and at world size 1 it holds plain tensors; where moments are not fp32
        (fp64), or there are master weights, these are copies, as `full_state_dict` makes them. In
        sharded mode moments and master weights are `ShardedState` tensors, which
        torch.distributed.checkpoint saves and loads, and nothing else does: to save one file call
        `full_state_dict` on every rank. After `consolidate_state_dict`, until the state changes,
        it is the full one on the rank that has it.

        Plain tensors are the optimizer's own memory, as torch's are: torch.distributed.checkpoint
        loads into them, and leaves them half loaded where it fails.
        """
        if self._consolidated is not None:
            return checkpoint.with_groups(self._consolidated, self.param_groups)
        if self._built.holds_shards:
            shards = self._built.sharded_state()
            return self._packed(lambda packed: checkpoint.show_shards(packed, shards))
        return super().state_dict() if self._built.is_plain else self._packed_full()

    def full_state_dict(self, rank0_only: bool = False, cpu: bool = True) -> dict[str, Any]:
        """The whole state as plain tensors in torch.optim.Adam's format: fp32 for bf16 and fp16
        parameters, too, whatever ``state_dtype``; with ``"master_weights"``, fp32, beside the
        moments of each parameter that has any.

        Collective over the process group. The tensors are copies: 8 bytes a parameter (12 with
        master weights). Beside them it takes at most one parameter; a bucket where this rank keeps
        none of them, or keeps them on another device.

        Args:
            rank0_only: only the group's first rank keeps the state; the others return ``{}``.
            cpu: whether the copies are in host memory, or where the parameters are.
        """
        keep = not rank0_only or self._built.comm.rank == 0
        return self._packed_full(keep=keep, cpu=cpu)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Make the next `state_dict` on one rank the full one, by the name that
        ZeroRedundancyOptimizer has for it. Collective over the process group.

        It is kept there until the state changes: by `step`, `load_state_dict`, or
        `add_param_group`. Where this rank has all of the state, there is nothing to do.

        Args:
            to: the rank, counted in the process group.

        Raises:
            ValueError: on every rank, there is no such rank, or the ranks name different ones.
        """
        comm, error = self._built.comm, None
        if not (isinstance(to, int) and 0 <= to < comm.world_size):
            error = ValueError(f"to: got {to!r}, wanted a rank from 0 to {comm.world_size - 1}")
        answers = comm.gather_objects((describe_error(error), repr(to)))
        raise_shared(error, [failure for failure, _ in answers])
        named = sorted({name for _, name in answers})
        if len(named) > 1:
            raise ValueError(f"to: the ranks name different ones: {', '.join(named)}")
        if self._built.holds_shards:
            self._consolidated = None
            self._consolidated = self._packed_full(keep=comm.rank == to) or None

    def _packed_full(self, *, keep: bool = True, cpu: bool = True) -> dict[str, Any]:
        full = self._built.full_state(keep=keep, cpu=cpu)
        return self._packed(lambda packed: checkpoint.fill_in(packed, full)) if keep else {}

    def _packed(self, fill: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """What torch packs, and then ``fill`` completes."""

        def complete(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> None:
            fill(packed)

        # The first hook after torch has packed it: the user's own see the whole state.
        handle = self.register_state_dict_post_hook(complete, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `full_state_dict` or torch.optim.Adam(W)'s ``state_dict`` gave, at any world
        size: every rank brings the same dict. Or this optimizer's own `state_dict`, into which
        torch.distributed.checkpoint has loaded. Collective; the dict is not changed and not kept.

        Parameters without an entry start afresh at their first gradient.

        Raises:
            ValueError: on every rank, with nothing changed, where a dict does not fit (the group
                or the parameter is named, with both shapes), or the ranks bring dicts that differ
                in their groups, steps, or in which parameters have state.
        """

        def check(optimizer: torch.optim.Optimizer, mended: dict[str, Any]) -> dict[str, Any]:
            state_checks.check_fits(mended, self.param_groups, self._built.owned_ranges())
            self._loading = mended
            return checkpoint.without_arrays(mended)

        self._agreed = False
        # Registered now, it runs after all hooks of the user's, which may mend the dict.
        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        except Exception as error:
            if not self._agreed:  # the other ranks wait in __setstate__
                self._agree_on_state_dict("", error)
            raise
        finally:
            self._loading = None
            handle.remove()

    def _agree_on_state_dict(self, content: str, error: Exception | None = None) -> None:
        """Raise on every rank if a rank's dict does not fit, or the ranks bring different ones."""
        self._agreed = True
        answers = self._built.comm.gather_objects((describe_error(error), content))
        raise_shared(error, [failure for failure, _ in answers])
        if len({content for _, content in answers}) > 1:
            raise ValueError("state_dict: the ranks bring different ones")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what torch's ``load_state_dict`` has put together, or what was pickled."""
        if "options" in state:
            self._unpickle(state)
            return
        if self._loading is not None:  # torch has nothing left to refuse
            self._agree_on_state_dict(state_checks.describe_content(self._loading))
        self.param_groups = state["param_groups"]
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            if self.defaults["decoupled_weight_decay"]:
                group["decoupled_weight_decay"] = True
        saved = state["state"]
        keys: Iterable[Any] = self._built.params
        if self._loading is not None:
            saved = self._loading["state"]
            keys = [key for group in self._loading["param_groups"] for key in group["params"]]
        self._load(self._built, {index: saved.get(key) for index, key in enumerate(keys)})
        self._show_saved(state["state"])

    def _load(self, engine: Engine, state: Mapping[int, Any]) -> None:
        loaded = {index: values for index, values in state.items() if values}
        self._consolidated = None
        with torch.inference_mode(False):
            engine.load(loaded)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, on one rank: what torch pickles, and the options without process group.

        Raises:
            TypeError: this rank is one of several.
        """
        if self._built.comm.world_size > 1:
            raise TypeError(
                f"{type(self).__name__} of several ranks cannot be pickled: save full_state_dict() "
                "and load it into a new optimizer"
            )
        options = replace(self._options, process_group=None)
        pickled = {**super().__getstate__(), "options": options}
        if self._built.is_plain:
            return pickled
        full = self._built.full_state()
        numbers: dict[Any, int] = {p: index for index, p in enumerate(self._built.params)}
        pickled["state"] = {
            key: checkpoint.filled(state, full.get(numbers.get(key, -1), {}))
            for key, state in self.state.items()
        }
        return pickled

    def _unpickle(self, pickled: dict[str, Any]) -> None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                f"{type(self).__name__}: was pickled on one rank and cannot be unpickled on one of "
                "several: load its state_dict() into a new optimizer"
            )
        self._begin_copy(pickled["defaults"], pickled["param_groups"], pickled["options"])
        check_groups(self.param_groups)
        engine = Engine(Communicator(None, self.stats), self._options)
        with torch.inference_mode(False):
            engine.admit(self.param_groups)
        state = {i: pickled["state"].get(param) for i, param in enumerate(engine.params)}
        self._load(engine, state)
        self._engine = engine
        self._show_saved(pickled["state"])

    def _begin_copy(self, defaults: Any, groups: Any, options: ParallelOptions) -> None:
        """In place of the constructor."""
        state: defaultdict[Any, Any] = defaultdict(dict)
        super().__setstate__({"defaults": defaults, "state": state, "param_groups": groups})
        self._begin(options)

    @torch.inference_mode(False)
    @torch.no_grad()
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """An optimizer of the copied parameters, which goes on from here: of the copied model's in
        ``copy.deepcopy((model, optimizer))``.

        It has the same process group, and its steps are collective, too; copying sends nothing.
        As with torch's, hooks and gradients stay behind.
        """
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        groups = copy.deepcopy(self.param_groups, memo)
        twin._begin_copy(copy.deepcopy(self.defaults, memo), groups, self._options)
        engine = Engine(self._built.comm.for_copy(twin.stats), self._options)
        engine.admit_copies(groups, self._built)
        twin._engine = engine
        numbers = dict.fromkeys(self._built.params)
        beside = {
            key: {name: None if name in ARRAYS else value for name, value in state.items()}
            if key in numbers
            else state
            for key, state in self.state.items()
        }
        twin._show_saved(copy.deepcopy(beside, memo))
        return twin

    def __copy__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: two cannot share their parameters' memory: use copy.deepcopy"
        )
