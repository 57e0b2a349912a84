"""Atomic artifacts: written aside, flushed, digested, manifest last, then renamed onto a name that must not exist.

A reader sees either nothing or everything. What a killed writer leaves (`*.attempt-N`) is swept by the next attempt.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from ppoctl.errors import StorageError
from ppoctl.store.attempt import Attempt
from ppoctl.store.layout import MANIFEST, RunLayout
from ppoctl.store.manifest import FileDigest, Manifest, file_digest

Moment = Callable[[str], None]
"""Told where a commit is: `writing`, `written`, `renamed`. Drills kill the process there."""


def commit(
    folder: Path, write: Callable[[Path], None], manifest: Manifest, attempt: Attempt, moment: Moment
) -> Manifest:
    """Publish what `write` puts into an empty folder, as `folder`. Returns the manifest with the files' digests.

    Raises SupersededError when a newer attempt runs, StorageError when the disk does not take it; in both cases
    nothing is published and nothing published before is touched.
    """
    aside = folder.with_name(f"{folder.name}.attempt-{attempt.number}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        moment("writing")
        write(aside)
        complete = replace(manifest, files=_flush_and_digest(aside))
        _write_flushed(aside / MANIFEST, complete.to_json().encode("ascii"))
        flush_folder(aside)
        moment("written")
        attempt.require_newest()
        aside.rename(folder)
        flush_folder(folder.parent)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        attempt.require_newest()  # a newer attempt sweeps what this one was writing
        raise storage_error(folder, error) from error
    moment("renamed")
    return complete


def storage_error(path: Path, error: OSError) -> StorageError:
    """The named error for a failed write."""
    return StorageError(
        f"cannot write `{path}`: {error.strerror or error}",
        hint=f"free space or rights are missing, nothing committed is lost: df -h {path.parent}",
    )


def sweep(layout: RunLayout) -> None:
    """Remove what killed attempts left half-written or half-removed: every folder without a manifest but `*.parts`.

    Left there it would stand in the way of the rename, should the same artifact be made again.
    """
    for parent in (*_children(layout.steps), *_children(layout.states)):
        for folder in _children(parent):
            is_complete = (folder / MANIFEST).is_file() and ".attempt-" not in folder.name
            if not is_complete and folder.suffix != ".parts":
                shutil.rmtree(folder, ignore_errors=True)


def write_bytes(files: dict[str, bytes]) -> Callable[[Path], None]:
    """A writer of the given files."""

    def write(folder: Path) -> None:
        for name, data in files.items():
            (folder / name).write_bytes(data)

    return write


def write_atomically(path: Path, data: bytes) -> None:
    """Replace one small file so that a reader sees the old or the new content."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        _write_flushed(aside, data)
        aside.replace(path)
        flush_folder(path.parent)
    except OSError as error:
        raise storage_error(path, error) from error


def flush_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_and_digest(folder: Path) -> dict[str, FileDigest]:
    digests: dict[str, FileDigest] = {}
    for path in sorted(_files(folder)):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        digest = file_digest(path)
        assert digest is not None
        digests[path.relative_to(folder).as_posix()] = digest
    return digests


def _write_flushed(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _children(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
