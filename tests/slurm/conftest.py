"""A Slurm for the session. Its packages are installed if possible: as root, on Debian."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import debian
from slurm import drill
from slurm.lab import Lab, missing

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")


@pytest.fixture(scope="session")
def slurm_programs() -> None:
    debian.require(lambda: not missing(), *PACKAGES)


@pytest.fixture(scope="session")
def lab(slurm_programs: None) -> Iterator[Lab]:
    """Two nodes at this machine's own address. Tests share the lab, and leave no job in it."""
    with Lab(2) as lab:
        yield lab
        assert lab.left() == []


@pytest.fixture(scope="session")
def may_make_hosts(slurm_programs: None) -> None:
    """Skip tests that need nodes with separate networks if these cannot be made."""
    wanted = [name for name in ("ip", "nsenter", "unshare", "setpriv") if shutil.which(name) is None]
    if wanted:
        pytest.skip(f"no {', '.join(wanted)} here, with which nodes get networks of their own")
    made = subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("nodes get networks of their own where root may make namespaces")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """File for the output of a job."""
    return tmp_path / "job.log"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the drills as a table."""
    if drill.TABLE:
        terminalreporter.section("runs that were struck in a cluster")
        for row in (drill.HEAD, *drill.TABLE):
            terminalreporter.write_line(str(row))
