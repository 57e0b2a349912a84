"""The destination of a conversion: a folder that appears complete or not at all."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ppoctl.core.batch.digest import flush
from ppoctl.core.errors import RecipeError, StorageError, quoted


@contextmanager
def destination(folder: Path) -> Iterator[Path]:
    """Yield an empty temporary folder next to `folder`. If the block succeeds, the temporary folder is flushed to
    disk and renamed to `folder`; otherwise it is deleted. The next conversion deletes the files of a killed process.

    Raises RecipeError if `folder` exists, and StorageError if another process is writing it or the disk cannot be
    written.
    """
    if os.path.lexists(folder):
        move = f"mv {quoted(folder)} {quoted(f'{folder}.old')}"
        raise RecipeError(f"`{folder}` exists, and is not overwritten", hint=move)
    aside = folder.with_name(f".{folder.name}.converting")
    try:
        aside.mkdir(exist_ok=True)
        lock = os.open(aside, os.O_RDONLY)
    except OSError as error:
        raise _storage_error(folder, error) from error
    try:
        _take(lock, folder)  # the kernel releases the lock even if this process is killed
        try:
            _empty(aside)
            yield aside
            flush_all(aside)
            _require_absent(folder)
            aside.rename(folder)
            flush(folder.parent)
        except OSError as error:
            raise _storage_error(folder, error) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    finally:
        os.close(lock)


def flush_all(folder: Path) -> None:
    """Flush every file and directory under `folder` to disk."""
    for path in (folder, *folder.rglob("*")):
        flush(path)


def _take(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StorageError(
            f"`{folder}` is being written by another process", hint="wait for it, or name another folder"
        ) from error


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _require_absent(folder: Path) -> None:
    """Raise StorageError if the destination exists: a rename would replace an empty folder."""
    if os.path.lexists(folder):
        raise StorageError(f"another process created `{folder}` during the conversion", hint="name another folder")


def _storage_error(folder: Path, error: OSError) -> StorageError:
    path = f"`{error.filename}`" if error.filename else f"`{folder}`"
    return StorageError(f"cannot write {path}: {error.strerror or error}", hint=f"df -h {quoted(folder.parent)}")
