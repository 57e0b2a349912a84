"""Pools of environments, environments in this process, and a check that no test leaves a process."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from ppoctl.environments.environment_pool import EnvironmentPool
from ppoctl.environments.environment_table import EpisodeTable

AsInChild = Callable[[Any], Any]
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


@pytest.fixture
def as_in_child(monkeypatch: pytest.MonkeyPatch) -> Iterator[AsInChild]:
    """Register environments that a test opens in this process, and undo afterwards what a process of environments
    does to its own."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    opened: list[Any] = []

    def register(environments: Any) -> Any:
        opened.append(environments)
        return environments

    yield register
    for environments in opened:
        environments._loop._runner.close()
