"""Layout of table rows on a terminal.

If a table is too wide, its cells are wrapped at word boundaries: in the last column first, then in the widest
columns. If the table is still too wide, names are broken after `/`. If the columns still do not fit, each row is
printed as a block of lines.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest

GAP = "  "
WORDS = re.compile(r"\s*\S+")
NAMES = re.compile(r"\s*\S+?(?:/|(?=\s|$))")
SHORT = 12
"""Columns up to this width are never wrapped: `22.9 MiB`, `3h 07m`."""
READABLE = 24
"""Minimum width of the last column while other columns can still be wrapped. The last column contains sentences."""
LONGEST = 30
"""Length of the longest word that the last column is widened for. Longer words, mostly paths, exceed the column."""
INDENT = 4
"""Spaces before a continuation line of a block."""

Texts = Sequence[Sequence[str]]


def widths_in(line_width: int, texts: Texts, breaks: re.Pattern[str]) -> list[int] | None:
    """Return the width of each column, in characters, so that a line has at most `line_width` characters.

    `texts` contains the headers and all rows. `breaks` matches the pieces that a cell may be broken into. The result
    is None if the table does not fit.
    """
    columns = list(zip(*texts, strict=True))
    widths = [max(map(len, column)) for column in columns]
    excess = sum(widths) + len(GAP) * (len(widths) - 1) - line_width
    last = len(widths) - 1
    for number in [last, *sorted(range(last), key=lambda column: -widths[column])]:
        if excess <= 0:
            break
        if number == last:
            least = max(min(_longest(columns[number], WORDS), LONGEST), min(READABLE, widths[number]))
        else:
            least = max(_longest(columns[number], breaks), SHORT)
        cut = min(excess, max(widths[number] - least, 0))
        widths[number] -= cut
        excess -= cut
    return widths if excess <= 0 else None


def wrapped(text: str, width: int, breaks: re.Pattern[str] = WORDS) -> list[str]:
    """Return the text in lines of at most `width` characters. A longer piece has a line to itself."""
    if len(text) <= width:
        return [text]
    lines, line = [], ""
    for piece in breaks.findall(text):
        if line and len(line + piece) > width:
            lines.append(line)
            line = piece.lstrip()
        else:
            line += piece
    return [*lines, line]


def laid_out(
    texts: Sequence[str], widths: Sequence[int], right: Sequence[bool], breaks: re.Pattern[str]
) -> list[str]:
    """Return one row as lines. `right`: for each column, whether it is right-aligned."""
    last = len(widths) - 1
    cells = [
        wrapped(text, width, WORDS if number == last else breaks)
        for number, (text, width) in enumerate(zip(texts, widths, strict=True))
    ]
    return [
        GAP.join(
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in zip_longest(*cells, fillvalue="")
    ]


def block(texts: Sequence[str], headers: Sequence[str], line_width: int) -> Iterator[str]:
    """Yield one row as a block: its first cell, then the other cells on indented lines, each after its header."""
    names = headers or [""] * len(texts)
    cells = [(name, text) for name, text in zip(names, texts, strict=True) if text not in ("", "-")]
    if not cells:
        return
    yield cells[0][1]
    line = ""
    for name, text in cells[1:]:
        piece = f"{name}: {text}" if name else text
        if line and len(f"{line}   {piece}") <= line_width - INDENT:
            line = f"{line}   {piece}"
            continue
        yield from _indented(line, line_width)
        line = piece
    yield from _indented(line, line_width)


def _indented(text: str, line_width: int) -> Iterator[str]:
    first, *others = wrapped(text, line_width - INDENT)
    if first:
        yield f"  {first}"
    yield from (f"{'':{INDENT}}{other}" for other in others)


def _longest(texts: Sequence[str], breaks: re.Pattern[str]) -> int:
    return max((len(piece.strip()) for text in texts for piece in breaks.findall(text)), default=0)
