"""Log files of a run, and their new lines. Imports only the standard library."""

import os
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ppoctl.store.run_paths import RunPaths

CONSOLE = "console"
"""Log of the lines that an attempt printed to its terminal."""
KINDS = {CONSOLE: r"console\.log", "engines": r"vllm-.*\.log", "ranks": r"[a-z]+-\d+\.log", "all": r".*"}
"""Kinds of log files of an attempt, and the patterns of their names."""
SLURM = "slurm"
"""Kind of the log files of Slurm jobs."""
BLOCK_BYTES = 1 << 20
"""Largest number of bytes that is read at once."""


def of_attempt(paths: RunPaths, number: int) -> list[Path]:
    """Return the log files of one attempt, the console first."""
    folder = paths.attempt(number)
    files = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    return sorted(files, key=lambda path: (path.name != f"{CONSOLE}.log", _by_number(path)))


def of_slurm(paths: RunPaths) -> list[Path]:
    """Return the log files of Slurm jobs, oldest job first."""
    logs = paths.logs.glob("slurm-*.log") if paths.logs.is_dir() else ()
    return sorted((path for path in logs if path.is_file()), key=_by_number)


def chosen(paths: RunPaths, what: str, attempt: int | None) -> list[Path]:
    """Return the files for `what`: one of `KINDS`, `SLURM`, or the name of a file with or without `.log`.

    Without an attempt number, returns the files of the newest attempt that has any. If no attempt has a console log
    yet, returns the log of the newest Slurm job instead.
    """
    if what == SLURM:
        return of_slurm(paths)
    pattern = KINDS.get(what, rf"{re.escape(what)}(\.log)?")
    for number in reversed(paths.attempts()) if attempt is None else (attempt,):
        if files := [path for path in of_attempt(paths, number) if re.fullmatch(pattern, path.name)]:
            return files
    if attempt is not None:
        return []
    written = of_slurm(paths)
    return written[-1:] if what == CONSOLE else [path for path in written if re.fullmatch(pattern, path.name)]


@dataclass
class Tail:
    """Reader of new lines of a file. The file may not exist yet, grow, be truncated, or be replaced."""

    path: Path
    _inode: int = 0
    _offset: int = 0
    _rest: bytes = b""
    """Start of a line that is not complete yet."""

    def skip_to_last(self, lines: int) -> None:
        """Skip all but the last `lines` lines of the present content."""
        try:
            with self.path.open("rb") as file:
                self._inode = os.fstat(file.fileno()).st_ino
                last = deque((len(line) for line in file), maxlen=lines)
                self._offset = file.tell() - sum(last)
        except FileNotFoundError:
            pass

    def new(self) -> Iterator[list[str]]:
        """Yield the complete lines that were added since the last call, a few thousand at a time."""
        while data := self._read():
            *whole, self._rest = (self._rest + data).split(b"\n")
            if whole:
                yield [line.decode("utf-8", errors="replace") for line in whole]

    def rest(self) -> list[str]:
        """Return the incomplete last line; an empty list if the last line is complete."""
        rest, self._rest = self._rest, b""
        return [rest.decode("utf-8", errors="replace")] if rest else []

    def _read(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset, self._rest = status.st_ino, 0, b""
                file.seek(self._offset)
                data = file.read(BLOCK_BYTES)
        except FileNotFoundError:
            self._offset, self._rest = 0, b""
            return b""
        self._offset += len(data)
        return data


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts `actor-10` after `actor-9`."""
    return [(int(word) if word.isdigit() else -1, word) for word in re.split(r"(\d+)", path.name)]
