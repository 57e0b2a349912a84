"""Appending to a file that several attempts may hold open: under a lock, whole or not at all, flushed. Light."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ppoctl.errors import StorageError


@dataclass(frozen=True)
class LockedFile:
    """A file under an exclusive lock."""

    descriptor: int

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read(self, *, start: int = 0) -> bytes:
        """Everything from `start` on."""
        return os.pread(self.descriptor, max(self.size - start, 0), start)

    def truncate(self, size: int) -> None:
        os.ftruncate(self.descriptor, size)

    def append(self, data: bytes) -> None:
        """All of `data`, flushed; on a full disk none of it (OSError)."""
        end = self.size
        try:
            written = os.pwrite(self.descriptor, data, end)
            if written != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self.descriptor)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self.descriptor, end)
            raise


@contextmanager
def locked(path: Path) -> Iterator[LockedFile]:
    """The file, made where it is missing; raises StorageError for whatever the disk refuses."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield LockedFile(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(
            f"cannot write `{path}`: {error.strerror or error}",
            hint=f"free space or rights are missing, nothing committed is lost: df -h {path.parent}",
        ) from error
