"""Sharded (ZeRO-1), fused Adam and AdamW for torch.distributed."""

from fusedshard.auditing.collective import audit
from fusedshard.auditing.report import AuditReport
from fusedshard.auditing.watch import DivergenceError
from fusedshard.optimizer import Adam, AdamW
from fusedshard.scaler import GradScaler
from fusedshard.sharded_state import ShardedState

__all__ = [
    "Adam",
    "AdamW",
    "AuditReport",
    "DivergenceError",
    "GradScaler",
    "ShardedState",
    "audit",
]
__version__ = "0.1.0"
