"""Numbered attempts and the fence between them: every process that works on a run takes the next number; only the
newest may change the run, and it is the file server that refuses the others. Light.

    logs/attempt-3/               one folder per attempt: making it takes the number
    drafts/attempt-3/5f0c2a91/    the newest attempt's own folder
    drafts/attempt-2              an empty file: attempt 2 is closed

Whatever an attempt changes in the run is one rename out of its own folder (what it wrote) or into it (what it
deletes). A claim takes what is in the folders of all earlier attempts, removes those, and puts a file in their place.
From then on an old attempt's rename lacks a folder on one side, however long ago it was decided and however late it
is sent: the gap between a check and the act behind it is harmless, and no listing, no clock and no lock is relied on.
Journal and ledger grow in place; a claim puts copies there, and who had them open writes into a file without a name.
"""

import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ppoctl.batch.digest import flush
from ppoctl.errors import StorageError, SupersededError, quoted
from ppoctl.store.disk import storage_error
from ppoctl.store.run_paths import RunPaths

GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""What a file server answers about a folder that was removed."""
NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)
CLOSE_DEADLINE_S = 120.0
"""Seconds for which a claim tries to empty the folder of an earlier attempt, which may go on writing."""
SET_ASIDE = "discarded."
"""Begin of the names in an attempt's own folder that are kept when the attempt is closed."""


