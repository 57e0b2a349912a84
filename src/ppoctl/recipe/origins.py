"""Where each value was set: dotted keys, and the line of each key in a TOML file (tomllib gives values, no lines).

The scanner reads text that tomllib has already accepted, so it checks nothing; it only has to walk past strings,
comments and brackets.
"""

import json
import re
from bisect import bisect_right

KeyPath = tuple[str, ...]
DEFAULT = "default"

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|' + r"'''.*?'{3,5}|" + r'"(?:\\.|[^"\\])*"|' + r"'[^']*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}\n#]*")


def dotted(path: KeyPath) -> str:
    """The key path as TOML spells it: parts that are no bare key are quoted."""
    return ".".join(part if _BARE.fullmatch(part) else json.dumps(part, ensure_ascii=False) for part in path)


def lines_of(text: str) -> dict[KeyPath, int]:
    """The line (from 1) on which each key and each table of a TOML document first stands."""
    return _Scanner(text).scan()


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._breaks = [match.start() for match in re.finditer("\n", text)]
        self._lines: dict[KeyPath, int] = {}
        self._counts: dict[KeyPath, int] = {}

    def scan(self) -> dict[KeyPath, int]:
        prefix: KeyPath = ()
        self._skip(_BLANK)
        while self._at < len(self._text):
            if self._text[self._at] == "[":
                prefix = self._header()
            else:
                self._pair(prefix)
            self._skip(_BLANK)
        return self._lines

    def _header(self) -> KeyPath:
        line = self._line()
        is_array = self._text.startswith("[[", self._at)
        self._at += 2 if is_array else 1
        path = self._key()
        self._at += 2 if is_array else 1
        self._mark(path, line)
        if is_array:
            index = self._counts[path] = self._counts.get(path, -1) + 1
            path = (*path, str(index))
            self._mark(path, line)
        return path

    def _pair(self, prefix: KeyPath) -> None:
        line = self._line()
        path = (*prefix, *self._key())
        self._mark(path, line)
        self._at += 1  # the equals sign
        self._skip(_BLANK)
        self._value(path)

    def _key(self) -> KeyPath:
        parts: list[str] = []
        while True:
            self._skip(_BLANK)
            quoted = _STRING.match(self._text, self._at)
            bare = quoted or _BARE.match(self._text, self._at)
            if bare is None:
                return tuple(parts)
            parts.append(_unquoted(bare.group()) if quoted else bare.group())
            self._at = bare.end()
            self._skip(_BLANK)
            if self._text[self._at : self._at + 1] != ".":
                return tuple(parts)
            self._at += 1

    def _value(self, path: KeyPath) -> None:
        opening = self._text[self._at : self._at + 1]
        if opening in ("{", "["):
            self._bracket(path, "}" if opening == "{" else "]")
        elif not self._skip(_STRING):
            self._skip(_SCALAR)

    def _bracket(self, path: KeyPath, closing: str) -> None:
        """Walk over an inline table or an array."""
        self._at += 1
        count = 0
        self._skip(_BLANK)
        while self._at < len(self._text) and self._text[self._at] != closing:
            if closing == "}":
                self._pair(path)
            else:
                self._mark((*path, str(count)), self._line())
                self._value((*path, str(count)))
                count += 1
            self._skip(_BLANK)
            if self._text[self._at : self._at + 1] == ",":
                self._at += 1
            self._skip(_BLANK)
        self._at += 1

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        match = pattern.match(self._text, self._at)
        if match is None:
            return False
        self._at = match.end()
        return True

    def _line(self) -> int:
        return bisect_right(self._breaks, self._at - 1) + 1

    def _mark(self, path: KeyPath, line: int) -> None:
        for length in range(1, len(path) + 1):
            self._lines.setdefault(path[:length], line)


def _unquoted(text: str) -> str:
    if text.startswith("'"):
        return text[1:-1]
    try:
        return str(json.loads(text))
    except ValueError:  # \U0001F600 and the like: TOML's escapes are a superset of JSON's
        return text[1:-1]
