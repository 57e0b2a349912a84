"""Whether processes that a test ended are gone, with their shared memory."""

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil


def all_gone(pids: Iterable[int], *, within_s: float = 10.0) -> bool:
    """Return whether all processes end within this time; a zombie that its parent has not reaped has ended."""
    left, limit = set(pids), time.monotonic() + within_s
    while left and time.monotonic() < limit:
        left = {pid for pid in left if _runs(pid)}
        time.sleep(0.01)
    return not left


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_memory() -> set[str]:
    """Return files in shared memory that no living process has mapped or open."""
    there = {str(path) for path in Path("/dev/shm").glob("*") if path.is_file()}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            text = (process / "maps").read_text()
            there -= {path for path in there if path in text}
            there -= {str(link.readlink()) for link in (process / "fd").iterdir()}
    return there
