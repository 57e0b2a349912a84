"""Checks that folders can be written. They create a file, since only a write detects quotas and read-only disks.

Imports no torch.
"""

import os
import tempfile
from pathlib import Path

from ppoctl.core.errors import RecipeError, StorageError, quoted
from ppoctl.store.disk_errors import existing


def require_writable(folder: Path) -> None:
    """Raise StorageError if no file can be created in this folder, or if the folder cannot be created."""
    for link in (folder, *folder.parents):
        if os.path.islink(link) and not os.access(link, os.F_OK):  # noqa: PTH114 - see below
            raise StorageError(
                f"`{link}` is a link to `{os.path.realpath(link)}`, which does not exist",
                hint=f"mkdir -p {quoted(os.path.realpath(link))}",
            )
    above = existing(folder)
    if not os.path.isdir(above):  # noqa: PTH112 - `Path.is_dir` raises if a parent folder cannot be searched
        raise StorageError(f"`{above}` is a file, but `{folder}` must be a folder", hint=f"ls -l {quoted(above)}")
    try:
        with tempfile.TemporaryDirectory(dir=above, prefix=".ppoctl-"):
            pass
    except OSError as error:
        raise StorageError(
            f"cannot write in `{above}`: {error.strerror or error}", hint=f"ls -ld {quoted(above)}"
        ) from error


def require_new(path: Path, option: str) -> None:
    """Raise RecipeError if `path` exists; StorageError if it cannot be created in its folder.

    `option` is the name of the path's argument in the hint.
    """
    if os.path.lexists(path):
        # The hint is not `rm`: a mistyped OUT may be a folder of runs.
        aside = f"mv {quoted(path)} {quoted(f'{path}.old')}"
        raise RecipeError(f"`{path}` exists", hint=f"name another {option}, or move it away: {aside}")
    if not os.path.isdir(path.parent):  # noqa: PTH112 - as above
        raise StorageError(f"`{path.parent}` is not a folder", hint=f"mkdir -p {quoted(path.parent)}")
    require_writable(path.parent)
