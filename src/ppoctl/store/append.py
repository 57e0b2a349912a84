"""Flushed, all-or-nothing appends to a growing file. Imports no torch.

No lock is needed: only one process appends at a time. An attempt first opens the file and then checks that it is the
newest (`Attempt.require_newest`). The order is required: the claim of a newer attempt replaces the file by a copy, so
that an older attempt appends to an unlinked file. An attempt that checked first could open the copy and append to it.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppoctl.core.batch.sealed_json import intact_lines, repair_hint
from ppoctl.core.errors import CorruptArtifactError
from ppoctl.store.disk_errors import storage_error


@dataclass(frozen=True)
class GrowingFile:
    """A file that is open for reading and appending."""

    descriptor: int

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read(self, *, start: int = 0) -> bytes:
        """Return the bytes from `start` to the end."""
        return os.pread(self.descriptor, max(self.size - start, 0), start)

    def truncate(self, size: int) -> None:
        os.ftruncate(self.descriptor, size)

    def append(self, data: bytes) -> None:
        """Append all of `data` and flush the file. After an OSError, as on a full disk, nothing is appended."""
        end = self.size
        try:
            written = os.pwrite(self.descriptor, data, end)
            # A disk that becomes full shortens a write before it rejects one.
            if written != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self.descriptor)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self.descriptor, end)
            raise


@contextmanager
def opened(path: Path) -> Iterator[GrowingFile]:
    """Open a file of a run directory that exists since the run was created, such as the journal.

    Raises CorruptArtifactError if the file is missing; StorageError for any other OSError.
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
    """Return the current content of a file of a run directory.

    Raises CorruptArtifactError if the file is missing; StorageError if it cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise missing(path) from error
    except OSError as error:
        raise storage_error(path, error, doing="read") from error


def intact(path: Path) -> list[dict[str, Any]]:
    """Return the undamaged lines of a damaged file; an empty list if the file is missing."""
    return list(intact_lines(path.read_bytes())) if path.is_file() else []


def missing(path: Path) -> CorruptArtifactError:
    """Return the error for a missing journal or ledger; both files exist from the creation of a run on."""
    return CorruptArtifactError(f"`{path}` is missing: it was deleted", hint=repair_hint(path.parent))
