"""Sharded (ZeRO-1), fused Adam and AdamW for torch.distributed."""

from fusedshard.optimizer import Adam, AdamW
from fusedshard.scaler import GradScaler

__all__ = ["Adam", "AdamW", "GradScaler"]
__version__ = "0.1.0"
