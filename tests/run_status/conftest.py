"""A cluster that consists of a folder, and a run."""

from pathlib import Path

import pytest

from fakes.slurm import FakeSlurm


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Put Slurm's programs on the PATH of this process."""
    found = FakeSlurm(tmp_path / "slurm")
    found.use(monkeypatch)
    return found