@dataclass(frozen=True)
class Attempt:
    """This process's turn on the run."""

    paths: RunPaths
    number: int
    key: str
    """Name of its own folder, which no other attempt ever has: a run of this name may be deleted and made again."""

    @property
    def own(self) -> Path:
        """Folder in which the attempt prepares what it changes. It goes when a newer attempt starts."""
        return self.paths.drafts(self.number) / self.key

    def draft(self, target: Path) -> Path:
        """Path in the attempt's own folder of what becomes `target` in the run."""
        return self.own / self.paths.inside(target).replace("/", ".")

    def require_newest(self) -> None:
        """Raise SupersededError when another attempt has started since, StorageError when this one's folder is gone.

        The list of attempts may be some seconds old on a network file system. So the attempt also makes a file in its
        own folder, which only the server can answer.
        """
        newest = self.paths.newest_attempt
        if newest > self.number:
            raise SupersededError(
                f"attempt {self.number} of `{self.paths.root}` was superseded by attempt {newest}; "
                "this one stops without publishing",
                hint=f"look at the run: ppoctl status {quoted(self.paths.root)}",
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
        if self.paths.drafts(self.number).is_file():
            return SupersededError(
                f"attempt {self.number} of `{self.paths.root}` was superseded by a newer one; "
                "this one stops without publishing",
                hint=f"look at the run: ppoctl status {quoted(self.paths.root)}",
            )
        return StorageError(
            f"`{self.own}` is gone: something moves or deletes the run's files",
            hint=f"look what is there, then resume: ls {quoted(self.paths.root)}",
        )

    @contextmanager
    def acting(self, path: Path) -> Iterator[None]:
        """Surround a change of `path`. Raises SupersededError where a newer attempt runs, StorageError for whatever
        else the disk refuses."""
        try:
            yield
        except OSError as error:
            self.require_newest()
            raise storage_error(path, error) from error

    def place(self, aside: Path, target: Path) -> None:
        """Give what lies in the attempt's own folder its name in the run: a folder one that must not exist, a file
        also that of an older one. Raises OSError."""
        self._make_folder(target.parent)
        aside.rename(target)
        flush(target.parent)

    def _make_folder(self, folder: Path) -> None:
        if folder.is_dir() or folder == self.paths.root:
            return
        self._make_folder(folder.parent)
        aside = self.draft(folder)
        aside.mkdir(exist_ok=True)
        try:
            aside.rename(folder)
        except OSError as error:
            if error.errno not in NOT_EMPTY:
                raise
            aside.rmdir()  # it is there, and this machine had not heard of it

    def write(self, path: Path, data: bytes) -> None:
        """Make or replace one small file so that a reader sees the old or the new content."""
        aside = self.draft(path)
        with self.acting(path):
            with aside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self.place(aside, path)

    def renew(self, path: Path, size_bytes: int | None = None) -> None:
        """Put a copy of a file that grows, or of its first bytes, in its place: who has it open writes into a file
        without a name from then on."""
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
        """Delete a file or a folder of the run, at once for every reader. Nothing happens where it is not there."""
        if path.exists():
            aside = self.own / f"removed-{secrets.token_hex(4)}"
            with self.acting(path):
                path.rename(aside)
            _delete(aside)

    def close(self) -> None:
        """Remove the attempt's own folder, when it changes nothing any more. A newer attempt may have done that."""
        with suppress(OSError):
            for piece in self.own.iterdir():
                if not piece.name.startswith(SET_ASIDE):
                    _delete(piece)
            self.own.rmdir()
            self.own.parent.rmdir()

    def set_aside(self, path: Path) -> Path:
        """Move a file or a folder of the run into `discarded/`. Returns where it is then."""
        kept = self.free(self.paths.discarded(self.number) / self.paths.inside(path))
        aside = self.own / f"{SET_ASIDE}{self.paths.inside(path).replace('/', '.')}"
        with self.acting(path):
            path.rename(aside)
            self.place(aside, kept)
        return kept

    @staticmethod
    def free(target: Path) -> Path:
        """The path, or one with a number behind its name that does not exist."""
        number, free = 1, target
        while free.exists():
            number, free = number + 1, target.with_name(f"{target.name}.{number + 1}")
        return free


def claim(paths: RunPaths) -> Attempt:
    """Take the next number and close all earlier attempts: when this returns, whatever they still do changes nothing.
    Making the folder is the claim: it fails for all but one of two racing processes.

    Raises StorageError, also where an earlier attempt goes on and on filling its folder; SupersededError where yet
    another claim was faster.
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
    """Raise StorageError where a folder of the run is on another file system: nothing can be renamed into it."""
    parts = (paths.steps, paths.states, paths.logs, paths.drafts(), paths.discarded(1).parent)
    for folder in parts:
        if folder.is_dir() and folder.stat().st_dev != paths.root.stat().st_dev:
            raise StorageError(
                f"`{folder}` is on another file system than its run, and nothing can be renamed into it",
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
        with suppress(FileExistsError, FileNotFoundError, NotADirectoryError):  # a newer one has closed it already
            paths.drafts(number).mkdir()
            attempt.own.mkdir()
            return attempt


def _close(attempt: Attempt, number: int) -> None:
    """Take the folder of an earlier attempt away, and its name. Touches nothing of a newer attempt than this one, so
    it does no harm when it is late."""
    folder = attempt.paths.drafts(number)
    until, pause_s = time.monotonic() + CLOSE_DEADLINE_S, 0.01
    while not _is_closed(folder):
        attempt.require_newest()
        if time.monotonic() > until:
            raise StorageError(
                f"attempt {number} of `{attempt.paths.root}` goes on writing into `{folder}`",
                hint=f"find out where it runs, and end it: ppoctl status {quoted(attempt.paths.root)}",
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
    """Take everything out of the folder of an earlier attempt, piece by piece: what it is about to publish is taken
    whole, or was published whole. Then remove the folder. Raises OSError while there is more."""
    layout, folder = attempt.paths, attempt.paths.drafts(number)
    for own in list(folder.iterdir()):
        for piece in list(own.iterdir()):
            if piece.name.startswith(SET_ASIDE):
                kept = layout.discarded(number) / piece.name.removeprefix(SET_ASIDE)
                attempt.place(piece, attempt.free(kept))
                continue
            aside = attempt.own / f"removed-{secrets.token_hex(4)}"
            piece.rename(aside)
            _delete(aside)
        own.rmdir()
    folder.rmdir()


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
