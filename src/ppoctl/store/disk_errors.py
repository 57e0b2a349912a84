"""Conversion of disk errors to StorageError: disk full, read-only, no permission. Imports no torch."""

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

from ppoctl.core.errors import StorageError, quoted
from ppoctl.core.units import size
from ppoctl.store.run_paths import FORMAT

FULL = (errno.ENOSPC, errno.EDQUOT)
READ_ONLY = "the file system is read-only"
REFUSED = (*FULL, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)


def storage_error(path: Path, error: OSError, *, doing: str = "write") -> StorageError:
    """Return the StorageError for an OSError; if the disk is full, the message contains the free space."""
    reason, folder = error.strerror or str(error), existing(path)
    if error.errno in FULL:
        return StorageError(
            f"cannot write `{path}`: {reason} ({size(free_bytes(folder))} free)",
            hint=f"nothing committed is lost; make room, then resume: df -h {quoted(folder)}",
        )
    if error.errno == errno.EROFS:
        message = f"cannot {doing} `{path}`: {READ_ONLY}"
        return StorageError(message, hint=f"mount it read-write, then try again: findmnt -T {quoted(folder)}")
    return StorageError(
        f"cannot {doing} `{path}`: {reason}", hint=f"check owner and permissions: ls -ld {quoted(folder)}"
    )


def refused(error: OSError) -> StorageError | None:
    """Return the StorageError for an OSError of a disk that no caller has translated; None for other errors."""
    if error.errno not in REFUSED or not isinstance(error.filename, str):
        return None
    return storage_error(Path(error.filename), error, doing="write" if error.errno in FULL else "use")


def free_bytes(path: Path) -> int:
    """Return the bytes that an unprivileged user can still write at `path`; 0: not known. The path need not exist."""
    try:
        return shutil.disk_usage(existing(path)).free
    except OSError:
        return 0


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder; 0 if the folder does not exist.

    A file with several hard links counts once. Files that disappear meanwhile or cannot be read count as 0.
    """
    sizes: dict[tuple[int, int], int] = {}
    folders = [str(folder)]  # strings, because `Path` is too slow for the many files of a list of runs
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def existing(path: Path) -> Path:
    """Return the path itself, or its nearest parent folder that exists. A broken link does not exist."""
    # Not `Path.exists`, which raises below a folder without search permission.
    absolute = path.absolute()
    return next(folder for folder in (absolute, *absolute.parents) if os.access(folder, os.F_OK))


def require_format(path: Path, found: object) -> None:
    """Raise StorageError naming the file if its format is not the format that this version reads."""
    if found != FORMAT:
        raise StorageError(
            f"`{path}` has format {found}, this version of ppoctl reads {FORMAT}",
            hint="continue with the version that created the run, or start a new run with another `name`",
        )
