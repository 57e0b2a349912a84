"""Pools of misbehaving scorers, and a check that no test leaves a process."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from ppoctl.rewards.function import ScorerSpec
from ppoctl.rewards.scorer_pool import ScorerPool

OpenPool = Callable[..., ScorerPool]


@pytest.fixture
def drill_scorers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `drill_scorers` importable in scorer processes, like a user's module."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))


@pytest.fixture
def drill_pool(drill_scorers: None) -> Iterator[OpenPool]:
    """Open pools of `drill_scorers`, and close them; afterwards no child process may be left."""
    before = children()
    pools: list[ScorerPool] = []

    def open_pool(entry: str = "drill_scorers:score", *, workers: int = 1, timeout_s: float = 30.0) -> ScorerPool:
        pools.append(ScorerPool(ScorerSpec(entry), workers=workers, timeout_s=timeout_s))
        return pools[-1]

    yield open_pool
    for pool in pools:
        pool.close()
    assert children() <= before


def children() -> set[psutil.Process]:
    """Return the processes that this one has started, without those of the browser of other tests."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "chrom" not in process.name():
                found.add(process)
    return found
