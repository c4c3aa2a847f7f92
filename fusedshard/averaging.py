"""What users do with the averaged gradient before a step: accumulate, clip, unscale."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch

from fusedshard.clipping import check_norm_type, clip_coefficient
from fusedshard.state import ShardedOptimizer
from fusedshard.tables import GroupScalars


class AveragingOptimizer(ShardedOptimizer):
    """A sharded optimizer that averages gradients over the ranks."""

    _step_supports_amp_scaling = True  # GradScaler leaves unscaling and skipping to step()

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backward only accumulates gradients, as DDP's: for all but the last
        of several ``backward()`` calls before a step. (What else runs inside does not matter.)

        Not collective. It saves time and changes no result but by rounding: without it, gradients
        that backward has exchanged already are exchanged once more, and in replicated mode means
        are accumulated.
        """
        return self._built.no_sync()

    def _average_gradients(
        self, call: str, error: Exception | None = None, *, scaling: str = ""
    ) -> list[GroupScalars]:
        """Collective; returns the hyperparameters, on which all ranks agree. ``error`` is what is
        wrong on this rank already, ``scaling`` what its loss scaler wants of the step."""
        engine = self._built
        groups: list[GroupScalars] = []
        try:
            _check_capture(self)
            engine.check_unchanged(self.param_groups)
            groups = [GroupScalars.of(group, engine.device) for group in self.param_groups]
        except Exception as caught:  # as in the constructor
            error = error or caught
        engine.average_gradients(groups, error, call=call, scaling=scaling)
        return groups

    def _unscale(self, inv_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
        """For `fusedshard.GradScaler`: average the gradients, see on all ranks whether they are
        finite, and multiply them by ``inv_scale``. Collective."""
        error = None
        if self._built.was_scaled():
            error = RuntimeError(
                "clip_grad_norm_: was called on scaled gradients: call scaler.unscale_(optimizer) "
                "before it"
            )
        with torch.no_grad():
            # A GPU is not waited for to compare the scales.
            known = f" by {inv_scale.item()}" if inv_scale.device.type == "cpu" else ""
            self._average_gradients(f"GradScaler.unscale_{known}", error)
            self._built.check_finite(found_inf)
            self._built.scale_gradients(inv_scale.to(torch.float64), None)
        self._scaler_agrees = True

    def _apply_scaler(
        self, error: Exception | None
    ) -> tuple[torch.Tensor | None, list[GroupScalars]]:
        """Average the gradients, and unscale them where a scaler has left the scale to do so.

        torch's scalers set ``grad_scale`` and ``found_inf`` around `step`. Where ours has looked at
        the gradients all ranks have one found_inf, which is not read from a GPU then.
        """
        grad_scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        scaling = ""
        ours, several = self._scaler_agrees, self._built.comm.world_size > 1
        if found_inf is not None and several and (not ours or found_inf.device.type == "cpu"):
            scale = "unscaled" if grad_scale is None else f"scale {float(grad_scale)}"
            scaling = f"{scale}, found_inf {float(found_inf)}"
            averaged = self._options.has_averages_after_backward
            if not ours and not averaged and not self._warned_of_scaler:
                self._warned_of_scaler = True
                warnings.warn(
                    "torch.amp.GradScaler looks at its own rank's gradients alone: use "
                    "fusedshard.GradScaler",
                    stacklevel=4,
                )
        if scaling and not ours and grad_scale is None and self._built.has_sent_by_backward:
            # torch's unscale_ changes p.grad in a way that autograd's versions do not show.
            error = error or RuntimeError(
                "GradScaler: torch.amp.GradScaler.unscale_ changed gradients that backward had "
                "sent to be averaged: use fusedshard.GradScaler"
            )
        groups = self._average_gradients("step", error, scaling=scaling)
        if grad_scale is not None:
            self._built.scale_gradients(grad_scale.to(torch.float64).reciprocal(), None)
        self._scaler_agrees = False
        return found_inf, groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. What was averaged, clipped or unscaled before is forgotten."""
        super().zero_grad(set_to_none)
        self._built.forget_gradients()

    @torch.inference_mode(False)
    @torch.no_grad()
    def synchronize(self) -> None:
        """Average the gradients now; `step` does not do so again unless they change. Collective.

        Afterwards ``p.grad`` holds the averaged gradient in replicated mode, and still this rank's
        own in sharded mode.

        Raises:
            RuntimeError: as `step`.
        """
        self._average_gradients("synchronize")

    @torch.inference_mode(False)
    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        parameters: torch.Tensor | Iterable[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Clip the averaged gradient by its global norm, as `torch.nn.utils.clip_grad_norm_` does
        under DDP. Collective: averages the gradients first, as `synchronize`.

        Each element counts once, whichever rank holds it. Call it after the last ``backward()`` of
        a step. The factor is folded into the update of the next `step`, and ``p.grad`` stays as it
        is; only where ``parameters`` are given their averaged gradients are scaled at once.

        Args:
            max_norm: the largest norm to leave.
            norm_type: any number above 0, or infinity.
            error_if_nonfinite: whether to raise where the norm is infinite or NaN.
            parameters: those to count and to scale; None: all of this optimizer.

        Returns:
            The norm before clipping, one element on the parameters' device, the same on every
            rank: fp64 if any parameter is, else fp32.

        Raises:
            RuntimeError: on every rank, for a norm that is not finite, with nothing scaled; or as
                `step`. ValueError: ``norm_type`` is not a norm's, or a parameter is not of this
                optimizer.
        """
        chosen, error = None, None
        try:
            norm_type = check_norm_type(norm_type)
            chosen = self._numbers_of(parameters)
        except Exception as caught:  # as in the constructor
            error = caught
        asked = f"{max_norm}, {norm_type}, {error_if_nonfinite}"
        some = "" if chosen is None else f" of parameters {sorted(chosen)}"
        self._average_gradients(f"clip_grad_norm_({asked}){some}", error)
        engine = self._built
        norm = engine.gradient_norm(norm_type, chosen)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients is {norm.item()}, so it cannot "
                "be clipped: set error_if_nonfinite=False to scale by it all the same"
            )
        engine.scale_gradients(clip_coefficient(norm, max_norm), chosen)
        double = any(p.dtype in (torch.float64, torch.complex128) for p in engine.params)
        return norm if double else norm.to(torch.float32)

    def _numbers_of(
        self, parameters: torch.Tensor | Iterable[torch.Tensor] | None
    ) -> set[int] | None:
        if parameters is None:
            return None
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        numbers = {param: index for index, param in enumerate(self._built.params)}
        chosen = set()
        for place, param in enumerate(parameters):
            if param not in numbers:
                raise ValueError(f"parameters: number {place} is not one of this optimizer's")
            chosen.add(numbers[param])
        return chosen


# torch renamed it when it learned of other accelerators.
_check_capture: Callable[[torch.optim.Optimizer], None] = (
    getattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", None)
    or torch.optim.Optimizer._cuda_graph_capture_health_check
)
