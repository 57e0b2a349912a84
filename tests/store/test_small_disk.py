"""A file system that is really full, at any point of a run.

A tmpfs of a few KiB is mounted in a separate namespace. This needs no privileges, but some kernels forbid it; then
only the tests with a file size limit cover full disks.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("small_disk.py")
OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")


@pytest.fixture(scope="module")
def own_mounts() -> tuple[str, ...]:
    """Return the command that gives a process its own mounts; skip the test if the kernel forbids it."""
    try:
        subprocess.run([*OWN_MOUNTS, "mount", "-t", "tmpfs", "none", "/mnt"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no user namespace with mounts here: {error}")
    return OWN_MOUNTS


@pytest.mark.parametrize("sizes", [["120"], pytest.param(["48", "240"], marks=pytest.mark.ci("120"))])
def test_run_on_a_full_disk_fails_clearly_and_resumes_with_space(
    tmp_path: Path, own_mounts: tuple[str, ...], sizes: list[str]
) -> None:
    """Three sizes in KiB: the disk is full at three points of the run."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [*own_mounts, sys.executable, str(SCRIPT), str(tmp_path), *sizes],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
