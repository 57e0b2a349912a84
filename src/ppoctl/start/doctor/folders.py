"""Checks of the file system of the runs folder. Each check tries an operation that commits of artifacts depend on."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ppoctl.core.errors import StorageError, quoted
from ppoctl.core.finding import Finding, from_error, ok, warning, wrong
from ppoctl.start.doctor.host import TEMPORARY
from ppoctl.store.disk_errors import existing
from ppoctl.store.writable_folders import require_writable

LITTLE_BYTES = 5 << 30
"""Free space below which a warning is shown."""
FULL_FRAC = 0.95
"""Used fraction of a disk above which Ray does not spill any more objects to the disk."""
IN_MEMORY = ("tmpfs", "ramfs")
ELSEWHERE = "ppoctl doctor --runs ~/runs  # find a folder on another file system, and train with --runs there"


def runs_folder(runs: Path) -> Iterator[Finding]:
    """Check whether runs can be written to the folder, and artifacts can be committed atomically."""
    try:
        require_writable(runs)
    except StorageError as error:
        yield from_error(error, "runs folder", kind="disk")
        return
    parent = existing(runs)
    kind = _kind(parent)
    if kind in IN_MEMORY:
        yield warning(
            f"`{parent}` is {kind}: its content is lost when the machine stops", "runs folder", ELSEWHERE, kind="disk"
        )
    else:
        yield ok(f"`{parent}`{f' ({kind})' if kind else ''}", "runs folder", kind="disk")
    with tempfile.TemporaryDirectory(dir=parent, prefix=".ppoctl-") as folder:
        for name, check in (("locks", _locks), ("rename", _renames), ("listing", _lists)):
            try:
                fault, seen = check(Path(folder))
            except OSError as error:
                fault, seen = True, f"in `{parent}`: {error.strerror or error}"
            yield wrong(seen, name, ELSEWHERE, kind="disk") if fault else ok(seen, name, kind="disk")


def disk(runs: Path) -> Iterator[Finding]:
    """Check whether the disks have free space for runs, and for objects that Ray spills to /tmp."""
    for name, folder in (("disk", existing(runs)), ("disk of /tmp", TEMPORARY)):
        usage = shutil.disk_usage(folder)
        seen = f"{usage.free / 2**30:,.3g} GiB free of {usage.total / 2**30:,.3g}"
        if usage.free < LITTLE_BYTES or (folder == TEMPORARY and usage.used > FULL_FRAC * usage.total):
            yield warning(seen, name, f"df -h {quoted(folder)}", kind="disk")
        else:
            yield ok(seen, name, kind="disk")


def _locks(folder: Path) -> tuple[bool, str]:
    """Check that only one process can hold a file lock, as a conversion requires. Returns (failed, observation)."""
    path = folder / "lock"
    with path.open("wb") as first, path.open("wb") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False, "a locked file cannot be locked again"
    return True, "two processes can lock a file at the same time"


def _renames(folder: Path) -> tuple[bool, str]:
    """Check that renaming a folder never replaces another folder, as a commit requires.

    Returns (failed, observation).
    """
    taken = folder / "taken"
    taken.mkdir()
    (taken / "file").touch()
    (folder / "aside").mkdir()
    (folder / "aside").rename(folder / "free")
    try:
        (folder / "free").rename(taken)
    except OSError:
        return False, "a folder is renamed atomically and never over another folder"
    return True, "a folder can be renamed over another folder"


def _lists(folder: Path) -> tuple[bool, str]:
    """Check that a new file is listed at once and that the folder of the file can be synced.

    Returns (failed, observation).
    """
    for number in range(20):
        name = f"item-{number}"
        (folder / name).write_bytes(b"1")
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if name not in os.listdir(folder):  # noqa: PTH208 - the check is of the listing itself
            return True, "a new file is not listed"
    return False, "a new file is listed at once"


def _kind(folder: Path) -> str:
    """Return the type of the file system of a folder; empty: the kernel does not report the type."""
    try:
        lines = [line.split() for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    except OSError:
        return ""
    mounts = [(fields[1], fields[2]) for fields in lines if folder.resolve().is_relative_to(fields[1])]
    return max(mounts, key=lambda mount: len(mount[0]), default=("", ""))[1]
