from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

# OpenMP reads it when torch is imported. More threads than cores run at times: waiting ones that
# spin would keep the others from working.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Rank processes on one machine talk over loopback, whatever its host name resolves to.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

# isort: split
import emulation
import pytest
import saved_jobs
from emulated_backend import emulated_kernels
from ranks import RankPool


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Persistent gloo ranks: ``ranks.run(world_size, function, *args)``."""
    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def emulated_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CUDA kernels, compiled for emulated devices; FUSEDSHARD_EMULATED names them ready made,
    as with a sanitizer."""
    ready = os.environ.get("FUSEDSHARD_EMULATED")
    return Path(ready) if ready else emulation.build(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(params=["cpu", "emulated"])
def each_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """The CPU's kernels, and the CUDA kernels on emulated devices."""
    if request.param == "cpu":
        yield
    else:
        with emulated_kernels(request.getfixturevalue("emulated_module")):
            yield


@pytest.fixture(autouse=True)
def _away_from_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes that tests start put their folder on sys.path: it must not hold our sources, or
    they would import these and not what is installed."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def originals(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What jobs of three ranks saved, see `saved_jobs`."""
    folder = tmp_path_factory.mktemp("saved")
    ranks.run(saved_jobs.RANKS, saved_jobs.save_all, folder)
    return folder


@pytest.fixture
def saved(originals: Path, tmp_path: Path) -> Path:
    """Copies of them, to be spoilt."""
    return shutil.copytree(originals, tmp_path / "saved")
