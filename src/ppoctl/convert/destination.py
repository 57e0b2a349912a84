"""The destination of a conversion: a folder that appears whole or not at all."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ppoctl.batch.digest import flush
from ppoctl.errors import RecipeError, StorageError, quoted


@contextmanager
def destination(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder` to write into. It takes that name when the block ends well, flushed to disk;
    otherwise nothing is left. What a killed process left there is swept by the next one.

    Raises RecipeError when `folder` exists, StorageError when another process is writing it or the disk does not
    take it.
    """
    if os.path.lexists(folder):
        away = f"mv {quoted(folder)} {quoted(f'{folder}.old')}"
        raise RecipeError(f"`{folder}` exists, and nothing is overwritten", hint=away)
    aside = folder.with_name(f".{folder.name}.converting")
    try:
        aside.mkdir(exist_ok=True)
        lock = os.open(aside, os.O_RDONLY)
    except OSError as error:
        raise _storage_error(folder, error) from error
    try:
        _take(lock, folder)  # held until this process ends, however it ends
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
    """Make the operating system write out every file under `folder`, and the names themselves."""
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
    """Raise where the destination exists: a rename would replace an empty folder."""
    if os.path.lexists(folder):
        raise StorageError(f"`{folder}` has appeared while it was being made", hint="name another folder")


def _storage_error(folder: Path, error: OSError) -> StorageError:
    where = f"`{error.filename}`" if error.filename else f"`{folder}`"
    return StorageError(f"cannot write {where}: {error.strerror or error}", hint=f"df -h {quoted(folder.parent)}")
