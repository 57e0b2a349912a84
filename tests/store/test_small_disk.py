"""A file system that is really full, wherever in a run that happens.

A tmpfs of a few KiB, mounted in a namespace of its own: no rights are needed, but some kernels refuse such a
namespace, and then only the tests with a file size limit look at full disks.
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
    """The command that gives a process mounts of its own; skipped where the kernel does not allow it."""
    try:
        subprocess.run([*OWN_MOUNTS, "mount", "-t", "tmpfs", "none", "/mnt"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no user namespace with mounts here: {error}")
    return OWN_MOUNTS


@pytest.mark.parametrize("kib", [48, 120, 240])
def test_run_on_a_full_disk_fails_clearly_and_resumes_with_space(
    tmp_path: Path, own_mounts: tuple[str, ...], kib: int
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [*own_mounts, sys.executable, str(SCRIPT), str(tmp_path), str(kib)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
