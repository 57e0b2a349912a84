"""A file system that is really full, at any point of a run.

A tmpfs of a few KiB is mounted in a separate namespace. This needs no privileges, but some kernels forbid it; then
only the tests with a file size limit cover full disks.
"""

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

from end_to_end.drill import in_a_process
from fakes.components import fake_recipe
from fakes.job import play, result, undisturbed
from ppoctl.core.errors import StorageError
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import RunPaths

OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")
CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x20000
ROLLOUT = {
    "prompts_per_step": 4,
    "samples_per_prompt": 2,
    "max_prompt_tokens": 4,
    "max_new_tokens": 6,
    "keep_finished_every_s": 1e-9,
}


@pytest.fixture(scope="module")
def _own_mounts() -> None:
    """Skip the test if the kernel forbids a process its own mounts."""
    try:
        subprocess.run([*OWN_MOUNTS, "mount", "-t", "tmpfs", "none", "/mnt"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no user namespace with mounts here: {error}")


def take_own_mounts() -> None:
    """Give this forked process its own user and mount namespaces, as `unshare` does."""
    user, group = os.getuid(), os.getgid()
    assert ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


@pytest.mark.usefixtures("_own_mounts")
@pytest.mark.parametrize("kib", [120, *(pytest.param(kib, marks=pytest.mark.ci("120")) for kib in (48, 240))])
def test_run_on_a_full_disk_fails_clearly_and_resumes_with_space(tmp_path: Path, kib: int) -> None:
    """Three sizes: the disk is full at three points of the run."""
    recipe = fake_recipe(rollout=ROLLOUT)
    whole = undisturbed(rollout=ROLLOUT)
    disk = tmp_path / "disk"
    disk.mkdir()

    def on_a_small_disk() -> None:
        take_own_mounts()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(disk)], check=True)
        with pytest.raises(StorageError, match="No space left on device"):
            play(disk / "run", recipe)
        assert not plan_resume(RecordedRun(RunPaths(disk / "run"))).broken
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        play(disk / "run", recipe)
        assert result(disk / "run") == whole

    assert in_a_process(on_a_small_disk) == 0
    assert list(disk.iterdir()) == [], "the mount was not its own"
