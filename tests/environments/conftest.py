"""Pools of environments, and a check that no test leaves a process."""

from collections.abc import Callable, Iterator

import psutil
import pytest

from ppoctl.environments.pool import EnvironmentPool
from ppoctl.environments.table import EpisodeTable

OpenPool = Callable[[EpisodeTable], EnvironmentPool]


@pytest.fixture
def open_pool() -> Iterator[OpenPool]:
    """Create pools, and shut them down; afterwards no child process may be left."""
    before = set(psutil.Process().children(recursive=True))
    pools: list[EnvironmentPool] = []

    def create(table: EpisodeTable) -> EnvironmentPool:
        pools.append(EnvironmentPool(table))
        return pools[-1]

    yield create
    for pool in pools:
        pool.shutdown()
    assert set(psutil.Process().children(recursive=True)) <= before
