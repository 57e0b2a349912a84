"""Whether processes that a test ended are gone."""

import time
from collections.abc import Iterable

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
