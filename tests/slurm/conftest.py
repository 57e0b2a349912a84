"""A Slurm for the session. Its packages are installed where they may be: by root, on Debian."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm import drill
from slurm.lab import Lab, missing

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
INSTALL = ("apt-get", "install", "--no-install-recommends", "-y", "-qq", *PACKAGES)


@pytest.fixture(scope="session")
def slurm_programs() -> None:
    """They are there, or the tests that need them are named as not run."""
    if not missing():
        return
    wanted = f"no {', '.join(missing())} here: apt-get install --no-install-recommends {' '.join(PACKAGES)}"
    if os.getuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip(wanted)
    trouble = _install()
    if not missing():
        return
    if os.environ.get("CI"):
        pytest.fail(f"{wanted}: {trouble}")
    pytest.skip(f"{wanted}: {trouble}")


def _install() -> str:
    """Install the packages; returns what apt-get says at last."""
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (INSTALL, ("apt-get", "update", "-qq"), INSTALL):
        done = subprocess.run(words, env=quiet, capture_output=True, text=True, check=False, timeout=300)
        if words is INSTALL and done.returncode == 0:
            break
    return done.stderr[-1000:]


@pytest.fixture(scope="session")
def lab(slurm_programs: None) -> Iterator[Lab]:
    """Two nodes at this machine's own address. Tests share it, and leave no job in it."""
    with Lab(2) as lab:
        yield lab
        assert lab.left() == []


@pytest.fixture(scope="session")
def may_make_hosts(slurm_programs: None) -> None:
    """Nodes with a network of their own may be made; else the tests that need them are named as not run."""
    wanted = [name for name in ("ip", "nsenter", "unshare", "setpriv") if shutil.which(name) is None]
    if wanted:
        pytest.skip(f"no {', '.join(wanted)} here, with which nodes get networks of their own")
    made = subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("nodes get networks of their own where root may make namespaces")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where a job writes."""
    return tmp_path / "job.log"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The drills as a table."""
    if drill.TABLE:
        terminalreporter.section("runs that were struck in a cluster")
        for row in (drill.HEAD, *drill.TABLE):
            terminalreporter.write_line(str(row))
