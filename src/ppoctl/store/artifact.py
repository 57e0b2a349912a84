"""Atomic artifacts: written aside, flushed, digested, manifest last, then renamed onto a name that must not exist.

A reader sees either nothing or everything. What a killed writer leaves goes when the next attempt is claimed.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ppoctl.batch.digest import FileDigest, flush, flushed_digest
from ppoctl.errors import StorageError, quoted
from ppoctl.store.attempt import Attempt
from ppoctl.store.disk import storage_error
from ppoctl.store.manifest import Manifest
from ppoctl.store.run_paths import MANIFEST, folders

Moment = Callable[[str], None]
"""Told where a commit is: `writing`, `written`, `renamed`. Drills kill the process there."""


@dataclass(frozen=True)
class Draft:
    """An artifact that is written aside, to be published or dropped."""

    folder: Path
    """What it is published as."""
    attempt: Attempt
    moment: Moment

    @property
    def aside(self) -> Path:
        """Where it is written."""
        return self.attempt.draft(self.folder)

    @contextmanager
    def work(self) -> Iterator[None]:
        """Around every part of the work: if it fails, nothing is published, and nothing published before is touched.

        Raises SupersededError when a newer attempt runs, StorageError when the disk does not take it.
        """
        try:
            yield
        except (OSError, StorageError) as error:
            self.drop()
            self.attempt.require_newest()  # a newer attempt has taken what this one was writing
            if isinstance(error, OSError):
                raise storage_error(self.folder, error) from error
            raise

    def open(self) -> None:
        """Make the empty folder to write into."""
        self.drop()
        self.aside.mkdir()
        self.moment("writing")

    def publish(
        self, manifest: Manifest, written: Mapping[str, FileDigest], *, in_place_of: bool = False
    ) -> Manifest:
        """Manifest, then the name. `written`: every file in the folder, flushed, as digested by who wrote it.
        `in_place_of`: what is published under the name goes first; a kill between leaves neither.

        Returns the manifest with the files. Raises StorageError when folder and digests do not tell the same.
        """
        require_covered(self.aside, written)
        complete = replace(manifest, files=dict(written))
        _write_flushed(self.aside / MANIFEST, complete.to_text().encode("ascii"))
        flush(self.aside)
        self.moment("written")
        self.attempt.require_newest()
        if in_place_of:
            self.attempt.remove(self.folder)
            self.moment("removed")
        self.attempt.place(self.aside, self.folder)
        self.moment("renamed")
        return complete

    def drop(self) -> None:
        shutil.rmtree(self.aside, ignore_errors=True)


def commit(
    folder: Path, write: Callable[[Path], None], manifest: Manifest, attempt: Attempt, moment: Moment
) -> Manifest:
    """Publish what `write` puts into an empty folder, as `folder`; flushed and digested here. See `Draft`."""
    draft = Draft(folder, attempt, moment)
    with draft.work():
        draft.open()
        write(draft.aside)
        return draft.publish(manifest, _flush_and_digest(draft.aside))


def require_covered(folder: Path, written: Mapping[str, FileDigest]) -> None:
    """Raise StorageError unless `written` has every file in the folder, none besides, each of its size on disk."""
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in _files(folder)}
    hint = f"see whether something else writes into the run directory: ls -la {quoted(folder.parent)}"
    for name in sorted(sizes.keys() | written.keys()):
        path = folder / name
        if name not in written:
            raise StorageError(f"`{path}` was digested by nobody who wrote it", hint=hint)
        if name not in sizes:
            raise StorageError(f"`{path}` was digested and is not there", hint=hint)
        if sizes[name] != written[name].size:
            raise StorageError(f"`{path}` has {sizes[name]} bytes, {written[name].size} were written", hint=hint)


def link_files(source: Path, target: Path) -> None:
    """Give an artifact's files, but its manifest, a second name, or a copy where the disk has no links."""
    for path in _files(source):
        if path.name != MANIFEST:
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, copy)
            except OSError:
                shutil.copyfile(path, copy)


def sweep(attempt: Attempt) -> None:
    """Remove what earlier versions left half-written or half-removed: every folder without a manifest but `*.parts`.

    Left there it would stand in the way of the rename, should the same artifact be made again.
    """
    for parent in (*folders(attempt.paths.steps), *folders(attempt.paths.states)):
        for folder in folders(parent):
            is_complete = (folder / MANIFEST).is_file() and ".attempt-" not in folder.name
            if not is_complete and folder.suffix != ".parts":
                attempt.remove(folder)


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
        flush(path.parent)
    except OSError as error:
        raise storage_error(path, error) from error


def _flush_and_digest(folder: Path) -> dict[str, FileDigest]:
    return {path.relative_to(folder).as_posix(): flushed_digest(path) for path in sorted(_files(folder))}


def _write_flushed(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
