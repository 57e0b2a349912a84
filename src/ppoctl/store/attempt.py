"""Numbered attempts and the fence between them. Imports no torch.

Every process that works on a run takes the next number. Only the newest attempt may change the run, and the file
server enforces this:

    logs/attempt-3/               one folder per attempt: creating it takes the number
    drafts/attempt-3/5f0c2a91/    the newest attempt's private folder
    drafts/attempt-2              an empty file: attempt 2 is closed

An attempt changes the run only by renames: out of its private folder (files that it wrote) or into it (files that it
deletes). A claim empties the private folders of all earlier attempts, removes them, and creates a file in place
of each. After that, every rename of an older attempt fails, because its source or target folder is missing. It fails
even if the older attempt decided on the rename before the claim. So it is harmless if a claim comes between a check
and the change after it. The fence does not depend on a listing, a clock or a lock. Journal and ledger grow in place.
A claim replaces the two files by copies, so that an older attempt that has them open writes into unlinked files.
"""

import errno
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ppoctl.core.batch.digest import flush
from ppoctl.core.errors import StorageError, SupersededError, quoted
from ppoctl.store.disk_errors import storage_error
from ppoctl.store.run_paths import RunPaths

GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""Error numbers of a file server for a folder that was removed."""
NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)
CLOSE_DEADLINE_S = 120.0
"""Seconds for which a claim tries to empty the folder of an earlier attempt. That attempt may still be writing."""
_MAKING = threading.Lock()
"""Held while a folder is created: two threads of an attempt would use one draft of it."""
SET_ASIDE = "discarded."
"""Prefix of the entries in an attempt's private folder that are kept when the attempt is closed."""


@dataclass(frozen=True)
class Attempt:
    """This process's claim on the run."""

    paths: RunPaths
    number: int
    key: str
    """Unique name of the private folder. The number alone is not unique: a run can be deleted and created again."""

    @property
    def own(self) -> Path:
        """Private folder in which the attempt prepares its changes. A newer attempt removes it at its start."""
        return self.paths.drafts(self.number) / self.key

    def draft(self, target: Path) -> Path:
        """Return the path in the private folder for a file or folder that is later renamed to `target`."""
        return self.own / self.paths.inside(target).replace("/", ".")

    def require_newest(self) -> None:
        """Raise SupersededError if a newer attempt has started; StorageError if the private folder is missing.

        The list of attempts may be some seconds old on a network file system. So the attempt also creates a file in
        its private folder: a network client cannot answer this call from its cache.
        """
        newest = self.paths.newest_attempt
        if newest > self.number:
            raise SupersededError(
                f"attempt {self.number} of `{self.paths.root}` was superseded by attempt {newest}; "
                "this attempt stops without publishing",
                hint=f"check the run: ppoctl status {quoted(self.paths.root)}",
            )
        probe = self.own / f"alive-{secrets.token_hex(4)}"
        try:
            os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            probe.unlink()
        except OSError as error:
            if error.errno not in GONE:
                raise storage_error(probe, error) from error
            raise self._closed() from error

    def _closed(self) -> StorageError:
        # Between the removal of the folder and the creation of the file, only the list shows the newer attempt.
        if self.paths.drafts(self.number).is_file() or self.paths.newest_attempt > self.number:
            return SupersededError(
                f"attempt {self.number} of `{self.paths.root}` was superseded by a newer one; "
                "this attempt stops without publishing",
                hint=f"check the run: ppoctl status {quoted(self.paths.root)}",
            )
        return StorageError(
            f"`{self.own}` is missing: another process moves or deletes the run's files",
            hint=f"check which files exist, then resume: ls {quoted(self.paths.root)}",
        )

    @contextmanager
    def acting(self, path: Path) -> Iterator[None]:
        """Enclose a change of `path` and translate its errors.

        Raises SupersededError if a newer attempt runs; StorageError for any other OSError.
        """
        try:
            yield
        except OSError as error:
            self.require_newest()
            raise storage_error(path, error) from error

    def place(self, aside: Path, target: Path) -> None:
        """Rename `aside`, an entry of the private folder, to `target` in the run.

        A file replaces an older file; for a folder, `target` must not exist yet. Raises OSError.
        """
        self._make_folder(target.parent)
        aside.rename(target)
        # Otherwise a crash of the machine could undo the rename.
        flush(target.parent)

    def _make_folder(self, folder: Path) -> None:
        with _MAKING:
            self._make_folders(folder)

    def _make_folders(self, folder: Path) -> None:
        if folder.is_dir() or folder == self.paths.root:
            return
        self._make_folders(folder.parent)
        aside = self.draft(folder)
        aside.mkdir(exist_ok=True)
        try:
            aside.rename(folder)
        except OSError as error:
            if error.errno not in NOT_EMPTY:
                raise
            aside.rmdir()  # the folder exists; the cache of this machine did not show it

    def write(self, path: Path, data: bytes) -> None:
        """Create or replace a small file so that a reader sees either the old or the new content."""
        aside = self.draft(path)
        with self.acting(path):
            with aside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self.place(aside, path)

    def renew(self, path: Path, size_bytes: int | None = None) -> None:
        """Replace a growing file by a copy of it, or by a copy of its first `size_bytes` bytes.

        A process that has the old file open then writes into an unlinked file.
        """
        aside = self.draft(path)
        with self.acting(path):
            with path.open("rb") as old, aside.open("wb") as new:
                shutil.copyfileobj(old, new, 1 << 20)
                if size_bytes is not None:
                    new.truncate(size_bytes)
                new.flush()
                os.fsync(new.fileno())
            self.place(aside, path)

    def remove(self, path: Path) -> None:
        """Delete a file or folder, so that it disappears at once for every reader. A missing path is ignored."""
        if path.exists():
            aside = self.own / f"removed-{secrets.token_hex(4)}"
            with self.acting(path):
                path.rename(aside)
            _delete(aside)

    def close(self) -> None:
        """Remove the private folder after the last change. A newer attempt may already have removed it."""
        with suppress(OSError):
            for entry in self.own.iterdir():
                if not entry.name.startswith(SET_ASIDE):
                    _delete(entry)
            self.own.rmdir()
            self.own.parent.rmdir()

    def set_aside(self, path: Path) -> Path:
        """Move a file or a folder of the run into `discarded/`. Returns its new path."""
        kept = self.free(self.paths.discarded(self.number) / self.paths.inside(path))
        aside = self.own / f"{SET_ASIDE}{self.paths.inside(path).replace('/', '.')}"
        with self.acting(path):
            path.rename(aside)
            self.place(aside, kept)
        return kept

    @staticmethod
    def free(target: Path) -> Path:
        """Return the path if it does not exist; otherwise the path with the first unused number at its end."""
        number, free = 1, target
        while free.exists():
            number, free = number + 1, target.with_name(f"{target.name}.{number + 1}")
        return free


