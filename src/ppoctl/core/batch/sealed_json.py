"""JSON with a checksum of its own text, so that a reader detects a flipped bit. This module imports only the standard
library.

The text is one document (a manifest, a recipe of a run) or one line of a growing file (journal, ledger); the checksum
is its last field. If the process is killed, such a file has at most one unterminated line at its end. Any other
unreadable line is damage, and the error names that line.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppoctl.core.errors import CorruptArtifactError, quoted

_SEAL = re.compile(r',\s+"seal": "([0-9a-f]{16})"\s?\}\s?\Z')


class ChecksumMismatchError(ValueError):
    """The text does not match its checksum, or has no checksum."""


@dataclass(frozen=True)
class SealedLine:
    """One line of a growing file."""

    body: dict[str, Any]
    end: int
    """Offset after the line, where reading continues."""


def seal(body: Mapping[str, Any], *, indent: int | None = None) -> str:
    """Return the JSON text of a non-empty `body`, with the checksum as its last field."""
    stem = json.dumps(body, sort_keys=True, indent=indent)[:-1].rstrip("\n")
    space, end = (" ", "}") if indent is None else ("\n" + " " * indent, "\n}\n")
    return f'{stem},{space}"seal": "{_checksum(stem)}"{end}'


def unseal(text: str) -> dict[str, Any]:
    """Return the sealed body. Raises ChecksumMismatchError if the text was changed or has no checksum."""
    seal_match = _SEAL.search(text)
    if seal_match is None:
        raise ChecksumMismatchError("it has no checksum at its end")
    if _checksum(text[: seal_match.start()]) != seal_match[1]:
        raise ChecksumMismatchError("it does not match its own checksum")
    body = dict(json.loads(text))
    del body["seal"]
    return body


def is_as_sealed(raw: bytes) -> bool:
    """Whether a line matches its checksum. The line is not parsed."""
    stem, _, checksum = raw.rpartition(b', "seal": "')
    return hashlib.sha256(stem).hexdigest()[:16].encode() == checksum[:-2]


def sealed_line(body: Mapping[str, Any]) -> bytes:
    """Return one line to append to a file."""
    return seal(body).encode("ascii") + b"\n"


def whole_lines(path: Path, data: bytes, *, offset: int = 0, line_number: int = 1) -> Iterator[SealedLine]:
    """Yield the terminated lines of `data`, which begins at `offset` of the file with line number `line_number`.

    Raises CorruptArtifactError that names the first line that was changed after it was written.
    """
    for number, raw in enumerate(data.split(b"\n")[:-1], start=line_number):
        offset += len(raw) + 1
        try:
            yield SealedLine(unseal(raw.decode("ascii")), offset)
        except ValueError as error:  # UnicodeDecodeError is a ValueError
            why = error if isinstance(error, ChecksumMismatchError) else "it is not ASCII"
            raise CorruptArtifactError(
                f"`{path}` is corrupt: line {number}: {why}", hint=repair_hint(path.parent)
            ) from error


def intact_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the lines of a damaged file that are terminated and match their checksums."""
    for raw in data.split(b"\n")[:-1]:
        try:
            yield unseal(raw.decode("ascii"))
        except ValueError:
            continue


def repair_hint(run: Path) -> str:
    """Return the command that moves damaged files of a run aside and recomputes what depends on them."""
    return f"move it aside and recompute what depends on it: ppoctl resume {quoted(run)} --allow-missing"


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]
