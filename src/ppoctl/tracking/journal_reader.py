"""Committed lines of a run's journal, read from any place on. Light: the standard library only.

It does not write and does not mend: what a kill left of a last line is not read, and the store drops it at the next
start (`store.journal`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ppoctl.batch.sealed import Line as Entry
from ppoctl.batch.sealed import how_to_mend, whole_lines
from ppoctl.errors import CorruptArtifactError

Line = dict[str, Any]


def entries(path: Path, *, offset: int = 0) -> Iterator[Entry]:
    """Whole lines from `offset` on, which is 0 or the `end` of an earlier one. No file: no lines.

    Raises CorruptArtifactError naming a damaged line.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    yield from whole_lines(path, data, offset=offset)


class JournalTail:
    """Follows a journal that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._seq: int | None = None

    def read(self) -> Iterator[Line]:
        """The lines that came since the last call, in order; each is given once.

        Raises CorruptArtifactError where numbers do not rise: something other than a kill has changed the file.
        """
        for entry in entries(self._path, offset=self._offset):
            seq = int(entry.body["seq"])
            if self._seq is not None and seq <= self._seq:
                raise CorruptArtifactError(
                    f"`{self._path}` goes from line {self._seq} to line {seq}", hint=how_to_mend(self._path.parent)
                )
            self._offset, self._seq = entry.end, seq
            yield entry.body
