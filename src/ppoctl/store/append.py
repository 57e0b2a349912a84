"""Appending to a file that grows: whole or not at all, flushed. Light.

No lock is taken: one process appends at a time. An attempt first opens the file, and then makes sure that it is the
newest (`Attempt.require_newest`); the claim of a newer one puts a copy under the name, so that whoever was late
appends to a file that has none.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppoctl.batch.sealed_json import intact_lines, repair_hint
from ppoctl.errors import CorruptArtifactError
from ppoctl.store.disk import storage_error


@dataclass(frozen=True)
class GrowingFile:
    """A file that is open to be read and appended to."""

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
def opened(path: Path) -> Iterator[GrowingFile]:
    """A file of a run directory, which has been there since the run was created.

    Raises CorruptArtifactError where it is gone, StorageError for whatever else the disk refuses.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
        try:
            yield GrowingFile(descriptor)
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise missing(path) from error
    except OSError as error:
        raise storage_error(path, error) from error


def read_whole(path: Path) -> bytes:
    """A file of a run directory, as it is now. Raises CorruptArtifactError where it is gone, StorageError where it
    cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise missing(path) from error
    except OSError as error:
        raise storage_error(path, error, doing="read") from error


def intact(path: Path) -> list[dict[str, Any]]:
    """What can still be believed of a damaged file; nothing where it is gone."""
    return list(intact_lines(path.read_bytes())) if path.is_file() else []


def missing(path: Path) -> CorruptArtifactError:
    """The journal or the ledger was there when the run was created, and is gone."""
    return CorruptArtifactError(f"`{path}` is missing: it was deleted", hint=repair_hint(path.parent))
