"""Adam and AdamW, fused and sharded over the ranks of a data-parallel group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import ParamsT

from fusedshard.averaging import AveragingOptimizer
from fusedshard.comm import Communicator
from fusedshard.engine import Engine
from fusedshard.fingerprint import agree_on_groups
from fusedshard.layout import Layout
from fusedshard.options import ParallelOptions, check_groups, check_hyperparameters
from fusedshard.params import parameter_names, reject_sets
from fusedshard.precision import Precision


class Adam(AveragingOptimizer):
    """Adam (arXiv:1412.6980), a drop-in for `torch.optim.Adam` that is fused and sharded.

    Data parallelism without a wrapper: each rank runs its own backward, and `step` averages the
    gradients over the process group, updates what this rank owns in one fused pass, and gives
    every rank all parameters. Constructing it is collective: all ranks of the group build the
    same optimizer, and afterwards hold the parameters of the group's first rank.

    Parameters stay the same objects with the same shapes and strides; their memory moves into
    flat buffers, so build the optimizer after ``model.to(...)``.

    Args:
        params: as in torch: parameters, named parameters, or param groups. fp32, fp64, bf16 or
            fp16, also mixed, or complex of fp32 or fp64; all on the CPU or all on one GPU; dense,
            in any order of strides. Frozen ones take no memory.
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
            ``"backend"``: the backend's ReduceScatter or AllReduce adds them; bf16 and fp16 ones
            are sent in fp32 then. ``"auto"``: backend on NCCL where no parameter is bf16 or fp16,
            else ordered.
        grad_sync: ``"backward"``: gradients are exchanged while backward produces them, a bucket
            at a time, and p.grad must not be edited between ``backward()`` and `step` in sharded
            mode. ``"step"``: `step` averages them, as they are then. ``"external"``: they are
            averaged already, as by a model wrapped in DDP, and only the parameters are
            communicated.
        bucket_cap_mb: size of a bucket in MiB; grows with the world size where shards of a
            bucket would fall below 128 KiB.
        master_weights: what is kept of bf16 and fp16 parameters beside them, so that small updates
            are not lost. None: the 16 bits that make a bf16 one an fp32 number, and an fp32 copy of
            an fp16 one. True: an fp32 copy. False: nothing, the parameter itself is updated.
        state_dtype: of exp_avg and exp_avg_sq: ``torch.float32``, ``torch.bfloat16``, or
            ``torch.uint8`` for 8-bit codes, in blocks of 128 elements that share an exponent.
            Parameters of fewer than 4096 elements keep fp32 then; fp64 and complex ones always have
            their own.
        stochastic_rounding: whether bf16 and 8-bit moments, and bf16 parameters without master
            weights, are rounded up or down at random so that the expectation is right; else to the
            nearest, as torch does, where changes smaller than half the last place are lost. The
            bits depend on seed, step, parameter and element alone, not on the number of ranks.
        seed: of stochastic rounding.
        audit_every: after how many calls of `step` each the ranks compare fingerprints of what must
            be the same on all (see `fusedshard.audit`): parameters, step counts, in replicated
            mode all state, and with ``grad_sync="external"`` the gradients, before they are used.
            0: never. It waits for the device.

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
        grad_sync: str = "backward",
        bucket_cap_mb: float = 25,
        master_weights: bool | None = None,
        state_dtype: torch.dtype = torch.float32,
        stochastic_rounding: bool = True,
        seed: int = 0,
        audit_every: int = 0,
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
        precision = Precision(master_weights, state_dtype, stochastic_rounding, seed)
        self._begin(
            ParallelOptions(
                mode, process_group, reduction, grad_sync, bucket_cap_mb, precision, audit_every
            )
        )
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
        with torch.inference_mode(False):  # what is made here outlives it
            engine = Engine(comm, self._options)
            engine.admit(self.param_groups)
        self._engine = engine

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
            known_params = self._engine.labelled_params()
            check_groups(self.param_groups[before:], first, self._engine.device, known_params)
        except Exception as caught:  # as in the constructor
            error = caught
        try:
            added = self.param_groups[before:]
            agree_on_groups(self._engine.comm, error, self._options.described(), added, first)
        except Exception:  # whatever it was, the group must be on no rank
            del self.param_groups[before:]
            raise
        self._consolidated = None
        with torch.inference_mode(False):
            self._engine.admit(self.param_groups)
        known = [i for i, param in enumerate(self._engine.params) if param in self.state]
        self._show_state(known, renew=True)

    @property
    def layout(self) -> Layout:
        """Where each parameter lies and which rank owns what, as integers."""
        return self._built.layout

    def memory(self) -> dict[str, int]:
        """Bytes on this rank, padding included: ``parameters`` (flat, in place of the model's
        own), ``moments``, ``masters`` (what is kept of 16-bit parameters beside them), ``reduced``
        (the averaged gradient of what this rank owns), ``send`` and ``receive`` (wire buffers,
        made at the first step)."""
        return self._built.memory()

    @torch.compiler.disable
    @torch.inference_mode(False)  # what is made here outlives it
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
                of any rank is sparse, or a parameter was moved or cast since construction. What a
                rank's closure raises is raised there, and quoted on the others.
            fusedshard.DivergenceError: on every rank, where an audit finds a difference: before
                the update in the gradients, else after it.
        """
        loss, error = None, None
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
        except Exception as caught:  # the other ranks wait for this one
            error = caught
        found_inf, groups = self._apply_scaler(error)
        audits = self._watch.is_due(self._built)
        if audits and self._options.grad_sync == "external":
            self._watch.check_gradients(self._built, parameter_names(self.param_groups))
        self._consolidated = None
        used = self._built.update(groups, found_inf)
        self._show_state(index for index, is_used in enumerate(used) if is_used)
        if audits:
            self._watch.check_state(self._built, parameter_names(self.param_groups))
        return loss


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
        grad_sync: str = "backward",
        bucket_cap_mb: float = 25,
        master_weights: bool | None = None,
        state_dtype: torch.dtype = torch.float32,
        stochastic_rounding: bool = True,
        seed: int = 0,
        audit_every: int = 0,
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
            master_weights=master_weights,
            state_dtype=state_dtype,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
            audit_every=audit_every,
        )
