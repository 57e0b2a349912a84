"""The private folder of Ray on a node. Other users can neither read it nor create it. The lock of the folder shows
whether the run is alive.

    /tmp/ppoctl-ray-RANDOM/    0700, and locked while the process that created it is alive
        ray/               Ray's own folder, which Ray makes readable for everybody
        auth_token         the token that Ray's ports require, if all of them are on this machine
        segments           shared memory to remove

A lock is more reliable than a process id: containers may share the folder, and each container numbers its processes
from 1.
"""

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from ppoctl.engines.ray import shared_memory

PREFIX = "ppoctl-ray-"
"""Prefix that is reserved for these folders: an unlocked folder with this prefix is removed."""
PARENT = Path("/tmp")
"""Folder that contains the private folders. Its path is short, because the private folders contain sockets, and paths
of sockets must be short."""


class PrivateFolder:
    """A private folder that this process created and locked."""

    def __init__(self, parent: Path = PARENT) -> None:
        """Create and lock the folder. Raises OSError."""
        # Another command's `sweep` may lock and remove the folder before this process has locked it.
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            lock = _locked(self.path)
            if lock is not None:
                self._lock = lock
                break

    @property
    def token(self) -> Path:
        return self.path / "auth_token"

    @property
    def of_ray(self) -> Path:
        return self.path / "ray"

    def remove(self) -> None:
        """Remove the folder, and the shared memory that is listed in it."""
        _remove(self.path)
        os.close(self._lock)


def write_token(path: Path) -> None:
    """Write a new token for Ray's ports into a file that only this user can read. Raises OSError."""
    token = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(token, "w", encoding="ascii") as file:  # noqa: PTH123 - opened with its mode
        file.write(secrets.token_hex(32))


def sweep(parent: Path = PARENT) -> None:
    """Remove the folders that killed processes of this user left behind. Other folders stay."""
    for folder in parent.glob(f"{PREFIX}*"):
        lock = _locked(folder)
        if lock is not None:
            _remove(folder)
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """Return a descriptor that holds the folder's lock. None: this user does not own the folder, the folder no longer
    exists, or another process has locked it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The folder may have been removed and created again since it was opened.
        opened, current = os.fstat(descriptor), folder.lstat()
        is_private = opened.st_uid == os.getuid() and stat.S_IMODE(opened.st_mode) == 0o700
        if is_private and os.path.samestat(opened, current):
            return descriptor
    os.close(descriptor)
    return None


def _remove(folder: Path) -> None:
    shared_memory.remove(shared_memory.noted(folder))
    shutil.rmtree(folder, ignore_errors=True)
