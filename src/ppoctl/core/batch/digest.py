"""SHA-256 of files, computed while the files are read or written. This module imports only the standard library."""

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileDigest:
    """Digest and size of one file of an artifact."""

    sha256: str
    size: int


def file_digest(path: Path) -> FileDigest | None:
    """Return SHA-256 and size of a file, read in blocks; None if it does not exist."""
    try:
        with path.open("rb") as file:
            return FileDigest(hashlib.file_digest(file, "sha256").hexdigest(), file.tell())
    except FileNotFoundError:
        return None


def flush(path: Path) -> None:
    """Flush a file, or the directory entries of a folder, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flushed_digest(path: Path) -> FileDigest:
    """Flush to disk a file that was just written, and return its digest. Raises OSError."""
    flush(path)
    digest = file_digest(path)
    assert digest is not None
    return digest


class DigestingFile:
    """New file that is written sequentially and digested while it is written. Closing it flushes it to disk.

    Every method raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._failure: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        self._digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self._failure = error
            raise

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        if self._file.closed:
            return
        if self._failure is not None:
            with suppress(OSError):
                self._file.close()
            raise self._failure  # torch would report only a broken archive
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._size = self._file.tell()
        finally:
            self._file.close()

    @property
    def digest(self) -> FileDigest:
        """Digest of the closed file."""
        return FileDigest(self._digest.hexdigest(), self._size)
