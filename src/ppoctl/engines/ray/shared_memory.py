"""Removal of shared memory that killed processes leave behind: files under /dev/shm that no other program removes.

Tensor ranks of a vLLM engine create such segments when they start. Each process reports the segments that it maps,
and lists them in a file on its node. The driver removes the segments of its own machine when it ends the processes.
The remaining listed segments are removed when Ray on the node ends. If Ray was killed too, the next command removes
them.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LIST = "segments"
"""Name of the file that lists segments, in the private folder of a node of Ray."""
FOLDER = "PPOCTL_RAY_FOLDER"
"""Environment variable with the path of the private folder. It is unset in an existing Ray cluster."""


def mapped() -> list[str]:
    """Return the names of the shared memory segments that this process maps."""
    names = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, _, path = line.partition(f" {SHARED_MEMORY}/")
        if path and not path.endswith(" (deleted)"):
            names.add(path)
    return sorted(names)


def note(folder: str | Path | None, names: Iterable[str]) -> None:
    """List segments, so that another process can remove them."""
    if folder is not None:
        with (Path(folder) / LIST).open("a", encoding="utf-8") as file:
            file.write("".join(f"{name}\n" for name in names))


def noted(folder: Path) -> list[str]:
    """Return the names of the listed segments."""
    return (folder / LIST).read_text(encoding="utf-8").splitlines() if (folder / LIST).is_file() else []


def remove(names: Iterable[str]) -> None:
    """Remove those segments that still exist and belong to this user. The caller guarantees that no process uses
    them."""
    for name in names:
        with suppress(OSError, ValueError):
            segment = SHARED_MEMORY / name
            if segment.name == name and segment.lstat().st_uid == os.getuid():
                segment.unlink()
