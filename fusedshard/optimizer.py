"""Adam and AdamW, fused and sharded over the ranks of a data-parallel group."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.optim.optimizer import ParamsT

from fusedshard import checkpoint
from fusedshard.comm import Communicator, describe_error, raise_shared
from fusedshard.engine import Engine
from fusedshard.fingerprint import agree_on_groups
from fusedshard.layout import Layout
from fusedshard.options import ParallelOptions, check_groups, check_hyperparameters
from fusedshard.params import reject_sets
from fusedshard.stats import Stats
from fusedshard.tables import GroupScalars


class Adam(torch.optim.Optimizer):
    """Adam (arXiv:1412.6980), a drop-in for `torch.optim.Adam` that is fused and sharded.

    Data parallelism without a wrapper: each rank runs its own backward, and `step` averages the
    gradients over the process group, updates what this rank owns in one fused pass, and gives
    every rank all parameters. Constructing it is collective: all ranks of the group build the
    same optimizer, and afterwards hold the parameters of the group's first rank.

    Parameters stay the same objects with the same shapes and strides; their memory moves into
    flat buffers, so build the optimizer after ``model.to(...)``.

    Args:
        params: as in torch: parameters, named parameters, or param groups. fp32 or fp64, all on
            the CPU or all on one GPU; dense, in any order of strides. Frozen ones take no memory.
        lr: learning rate, a float or a tensor of one element; read anew at each step, as are
            the other values of ``param_groups``. Tensors on the parameters' GPU are read there.
        betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: as in torch.
        capturable: whether `step` may be captured in a CUDA graph, which then repeats what it was
            captured with: which parameters have gradients, where these lie, and hyperparameters
            that are numbers. (Step counts are always on the device.) No effect on the CPU.
        foreach, fused: accepted for compatibility, without effect.
        differentiable: must be False.
        mode: ``"sharded"``: each rank keeps 1/N of the moments (ZeRO stage 1).
            ``"replicated"``: each rank keeps all of them, as under DDP.
        process_group: the data-parallel group; None means the default group, or one rank where
            torch.distributed is not initialized.
        reduction: ``"ordered"``: gradients are added in fp32 (fp64 for fp64 ones) in rank order
            by our kernel, so that results depend neither on the backend nor on the bucket size.
            ``"backend"``: the backend's ReduceScatter or AllReduce adds them. ``"auto"``:
            ordered on gloo, backend on NCCL.
        grad_sync: ``"step"``: `step` averages the gradients. ``"external"``: they are averaged
            already, as by a model wrapped in DDP, and only the parameters are communicated.
        bucket_cap_mb: size of a bucket in MiB; grows with the world size where shards of a
            bucket would fall below 128 KiB.

    Raises:
        ValueError, TypeError: on every rank, where an argument of any rank is invalid, or ranks
            differ in their parameters or options; the first differing parameter is named.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        mode: str = "sharded",
        process_group: dist.ProcessGroup | None = None,
        reduction: str = "auto",
        grad_sync: str = "step",
        bucket_cap_mb: float = 25,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        self.stats = Stats()
        self._options = ParallelOptions(mode, process_group, reduction, grad_sync, bucket_cap_mb)
        self._engine: Engine | None = None
        comm = Communicator(process_group, self.stats)
        error = None
        try:
            self._options.check()
            check_hyperparameters(defaults)
            super().__init__(reject_sets(params), defaults)
            check_groups(self.param_groups)
        except Exception as caught:  # the other ranks must learn of it before this one raises
            error = caught
        groups = getattr(self, "param_groups", [])
        agree_on_groups(comm, error, self._options.described(), groups)
        self._engine = Engine(comm, self._options)
        self._engine.admit(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch. Collective, once the optimizer is built.

        State is kept; the new parameters start at step 0.

        Raises:
            ValueError, TypeError: on every rank, and then no rank has the group.
        """
        if self._engine is None:
            super().add_param_group(param_group)
            return
        before, first = len(self.param_groups), len(self._engine.params)
        error = None
        try:
            super().add_param_group(param_group)
            check_groups(self.param_groups[before:], first, self._engine.device)
        except Exception as caught:  # as in the constructor
            error = caught
        try:
            added = self.param_groups[before:]
            agree_on_groups(self._engine.comm, error, self._options.described(), added, first)
        except Exception:  # whatever it was, the group must be on no rank
            del self.param_groups[before:]
            raise
        self._engine.admit(self.param_groups)
        known = [i for i, param in enumerate(self._engine.params) if param in self.state]
        self._show_state(known, renew=True)

    @property
    def layout(self) -> Layout:
        """Where each parameter lies and which rank owns what, as integers."""
        return self._built.layout

    def memory(self) -> dict[str, int]:
        """Bytes on this rank, padding included: ``parameters`` (flat, in place of the model's
        own), ``moments``, ``reduced`` (the averaged gradient of what this rank owns), ``send``
        and ``receive`` (wire buffers, made at the first step)."""
        return self._built.memory()

    @property
    def _built(self) -> Engine:
        assert self._engine is not None, "the constructor did not finish"
        return self._engine

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, update the parameters, and give every rank all of them.

        Collective over the process group: every rank calls it equally often. A parameter without
        a gradient on any rank is left as it is; one that has a gradient on some ranks is updated
        on all, by the sum of their gradients over the number of all ranks. Afterwards ``p.grad``
        holds the averaged gradient in replicated mode, as under DDP, and still this rank's own
        in sharded mode.

        On a GPU the work is queued on the current stream (and NCCL's), and the host goes on. The
        ranks' hosts agree over gloo connections, so each step waits for the slowest host.

        Args:
            closure: called once, with gradients enabled, before anything else.

        Returns:
            The closure's value, or None.

        Raises:
            RuntimeError: on every rank, with no parameter and no state changed, where a gradient
                of any rank is sparse, or a parameter was moved or cast since construction.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine = self._built
        groups: list[GroupScalars] = []
        error = None
        try:
            _check_capture(self)
            engine.check_unchanged(self.param_groups)
            groups = [_scalars(group, engine.device) for group in self.param_groups]
        except Exception as caught:  # as in the constructor
            error = caught
        grads, used = engine.average_gradients(groups, error)
        engine.update(grads, used, groups)
        self._show_state(index for index, is_used in enumerate(used) if is_used)
        return loss

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

        Collective over the process group. The tensors are copies: 8 bytes a parameter, and while
        they are gathered one flat buffer more.

        Args:
            rank0_only: only the group's first rank keeps the state; the others return ``{}``.
        """
        moments = self._built.full_moments(keep=not rank0_only or self._built.comm.rank == 0)
        if rank0_only and self._built.comm.rank != 0:
            return {}
        packed = super().state_dict()
        for index, state in packed["state"].items():
            whole = moments.get(index, {})
            packed["state"][index] = {
                name: whole[name] if name in whole else copy.deepcopy(value)
                for name, value in state.items()
            }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `full_state_dict` or torch.optim.Adam(W)'s ``state_dict`` gave, at any world
        size. Collective: every rank brings the same dict, which is not changed and not kept.

        Parameters without an entry start afresh at their first gradient.

        Raises:
            ValueError: on every rank, with nothing changed, where a dict does not fit (the group
                or the parameter is named, with both shapes), or the ranks bring dicts that differ
                in their groups, steps, or in which parameters have state.
        """
        # Registered now, it runs after all hooks of the user's, which may mend the dict.
        check = self.register_load_state_dict_pre_hook(_check_state_dict)
        try:
            super().load_state_dict(state_dict)
        finally:
            check.remove()

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
        self._built.load(loaded)
        self.state.clear()
        self._show_state(loaded, renew=True)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied: save full_state_dict() and load "
            "it into a new optimizer"
        )


class AdamW(Adam):
    """AdamW (arXiv:1711.05101), a drop-in for `torch.optim.AdamW`.

    As `Adam`, but weights decay by ``lr * weight_decay`` directly, and ``weight_decay`` is 0.01
    by default.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        mode: str = "sharded",
        process_group: dist.ProcessGroup | None = None,
        reduction: str = "auto",
        grad_sync: str = "step",
        bucket_cap_mb: float = 25,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            mode=mode,
            process_group=process_group,
            reduction=reduction,
            grad_sync=grad_sync,
            bucket_cap_mb=bucket_cap_mb,
        )


