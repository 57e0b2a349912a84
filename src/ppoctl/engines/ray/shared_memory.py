"""Shared memory that processes leave behind when they are killed: names under /dev/shm that nobody removes.

Tensor ranks of a vLLM engine make such segments when they start. Each process says which ones it maps, and writes
them down on its node; whoever ends the processes removes those of this machine, and the list those that are left when
its node's part of Ray ends, or when the next command comes, where even that was killed.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LIST = "segments"
"""Name of the file of segments in the private folder of a node of Ray."""
FOLDER = "PPOCTL_RAY_FOLDER"
"""Variable of the environment with that folder; unset in a Ray that others started."""


def mapped() -> list[str]:
    """Names of the shared memory segments that this process maps."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, _, path = line.partition(f" {SHARED_MEMORY}/")
        if path and not path.endswith(" (deleted)"):
            found.add(path)
    return sorted(found)


def note(folder: str | Path | None, names: Iterable[str]) -> None:
    """Write segments down, so that another process can remove them."""
    if folder is not None:
        with (Path(folder) / LIST).open("a", encoding="utf-8") as file:
            file.write("".join(f"{name}\n" for name in names))


def noted(folder: Path) -> list[str]:
    """Names of the segments that were written down."""
    return (folder / LIST).read_text(encoding="utf-8").splitlines() if (folder / LIST).is_file() else []


def remove(names: Iterable[str]) -> None:
    """Remove those of the segments that are still there and this user's own; nobody may use them any more."""
    for name in names:
        with suppress(OSError, ValueError):
            segment = SHARED_MEMORY / name
            if segment.name == name and segment.lstat().st_uid == os.getuid():
                segment.unlink()
