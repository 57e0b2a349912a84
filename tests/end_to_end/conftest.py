"""One process that has done the imports, for all commands and drills of the session, and a folder for drills."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from end_to_end.cli_process import Forked


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    forked = Forked()
    yield forked
    forked.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Use memory if possible: the drill flushes tens of thousands of files."""
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="ppoctl-drill-", dir=parent) as name:
        yield Path(name)
