"""The visible state of an optimizer over an engine's arrays: ``optimizer.state``, state dicts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from fusedshard import checkpoint
from fusedshard.comm import describe_error, raise_shared
from fusedshard.engine import Engine


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose state lies in an `Engine`."""

    _engine: Engine | None

    @property
    def _built(self) -> Engine:
        assert self._engine is not None, "the constructor did not finish"
        return self._engine

    def _show_state(self, indices: Iterable[int], *, renew: bool = False) -> None:
        """Make the engine's arrays visible in ``self.state``: those that are not, or all."""
        params = self._built.params
        amsgrad = {p for group in self.param_groups if group["amsgrad"] for p in group["params"]}
        shown = {
            index
            for index in indices
            if renew
            or params[index] not in self.state
            or (params[index] in amsgrad and "max_exp_avg_sq" not in self.state[params[index]])
        }
        if not shown:
            return
        for index, state in self._built.visible_state(shown).items():
            if params[index] not in amsgrad:
                state.pop("max_exp_avg_sq", None)
            self.state[params[index]] = state

    def state_dict(self) -> dict[str, Any]:
        """As torch's, without communication, where this rank has all of the state: in replicated
        mode and at world size 1.

        Raises:
            RuntimeError: in sharded mode, where this rank has only a part of it.
        """
        if self._built.holds_shards:
            raise RuntimeError(
                "state_dict: this rank holds only its shard of the state: call full_state_dict() "
                "on every rank"
            )
        return super().state_dict()

    def full_state_dict(self, rank0_only: bool = False) -> dict[str, Any]:
        """The whole state as plain tensors in torch.optim.Adam's format.

        Collective over the process group. The tensors are copies in host memory: 8 bytes a
        parameter, and while they are gathered one flat buffer more on the device.

        Args:
            rank0_only: only the group's first rank keeps the state; the others return ``{}``.
        """
        moments = self._built.full_moments(keep=not rank0_only or self._built.comm.rank == 0)
        if rank0_only and self._built.comm.rank != 0:
            return {}

        def fill_in(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> None:
            checkpoint.fill_in(packed, moments)

        # The first hook after torch has packed it: the user's own see the whole state.
        handle = self.register_state_dict_post_hook(fill_in, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `full_state_dict` or torch.optim.Adam(W)'s ``state_dict`` gave, at any world
        size. Collective: every rank brings the same dict, which is not changed and not kept.

        Parameters without an entry start afresh at their first gradient.

        Raises:
            ValueError: on every rank, with nothing changed, where a dict does not fit (the group
                or the parameter is named, with both shapes), or the ranks bring dicts that differ
                in their groups, steps, or in which parameters have state.
        """
        agreed = False

        def check(optimizer: torch.optim.Optimizer, mended: dict[str, Any]) -> None:
            nonlocal agreed
            agreed = True
            self._agree_on_state_dict(mended)

        # Registered now, it runs after all hooks of the user's, which may mend the dict.
        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        except Exception as error:  # the other ranks wait in the check
            if not agreed:
                self._agree_on_state_dict(None, error)
            raise
        finally:
            handle.remove()

    def _agree_on_state_dict(
        self, state_dict: dict[str, Any] | None, error: Exception | None = None
    ) -> None:
        """Raise on every rank if a rank's dict does not fit, or the ranks bring different ones."""
        content = ""
        try:
            if state_dict is not None:
                checkpoint.check_fits(state_dict, self.param_groups)
                content = checkpoint.describe_content(state_dict)
        except Exception as caught:  # as in the constructor
            error = caught
        answers = self._built.comm.gather_objects((describe_error(error), content))
        raise_shared(error, [failure for failure, _ in answers])
        if len({content for _, content in answers}) > 1:
            raise ValueError("state_dict: the ranks bring different ones")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what torch's ``load_state_dict`` has put together."""
        self.param_groups = state["param_groups"]
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            if self.defaults["decoupled_weight_decay"]:
                group["decoupled_weight_decay"] = True
        params = self._built.params
        loaded = {i: state["state"][p] for i, p in enumerate(params) if state["state"].get(p)}
        with torch.inference_mode(False):
            self._built.load(loaded)
        self.state.clear()
        self._show_state(loaded, renew=True)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied: save full_state_dict() and load "
            "it into a new optimizer"
        )
