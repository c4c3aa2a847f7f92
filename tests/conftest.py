from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import RankPool

# Rank processes on one machine talk over loopback, whatever its host name resolves to.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Persistent gloo ranks: ``ranks.run(world_size, function, *args)``."""
    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.stop()


@pytest.fixture(autouse=True)
def _away_from_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes that tests start put their folder on sys.path: it must not hold our sources, or
    they would import these and not what is installed."""
    monkeypatch.chdir(tmp_path)
