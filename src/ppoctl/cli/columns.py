"""Rows as lines of a terminal. What is too wide for it goes on below itself, at word boundaries: the last column
first, then the widest; names are broken behind `/` where words are not enough; and where there is no room for columns
at all, each row becomes a block."""

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest

GAP = "  "
WORDS = re.compile(r"\s*\S+")
NAMES = re.compile(r"\s*\S+?(?:/|(?=\s|$))")
SHORT = 12
"""Columns up to this width are never broken: `22.9 MiB`, `3h 07m`."""
READABLE = 24
"""The last column, which holds sentences, is made no narrower for others that can be broken."""
LONGEST = 30
"""Longer words than this, paths mostly, run over the edge of the last column rather than widen it."""
INDENT = 4
"""How far a line of a block that goes on is indented."""

Texts = Sequence[Sequence[str]]


def widths_in(room: int, texts: Texts, breaks: re.Pattern[str]) -> list[int] | None:
    """Widths of the columns where `texts`, all rows and the headers, fit the room when broken so; None: they do
    not."""
    columns = list(zip(*texts, strict=True))
    widths = [max(map(len, column)) for column in columns]
    excess = sum(widths) + len(GAP) * (len(widths) - 1) - room
    last = len(widths) - 1
    for number in [last, *sorted(range(last), key=lambda column: -widths[column])]:
        if excess <= 0:
            break
        if number == last:
            least = max(min(_longest(columns[number], WORDS), LONGEST), min(READABLE, widths[number]))
        else:
            least = max(_longest(columns[number], breaks), SHORT)
        given = min(excess, max(widths[number] - least, 0))
        widths[number] -= given
        excess -= given
    return widths if excess <= 0 else None


def wrapped(text: str, width: int, breaks: re.Pattern[str] = WORDS) -> list[str]:
    """The text in lines of that width; a piece that is longer has a line to itself."""
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
    """One row as lines. `right`: columns whose text stands at their right edge."""
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


def block(texts: Sequence[str], headers: Sequence[str], room: int) -> Iterator[str]:
    """One row without columns: its first cell, and below it what the others say, each behind its header."""
    names = headers or [""] * len(texts)
    told = [(name, text) for name, text in zip(names, texts, strict=True) if text not in ("", "-")]
    if not told:
        return
    yield told[0][1]
    line = ""
    for name, text in told[1:]:
        piece = f"{name}: {text}" if name else text
        if line and len(f"{line}   {piece}") <= room - INDENT:
            line = f"{line}   {piece}"
            continue
        yield from _indented(line, room)
        line = piece
    yield from _indented(line, room)


def _indented(text: str, room: int) -> Iterator[str]:
    first, *others = wrapped(text, room - INDENT)
    if first:
        yield f"  {first}"
    yield from (f"{'':{INDENT}}{other}" for other in others)


def _longest(texts: Sequence[str], breaks: re.Pattern[str]) -> int:
    return max((len(piece.strip()) for text in texts for piece in breaks.findall(text)), default=0)
