"""Every transport over CPU tensors, whichever their device would have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from fusedshard import comm
from fusedshard.transport import GlooPairs, GroupCollectives, StagedPairs, Transport

WAYS: dict[str, Callable[[Any, Any], Transport]] = {
    "pairs": lambda group, channel: GlooPairs(channel),
    "staged": lambda group, channel: StagedPairs(
        GlooPairs(channel), channel.gloo.size(), channel.gloo.rank()
    ),
    "collectives": lambda group, channel: GroupCollectives(group),
}


@contextmanager
def moving_by(way: str) -> Iterator[None]:
    """Communicators take this transport for every device."""

    def choose(group: Any, channel: Any, device: torch.device) -> Transport:
        return WAYS[way](group, channel)

    with mock.patch.object(comm, "choose_transport", choose):
        yield
