"""Disks that fill up, and runs that were stopped."""

import resource
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fakes.job import new_run_dir
from ppoctl.store.attempt import Attempt, claim
from ppoctl.store.manifest import Manifest
from ppoctl.store.run_paths import RunPaths

Disk = Callable[[int], AbstractContextManager[None]]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Use memory if possible: these tests wait for thousands of flushes."""
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="ppoctl-store-", dir=parent) as name:
        yield Path(name)


@pytest.fixture
def disk() -> Disk:
    """`with disk(20)`: no file may exceed 20 bytes, as on a full disk."""

    @contextmanager
    def takes(size: int) -> Iterator[None]:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            signal.signal(signal.SIGXFSZ, before)

    return takes


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """Create a run directory in which one attempt has started."""
    found = new_run_dir(tmp_path / "run")
    claim(found)
    return found


@dataclass(frozen=True)
class Stale(RunPaths):
    """A run directory seen through an outdated listing of its attempts."""

    known: tuple[int, ...]

    def attempts(self) -> list[int]:
        return list(self.known)


def working(paths: RunPaths, number: int) -> Attempt:
    """Return an attempt that was claimed earlier, as its process has it."""
    return Attempt(paths, number, next(paths.drafts(number).iterdir()).name)


def stops_from(step: int) -> dict[str, dict[str, object]]:
    """Return the table `health` of a rule that is broken at every step from this one."""
    return {"entropy": {"max": -1.0, "from_step": step, "action": "stop"}}


def a_manifest(**changes: object) -> Manifest:
    fields = {
        "stage": "values",
        "step": 1,
        "identity": "aa",
        "inputs": (),
        "fingerprint": "",
        "files": {},
        "seconds": 0.0,
        "committed_at": 0.0,
        "attempt": 1,
        "figures": {"value/mean": 1.0},
    }
    return Manifest(**{**fields, **changes})  # type: ignore[arg-type]
