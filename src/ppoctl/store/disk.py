"""What a disk refuses, said in words: full (with how much is free), read-only, not allowed. Light."""

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

from ppoctl.errors import StorageError, quoted
from ppoctl.store.run_paths import FORMAT
from ppoctl.units import size

FULL = (errno.ENOSPC, errno.EDQUOT)
READ_ONLY = "the file system is read-only"
REFUSED = (*FULL, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)


def storage_error(path: Path, error: OSError, *, doing: str = "write") -> StorageError:
    """The named error for what the disk refused; a full one says what is free."""
    reason, folder = error.strerror or str(error), existing(path)
    if error.errno in FULL:
        return StorageError(
            f"cannot write `{path}`: {reason} ({size(free_bytes(folder))} free)",
            hint=f"nothing committed is lost; make room, then resume: df -h {quoted(folder)}",
        )
    if error.errno == errno.EROFS:
        says = f"cannot {doing} `{path}`: {READ_ONLY}"
        return StorageError(says, hint=f"mount it read-write, then go on: findmnt -T {quoted(folder)}")
    return StorageError(
        f"cannot {doing} `{path}`: {reason}", hint=f"look at owner and rights: ls -ld {quoted(folder)}"
    )


def refused(error: OSError) -> StorageError | None:
    """The named error where a disk refused what nobody on the way up has put in words; None for other causes."""
    if error.errno not in REFUSED or not isinstance(error.filename, str):
        return None
    return storage_error(Path(error.filename), error, doing="write" if error.errno in FULL else "use")


def free_bytes(path: Path) -> int:
    """Bytes that a user without privileges can still write at a path, there or not; 0 where nobody can tell."""
    try:
        return shutil.disk_usage(existing(path)).free
    except OSError:
        return 0


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder, of a file with several names once; 0 where there is none. What goes away
    meanwhile, or may not be read, counts as nothing."""
    sizes: dict[tuple[int, int], int] = {}
    folders = [str(folder)]  # no `Path`: a list of runs looks at many files
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                with suppress(OSError):
                    told = entry.stat(follow_symlinks=False)
                    sizes[told.st_dev, told.st_ino] = told.st_size
    return sum(sizes.values())


def existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there. A link that leads nowhere is not there."""
    # Not `exists`, which raises below a folder that nobody may look into.
    here = path.absolute()
    return next(folder for folder in (here, *here.parents) if os.access(folder, os.F_OK))


def require_format(path: Path, found: object) -> None:
    """Raise StorageError, naming the file, when the format it says it has is not the one that is read here."""
    if found != FORMAT:
        raise StorageError(
            f"`{path}` has format {found}, this version of ppoctl reads {FORMAT}",
            hint="go on with the version that made the run, or start a new run with another `name`",
        )
