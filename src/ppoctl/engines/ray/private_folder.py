"""The private folder of a node of Ray. Nobody else may look into it or make it, and it tells a live run from a dead
one.

    /tmp/ppoctl-ray-RANDOM/    0700, and locked for as long as the process that made it lives
        ray/               Ray's own, which it opens to everybody
        auth_token         what Ray's ports ask for, where they are all on this machine
        segments           shared memory to remove

A lock says more than a process number: containers may share the folder and count processes each from 1.
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
"""No other folder's name begins so: one that is not locked is swept away."""
PARENT = Path("/tmp")
"""Folder in which private folders are made. Sockets lie in them, and their paths must be short."""


class PrivateFolder:
    """Private folder made and locked by this process."""

    def __init__(self, parent: Path = PARENT) -> None:
        """Make and lock the folder. Raises OSError."""
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
        """Remove the folder, with the shared memory that it lists."""
        _remove(self.path)
        os.close(self._lock)


def write_token(path: Path) -> None:
    """Write a new token for Ray's ports, which only this user can read. Raises OSError."""
    token = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(token, "w", encoding="ascii") as file:  # noqa: PTH123 - made with its mode
        file.write(secrets.token_hex(32))


def sweep(parent: Path = PARENT) -> None:
    """Remove folders that killed processes of this user left behind, and nothing of anybody else."""
    for folder in parent.glob(f"{PREFIX}*"):
        lock = _locked(folder)
        if lock is not None:
            _remove(folder)
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """Descriptor that holds the folder's lock; None where the folder is not this user's own, is gone, or is
    locked."""
    try:
        found = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with suppress(OSError):
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        here, there = os.fstat(found), folder.lstat()
        is_private = here.st_uid == os.getuid() and stat.S_IMODE(here.st_mode) == 0o700
        if is_private and os.path.samestat(here, there):
            return found
    os.close(found)
    return None


def _remove(folder: Path) -> None:
    shared_memory.remove(shared_memory.noted(folder))
    shutil.rmtree(folder, ignore_errors=True)
