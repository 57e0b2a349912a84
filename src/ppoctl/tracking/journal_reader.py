"""Committed lines of a run's journal, read from any place on. Light: the standard library only.

It does not write and does not mend: a line that is not whole ends what can be read, and the store drops or completes
it at the next start (`store.journal`).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppoctl.errors import CorruptArtifactError

Line = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One committed line and the offset just behind it, where reading can go on."""

    line: Line
    end: int


def entries(path: Path, *, offset: int = 0) -> Iterator[Entry]:
    """Whole lines from `offset` on, which is 0 or the `end` of an earlier entry. No file: no lines."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for raw in file:
            line = _parse(raw)
            if line is None:
                return
            offset += len(raw)
            yield Entry(line, offset)


class JournalTail:
    """Follows a journal that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._seq: int | None = None

    def read(self) -> Iterator[Line]:
        """The lines that came since the last call, in order; each is given once.

        Raises CorruptArtifactError where a number is missing: something other than a kill has changed the file.
        """
        for entry in entries(self._path, offset=self._offset):
            seq = int(entry.line["seq"])
            if self._seq is not None and seq != self._seq + 1:
                raise CorruptArtifactError(
                    f"`{self._path}` goes from line {self._seq} to line {seq}",
                    hint=f"its lines can be made again from the manifests: mv {self._path} {self._path}.old",
                )
            self._offset, self._seq = entry.end, seq
            yield entry.line


def _parse(raw: bytes) -> Line | None:
    """The line, or None when it is torn: cut short by a kill, or glued to the next one after such a cut."""
    if not raw.endswith(b"\n"):
        return None
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "seq" in line else None
