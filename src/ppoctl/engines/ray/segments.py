"""Shared memory that processes leave behind when they are killed: names under /dev/shm that nobody removes.

Tensor ranks of a vLLM engine make such segments when they start. Each process says which ones it maps; whoever ends
the processes removes them, and a list on disk lets the next command do it where the driver itself was killed.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LIST = "segments"
"""File in the folder of a local Ray."""


def mapped() -> list[str]:
    """Segments that this process maps, and that have a name."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, _, path = line.partition(f" {SHARED_MEMORY}/")
        if path and not path.endswith(" (deleted)"):
            found.add(path)
    return sorted(found)


def note(folder: Path | None, names: Iterable[str]) -> None:
    """Write them down, so that they can be removed by another process."""
    if folder is not None:
        with (folder / LIST).open("a", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in names)


def noted(folder: Path) -> list[str]:
    """What was written down."""
    return (folder / LIST).read_text(encoding="utf-8").splitlines() if (folder / LIST).is_file() else []


def remove(names: Iterable[str]) -> None:
    """Remove those that are still there and this user's own; nobody may use them any more."""
    for name in names:
        with suppress(OSError, ValueError):
            segment = SHARED_MEMORY / name
            if segment.name == name and segment.lstat().st_uid == os.getuid():
                segment.unlink()
