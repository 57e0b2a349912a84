"""The line of each key in a TOML file (tomllib returns values without lines)."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from ppoctl.core.key_path import KeyPath

DEFAULT = "default"

_TOKEN = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*+""""{0,2}'  # the text may end with up to two quotes
    r"|'{3}(?:[^']|'(?!''))*+'{3}'{0,2}"
    r'|"(?:[^"\\]|\\.)*+"'
    r"|'[^']*+'"
    r"|#[^\n]*+"
    r"|[][{}\n]",
    re.DOTALL,
)
"""Tokens that determine the end of a TOML statement: strings and comments (with any content), brackets, line
breaks."""


def lines_of(text: str) -> dict[KeyPath, int]:
    """Return the line (from 1) on which each key and each table of a TOML document first appears.

    Keys inside an array have no line. `text` must be valid TOML.
    """
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    line = 1
    for statement in _statements(f"{text}\n"):
        paths = list(paths_in(tomllib.loads(statement)))
        is_heading = statement.lstrip().startswith("[")
        parent = () if is_heading else table
        for path in paths:
            lines.setdefault((*parent, *path), line)
        if is_heading:
            table = paths[-1]
        line += statement.count("\n")
    return lines


def _statements(text: str) -> Iterator[str]:
    """Yield the statements of a TOML document, each with its last line break; an empty line is a statement too."""
    start = depth = 0
    for token in _TOKEN.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if token[0] == "\n" and depth == 0:
            yield text[start : token.end()]
            start = token.end()


def paths_in(table: Mapping[str, Any], path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of all keys in a table, parents before children."""
    for name, value in table.items():
        yield (*path, name)
        if isinstance(value, Mapping):
            yield from paths_in(value, (*path, name))
