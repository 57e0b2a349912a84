"""Checks that folders can be written, made by writing: only that knows of rights, quotas and read-only disks.
Light."""

import os
import tempfile
from pathlib import Path

from ppoctl.errors import RecipeError, StorageError, quoted
from ppoctl.store.disk import existing


def require_writable(folder: Path) -> None:
    """Raise StorageError where no file can be made in this folder, or the folder itself cannot be made."""
    for link in (folder, *folder.parents):
        if os.path.islink(link) and not os.access(link, os.F_OK):  # noqa: PTH114 - the same
            raise StorageError(
                f"`{link}` is a link to `{os.path.realpath(link)}`, which is not there",
                hint=f"mkdir -p {quoted(os.path.realpath(link))}",
            )
    above = existing(folder)
    if not os.path.isdir(above):  # noqa: PTH112 - no error where a folder above is closed
        raise StorageError(f"`{above}` is a file, and `{folder}` is to be a folder", hint=f"ls -l {quoted(above)}")
    try:
        with tempfile.TemporaryDirectory(dir=above, prefix=".ppoctl-"):
            pass
    except OSError as error:
        raise StorageError(
            f"cannot write in `{above}`: {error.strerror or error}", hint=f"ls -ld {quoted(above)}"
        ) from error


def require_new(path: Path, option: str) -> None:
    """Raise RecipeError where `path` exists, StorageError where it cannot be made in its folder. `option`: how the
    hint names another path."""
    if os.path.lexists(path):
        # Not `rm`: whoever mistypes OUT may have named a folder of runs.
        aside = f"mv {quoted(path)} {quoted(f'{path}.old')}"
        raise RecipeError(f"`{path}` exists", hint=f"name another {option}, or put it aside: {aside}")
    if not os.path.isdir(path.parent):  # noqa: PTH112 - the same
        raise StorageError(f"`{path.parent}` is no folder", hint=f"mkdir -p {quoted(path.parent)}")
    require_writable(path.parent)
