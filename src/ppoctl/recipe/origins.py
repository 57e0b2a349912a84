"""Where each value was set: dotted keys, and the line of each key in a TOML file (tomllib gives values, no lines)."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

KeyPath = tuple[str, ...]
DEFAULT = "default"

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_TOKEN = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*+""""{0,2}'  # two more quotes may stand before those that end it
    r"|'{3}(?:[^']|'(?!''))*+'{3}'{0,2}"
    r'|"(?:[^"\\]|\\.)*+"'
    r"|'[^']*+'"
    r"|#[^\n]*+"
    r"|[][{}\n]",
    re.DOTALL,
)
"""What decides where a statement of TOML ends: strings and comments, in which anything may stand, brackets, ends of
lines."""


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
    begun = 1
    for statement in _statements(f"{text}\n"):
        paths = list(paths_in(tomllib.loads(statement)))
        is_heading = statement.lstrip().startswith("[")
        around = () if is_heading else table
        for path in paths:
            lines.setdefault((*around, *path), begun)
        if is_heading:
            table = paths[-1]
        begun += statement.count("\n")
    return lines


def _statements(text: str) -> Iterator[str]:
    """The statements of a TOML document, each up to the end of its last line; a line that says nothing is one too."""
    start = depth = 0
    for token in _TOKEN.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if token[0] == "\n" and depth == 0:
            yield text[start : token.end()]
            start = token.end()


def paths_in(table: Mapping[str, Any], path: KeyPath = ()) -> Iterator[KeyPath]:
    """Paths of all keys in a table, each before those inside it."""
    for name, value in table.items():
        yield (*path, name)
        if isinstance(value, Mapping):
            yield from paths_in(value, (*path, name))
