"""JSON that carries a checksum of its own text, so that whoever reads it notices a flipped bit. Light.

One document (a manifest, a recipe of a run) or one line of a file that grows (journal, ledger); the checksum is the
last field. In such a file only a last, unterminated line is what a kill leaves: anything else that cannot be read is
damage, and is named.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppoctl.errors import CorruptArtifactError, quoted

_SEAL = re.compile(r',\s+"seal": "([0-9a-f]{16})"\s?\}\s?\Z')


class ChecksumMismatchError(ValueError):
    """The text is not what was sealed, or was never sealed."""


@dataclass(frozen=True)
class SealedLine:
    """One line of a file that grows."""

    body: dict[str, Any]
    end: int
    """Offset just behind it, where reading can go on."""


def seal(body: Mapping[str, Any], *, indent: int | None = None) -> str:
    """The JSON text of a non-empty `body` with the checksum as its last field."""
    stem = json.dumps(body, sort_keys=True, indent=indent)[:-1].rstrip("\n")
    space, end = (" ", "}") if indent is None else ("\n" + " " * indent, "\n}\n")
    return f'{stem},{space}"seal": "{_checksum(stem)}"{end}'


def unseal(text: str) -> dict[str, Any]:
    """What was sealed. Raises BrokenSealError when the text was changed since."""
    found = _SEAL.search(text)
    if found is None:
        raise ChecksumMismatchError("it has no checksum at its end")
    if _checksum(text[: found.start()]) != found[1]:
        raise ChecksumMismatchError("it does not match its own checksum")
    body = dict(json.loads(text))
    del body["seal"]
    return body


def is_as_sealed(raw: bytes) -> bool:
    """Whether a line matches its own checksum, without reading what it says."""
    stem, _, found = raw.rpartition(b', "seal": "')
    return hashlib.sha256(stem).hexdigest()[:16].encode() == found[:-2]


def sealed_line(body: Mapping[str, Any]) -> bytes:
    """One line to append."""
    return seal(body).encode("ascii") + b"\n"


def whole_lines(path: Path, data: bytes, *, offset: int = 0, line_number: int = 1) -> Iterator[SealedLine]:
    """The terminated lines of `data`, which begins at `offset` of the file and with the given line of it.

    Raises CorruptArtifactError naming the first line that was changed since it was written.
    """
    for number, raw in enumerate(data.split(b"\n")[:-1], start=line_number):
        offset += len(raw) + 1
        try:
            yield SealedLine(unseal(raw.decode("ascii")), offset)
        except ValueError as error:  # UnicodeDecodeError is one
            why = error if isinstance(error, ChecksumMismatchError) else "it is not ASCII"
            raise CorruptArtifactError(
                f"`{path}` is corrupt: line {number}: {why}", hint=repair_hint(path.parent)
            ) from error


def intact_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """What can still be believed of a damaged file: every terminated line that is as it was written."""
    for raw in data.split(b"\n")[:-1]:
        try:
            yield unseal(raw.decode("ascii"))
        except ValueError:
            continue


def repair_hint(run: Path) -> str:
    """The command that sets damage of a run aside and makes again what depends on it."""
    return f"set it aside and make again what depends on it: ppoctl resume {quoted(run)} --allow-missing"


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]
