"""Physical memory of this machine."""

import os
from pathlib import Path


def machine_bytes(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Bytes of this machine's physical memory, or of the part that its container may have (the file `limit` says
    so)."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(physical, int(limit.read_text("ascii")))
    except (OSError, ValueError):  # `max`: all of it
        return physical
