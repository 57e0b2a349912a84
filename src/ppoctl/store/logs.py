"""Log files of a run: which there are, and what is new in them. Light."""

import os
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ppoctl.store.run_paths import RunPaths

CONSOLE = "console"
"""Log of what an attempt said to whoever typed the command."""
KINDS = {CONSOLE: r"console\.log", "engines": r"vllm-.*\.log", "ranks": r"[a-z]+-\d+\.log", "all": r".*"}
"""Words for log files of an attempt, and the names that they stand for."""
SLURM = "slurm"
"""Word for what Slurm wrote of each job."""
BLOCK_BYTES = 1 << 20
"""Most bytes that are read at once."""


def of_attempt(paths: RunPaths, number: int) -> list[Path]:
    """The log files of one attempt, the console first."""
    folder = paths.attempt(number)
    found = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    return sorted(found, key=lambda path: (path.name != f"{CONSOLE}.log", _by_number(path)))


def of_slurm(paths: RunPaths) -> list[Path]:
    """The files that Slurm wrote, oldest job first."""
    found = paths.logs.glob("slurm-*.log") if paths.logs.is_dir() else ()
    return sorted((path for path in found if path.is_file()), key=_by_number)


def chosen(paths: RunPaths, what: str, attempt: int | None) -> list[Path]:
    """The files that a word stands for: one of `KINDS`, `SLURM`, or the name of a file, with `.log` or without.

    Without a number those of the newest attempt that has any; and before any attempt has a console, what Slurm wrote
    of the newest job.
    """
    if what == SLURM:
        return of_slurm(paths)
    pattern = KINDS.get(what, rf"{re.escape(what)}(\.log)?")
    for number in reversed(paths.attempts()) if attempt is None else (attempt,):
        if found := [path for path in of_attempt(paths, number) if re.fullmatch(pattern, path.name)]:
            return found
    if attempt is not None:
        return []
    written = of_slurm(paths)
    return written[-1:] if what == CONSOLE else [path for path in written if re.fullmatch(pattern, path.name)]


@dataclass
class Tail:
    """How far one file was read. It may not be there yet, grow, be cut, or be replaced by another one."""

    path: Path
    _inode: int = 0
    _offset: int = 0
    _rest: bytes = b""
    """Begin of a line whose end has not come."""

    def skip_to_last(self, lines: int) -> None:
        """Pass over all but the last lines of what is there."""
        try:
            with self.path.open("rb") as file:
                self._inode = os.fstat(file.fileno()).st_ino
                last = deque((len(line) for line in file), maxlen=lines)
                self._offset = file.tell() - sum(last)
        except FileNotFoundError:
            pass

    def new(self) -> Iterator[list[str]]:
        """Whole lines that have come since, a few thousand at a time."""
        while data := self._read():
            *whole, self._rest = (self._rest + data).split(b"\n")
            if whole:
                yield [line.decode("utf-8", errors="replace") for line in whole]

    def rest(self) -> list[str]:
        """The line whose end never came; nothing where the last one has an end."""
        rest, self._rest = self._rest, b""
        return [rest.decode("utf-8", errors="replace")] if rest else []

    def _read(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                told = os.fstat(file.fileno())
                if told.st_ino != self._inode or told.st_size < self._offset:
                    self._inode, self._offset, self._rest = told.st_ino, 0, b""
                file.seek(self._offset)
                data = file.read(BLOCK_BYTES)
        except FileNotFoundError:
            self._offset, self._rest = 0, b""
            return b""
        self._offset += len(data)
        return data


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Key that puts `actor-10` behind `actor-9`."""
    return [(int(word) if word.isdigit() else -1, word) for word in re.split(r"(\d+)", path.name)]