# torch renamed it when it learned of other accelerators.
_check_capture: Callable[[torch.optim.Optimizer], None] = (
    getattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", None)
    or torch.optim.Optimizer._cuda_graph_capture_health_check
)


def _check_state_dict(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise on every rank if a rank's dict does not fit, or the ranks bring different ones."""
    assert isinstance(optimizer, Adam)
    error, content = None, ""
    try:
        checkpoint.check_fits(state_dict, optimizer.param_groups)
        content = checkpoint.describe_content(state_dict)
    except Exception as caught:  # as in the constructor
        error = caught
    answers = optimizer._built.comm.gather_objects((describe_error(error), content))
    raise_shared(error, [failure for failure, _ in answers])
    if len({content for _, content in answers}) > 1:
        raise ValueError("state_dict: the ranks bring different ones")


def _scalars(group: Mapping[str, Any], device: torch.device | None) -> GroupScalars:
    """A group's hyperparameters as they are now: users and schedulers change them at will.

    Tensors on the parameters' GPU are left for the kernels to read.
    """

    def scalar(value: Any) -> Any:
        on_device = isinstance(value, torch.Tensor) and value.device == device
        return value if on_device and value.device.type != "cpu" else float(value)

    beta1, beta2 = group["betas"]
    return GroupScalars(
        lr=scalar(group["lr"]),
        beta1=scalar(beta1),
        beta2=scalar(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group["decoupled_weight_decay"]),
        amsgrad=bool(group["amsgrad"]),
        maximize=bool(group["maximize"]),
    )
