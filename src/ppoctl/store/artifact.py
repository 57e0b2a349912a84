"""Atomic artifacts: a reader sees either nothing or the complete artifact.

The files are written to a temporary folder, flushed and digested. The manifest is written last, and the folder is
then renamed to a name that must not exist. If the writer is killed, the claim of the next attempt removes the
temporary folder.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ppoctl.core.batch.digest import FileDigest, flush, flushed_digest
from ppoctl.core.errors import StorageError, quoted
from ppoctl.store.attempt import Attempt
from ppoctl.store.disk_errors import storage_error
from ppoctl.store.manifest import Manifest
from ppoctl.store.run_paths import MANIFEST, folders

Moment = Callable[[str], None]
"""Callback for the moments of a commit: `writing`, `written`, `renamed`. Fault-injection tests kill the process
at these moments."""


@dataclass(frozen=True)
class Draft:
    """An artifact that is written to a temporary folder, and then published or dropped."""

    folder: Path
    """Path under which the artifact is published."""
    attempt: Attempt
    moment: Moment

    @property
    def aside(self) -> Path:
        """Temporary folder of the artifact."""
        return self.attempt.draft(self.folder)

    @contextmanager
    def work(self) -> Iterator[None]:
        """Enclose the work on the draft. If it fails, the draft is dropped and published artifacts stay unchanged.

        Raises SupersededError if a newer attempt has started; StorageError if the disk rejects a write.
        """
        try:
            yield
        except (OSError, StorageError) as error:
            self.drop()
            self.attempt.require_newest()  # a newer attempt may have removed the draft
            if isinstance(error, OSError):
                raise storage_error(self.folder, error) from error
            raise

    def open(self) -> None:
        """Create the empty folder to write into."""
        self.drop()
        self.aside.mkdir()
        self.moment("writing")

    def publish(
        self, manifest: Manifest, written: Mapping[str, FileDigest], *, in_place_of: bool = False
    ) -> Manifest:
        """Write the manifest, then rename the folder to its published name.

        `written` has the digest of every file in the folder, as the writer computed it; the writer has flushed
        the files. `in_place_of` first removes the artifact that is published under the same name; after a kill in
        between, neither artifact exists. Returns the manifest with the digests. Raises StorageError if the folder
        does not match the digests.
        """
        require_covered(self.aside, written)
        complete = replace(manifest, files=dict(written))
        # Flushed before the rename: after a crash of the machine, a published folder must have all of its files.
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
    """Call `write` with an empty folder, flush and digest the files that it creates, and publish them as `folder`.

    Raises the errors of `Draft.work`.
    """
    draft = Draft(folder, attempt, moment)
    with draft.work():
        draft.open()
        write(draft.aside)
        return draft.publish(manifest, _flush_and_digest(draft.aside))


def require_covered(folder: Path, written: Mapping[str, FileDigest]) -> None:
    """Raise StorageError unless `written` has exactly the files in the folder, each with its size on disk."""
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in _files(folder)}
    hint = f"check whether another process writes into the run directory: ls -la {quoted(folder.parent)}"
    for name in sorted(sizes.keys() | written.keys()):
        path = folder / name
        if name not in written:
            raise StorageError(f"`{path}` has no digest from the process that wrote it", hint=hint)
        if name not in sizes:
            raise StorageError(f"`{path}` has a digest but does not exist", hint=hint)
        if sizes[name] != written[name].size:
            raise StorageError(f"`{path}` has {sizes[name]} bytes, but {written[name].size} were written", hint=hint)


def link_files(source: Path, target: Path) -> None:
    """Hard-link an artifact's files, except its manifest, into `target`; copy them if the disk has no hard links."""
    for path in _files(source):
        if path.name != MANIFEST:
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, copy)
            except OSError:
                shutil.copyfile(path, copy)


def sweep(attempt: Attempt) -> None:
    """Remove folders that earlier versions left half-written or half-removed: without a manifest, except `*.parts`.

    Such a folder would make the rename fail if the same artifact were created again.
    """
    for parent in (*folders(attempt.paths.steps), *folders(attempt.paths.states)):
        for folder in folders(parent):
            is_complete = (folder / MANIFEST).is_file() and ".attempt-" not in folder.name
            if not is_complete and folder.suffix != ".parts":
                attempt.remove(folder)


def write_bytes(files: dict[str, bytes]) -> Callable[[Path], None]:
    """Return a function that writes the given files into a folder."""

    def write(folder: Path) -> None:
        for name, data in files.items():
            (folder / name).write_bytes(data)

    return write


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a small file so that a reader sees either the old or the new content."""
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
