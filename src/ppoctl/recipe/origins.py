"""Where each value was set: dotted keys, and the line of each key in a TOML file (tomllib gives values, no lines)."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

KeyPath = tuple[str, ...]
DEFAULT = "default"

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_MAY_END = re.compile(r"\]|\"\"\"|'''")
"""What stands on the last line of a value that began on an earlier one."""


def dotted(path: KeyPath) -> str:
    """The key path as TOML spells it: parts that are no bare key are quoted."""
    return ".".join(part if _BARE.fullmatch(part) else quoted_text(part) for part in path)


def quoted_text(text: str) -> str:
    """A TOML string. Like JSON's but for two things: no surrogate pairs, and DEL must be escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def lines_of(text: str) -> dict[KeyPath, int]:
    """The line (from 1) on which each key and each table of a TOML document first stands. What is inside an array has
    no line of its own; `text` must be TOML."""
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    begun, statement = 1, ""
    # A statement of TOML is one line, or goes on as long as its lines together are no TOML.
    for number, line in enumerate(text.split("\n"), start=1):
        statement += f"{line}\n"
        if number > begun and not _MAY_END.search(line):
            continue
        try:
            paths = list(paths_in(tomllib.loads(statement)))
        except tomllib.TOMLDecodeError:
            continue
        is_heading = statement.lstrip().startswith("[")
        around = () if is_heading else table
        for path in paths:
            lines.setdefault((*around, *path), begun)
        if is_heading:
            table = paths[-1]
        begun, statement = number + 1, ""
    return lines


def paths_in(table: Mapping[str, Any], path: KeyPath = ()) -> Iterator[KeyPath]:
    """Paths of all keys in a table, each before those inside it."""
    for name, value in table.items():
        yield (*path, name)
        if isinstance(value, Mapping):
            yield from paths_in(value, (*path, name))
