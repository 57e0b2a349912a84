"""Physical memory of this machine."""

import os
from pathlib import Path


def machine_bytes(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Return the bytes of physical memory of this machine or, if lower, the memory limit of the container. The file
    `limit` contains the limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(physical, int(limit.read_text("ascii")))
    except (OSError, ValueError):  # `max` means no limit
        return physical
