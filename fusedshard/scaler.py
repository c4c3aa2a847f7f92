"""Loss scaling whose decisions are the same on every rank."""

from __future__ import annotations

from typing import Any

import torch

from fusedshard.optimizer import Adam


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, which looks at the averaged gradient of fusedshard's optimizers.

    Same calls and arguments, but that ``device`` is by default ``"cuda"`` where there is a GPU and
    else ``"cpu"``, where torch's scaler would switch itself off. An infinite or NaN gradient on any
    rank skips the step on all, and shrinks the scale on all: torch's own scaler sees its rank's
    gradients alone, so that ranks would scale differently from then on.

    For these optimizers `unscale_` and `step` are collective. `unscale_` averages the gradients,
    and its factor, like that of ``optimizer.clip_grad_norm_`` after it, is folded into the update:
    ``p.grad`` stays scaled. Other optimizers are handled as torch does.

    Raises:
        RuntimeError: where ``clip_grad_norm_`` was called before `unscale_`.
    """

    def __init__(self, device: str | None = None, *args: Any, **kwargs: Any) -> None:
        by_default = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(by_default if device is None else device, *args, **kwargs)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        if not isinstance(optimizer, Adam):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        optimizer._unscale(inv_scale, found_inf)
        return {found_inf.device: found_inf}
