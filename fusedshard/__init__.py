"""Sharded (ZeRO-1), fused Adam and AdamW for torch.distributed."""

from fusedshard.optimizer import Adam, AdamW

__all__ = ["Adam", "AdamW"]
__version__ = "0.1.0"