def claim(paths: RunPaths) -> Attempt:
    """Take the next number and close all earlier attempts. After the call, they can no longer change the run.

    Creating the attempt's folder is the claim: if two processes try, only one succeeds. Raises StorageError, also if
    an earlier attempt keeps writing into its folder; SupersededError if another claim was faster.
    """
    _require_one_disk(paths)
    try:
        attempt = _take_number(paths)
        for number in range(1, attempt.number):
            _close(attempt, number)
    except OSError as error:
        raise StorageError(
            f"cannot write to run directory `{paths.root}`: {error.strerror}",
            hint=f"check owner and free space: ls -ld {quoted(paths.root)}; df -h {quoted(paths.root)}",
        ) from error
    for path in (paths.journal, paths.ledger):
        if path.is_file():
            attempt.renew(path)
    return attempt


def _require_one_disk(paths: RunPaths) -> None:
    """Raise StorageError if a folder of the run is on another file system: nothing can be renamed into it."""
    folders = (paths.steps, paths.states, paths.logs, paths.drafts(), paths.discarded(1).parent)
    for folder in folders:
        if folder.is_dir() and folder.stat().st_dev != paths.root.stat().st_dev:
            raise StorageError(
                f"`{folder}` is on another file system than its run; ppoctl cannot rename files into it",
                hint=f"move the whole run there: mv {quoted(paths.root)} {quoted(folder.resolve().parent)}",
            )


def _take_number(paths: RunPaths) -> Attempt:
    paths.logs.mkdir(parents=True, exist_ok=True)
    paths.drafts().mkdir(exist_ok=True)
    number = paths.newest_attempt
    while True:
        number += 1
        attempt = Attempt(paths, number, secrets.token_hex(4))
        try:
            paths.attempt(number).mkdir()
        except FileExistsError:
            continue
        # These errors mean that a newer attempt has already closed this one: take the next number.
        with suppress(FileExistsError, FileNotFoundError, NotADirectoryError):
            paths.drafts(number).mkdir()
            attempt.own.mkdir()
            return attempt


def _close(attempt: Attempt, number: int) -> None:
    """Remove the private folders of an earlier attempt and put a file in their place.

    Folders of an attempt that is newer than `attempt` are not changed, so a late call does no harm.
    """
    folder = attempt.paths.drafts(number)
    until, pause_s = time.monotonic() + CLOSE_DEADLINE_S, 0.01
    while not _is_closed(folder):
        attempt.require_newest()
        if time.monotonic() > until:
            raise StorageError(
                f"attempt {number} of `{attempt.paths.root}` continues to write into `{folder}`",
                hint=f"find out where it runs, and stop it: ppoctl status {quoted(attempt.paths.root)}",
            )
        try:
            _empty(attempt, number)
        except OSError as error:
            if error.errno not in (*NOT_EMPTY, *GONE):
                raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)


def _is_closed(folder: Path) -> bool:
    try:
        os.close(os.open(folder, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return folder.is_file()
    return True


def _empty(attempt: Attempt, number: int) -> None:
    """Move every entry out of the folder of an earlier attempt, then remove the folder.

    Each entry moves by one rename: either this attempt gets it complete, or the earlier attempt has published it.
    Raises OSError while entries remain.
    """
    paths, folder = attempt.paths, attempt.paths.drafts(number)
    for own in list(folder.iterdir()):
        for entry in list(own.iterdir()):
            if entry.name.startswith(SET_ASIDE):
                kept = paths.discarded(number) / entry.name.removeprefix(SET_ASIDE)
                attempt.place(entry, attempt.free(kept))
                continue
            aside = attempt.own / f"removed-{secrets.token_hex(4)}"
            entry.rename(aside)
            _delete(aside)
        own.rmdir()
    folder.rmdir()


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
