"""Checks of the file system that runs are written to, by trying it: what a run is committed with."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ppoctl.doctor.finding import Finding, ok, refused, warning, wrong
from ppoctl.doctor.host import TEMPORARY
from ppoctl.errors import StorageError, quoted
from ppoctl.store.disk import existing
from ppoctl.store.folders import require_writable

LITTLE_BYTES = 5 << 30
FULL_FRAC = 0.95
"""Part of a disk beyond which Ray stops to move objects there."""
IN_MEMORY = ("tmpfs", "ramfs")
ELSEWHERE = "ppoctl doctor --runs ~/runs  # find a folder on another file system, and train with --runs there"


def runs_folder(runs: Path) -> Iterator[Finding]:
    """Whether runs can be written, and committed so that a crash leaves nothing half done."""
    try:
        require_writable(runs)
    except StorageError as error:
        yield refused("runs folder", error)
        return
    above = existing(runs)
    kind = _kind(above)
    if kind in IN_MEMORY:
        yield warning("runs folder", f"`{above}` is {kind}: gone with the machine", ELSEWHERE)
    else:
        yield ok("runs folder", f"`{above}`{f' ({kind})' if kind else ''}")
    with tempfile.TemporaryDirectory(dir=above, prefix=".ppoctl-") as folder:
        for name, attempt in (("locks", _locks), ("rename", _renames), ("listing", _lists)):
            try:
                fault, seen = attempt(Path(folder))
            except OSError as error:
                fault, seen = True, f"in `{above}`: {error.strerror or error}"
            yield wrong(name, seen, ELSEWHERE) if fault else ok(name, seen)


def disk(runs: Path) -> Iterator[Finding]:
    """Whether there is free space for runs, and for what Ray moves to /tmp."""
    for name, folder in (("disk", existing(runs)), ("disk of /tmp", TEMPORARY)):
        room = shutil.disk_usage(folder)
        seen = f"{room.free / 2**30:,.3g} GiB free of {room.total / 2**30:,.3g}"
        if room.free < LITTLE_BYTES or (folder == TEMPORARY and room.used > FULL_FRAC * room.total):
            yield warning(name, seen, f"df -h {quoted(folder)}")
        else:
            yield ok(name, seen)


def _locks(folder: Path) -> tuple[bool, str]:
    """Whether a lock that one holds is refused to another, as a conversion needs."""
    path = folder / "lock"
    with path.open("wb") as one, path.open("wb") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False, "a file is locked by one"
    return True, "a file can be locked by two at once"


def _renames(folder: Path) -> tuple[bool, str]:
    """Whether a folder takes a name that is free, and no other, as a commit needs."""
    taken = folder / "taken"
    taken.mkdir()
    (taken / "file").touch()
    (folder / "aside").mkdir()
    (folder / "aside").rename(folder / "free")
    try:
        (folder / "free").rename(taken)
    except OSError:
        return False, "a folder is renamed at once, and over no other"
    return True, "a folder is renamed over another one"


def _lists(folder: Path) -> tuple[bool, str]:
    """Whether a file that was made is seen at once, and its folder can be flushed."""
    for number in range(20):
        name = f"item-{number}"
        (folder / name).write_bytes(b"1")
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if name not in os.listdir(folder):  # noqa: PTH208 - what the folder says, and no stat of it
            return True, "a file that was made is not listed"
    return False, "what is made is seen at once"


def _kind(folder: Path) -> str:
    """Name of the file system that a folder is on; empty where the kernel does not say."""
    try:
        lines = [line.split() for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    except OSError:
        return ""
    found = [(fields[1], fields[2]) for fields in lines if folder.resolve().is_relative_to(fields[1])]
    return max(found, key=lambda mount: len(mount[0]), default=("", ""))[1]
