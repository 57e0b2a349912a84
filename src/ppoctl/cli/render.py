"""The only place that prints. Data goes to stdout, talk to stderr; colour only on a terminal, and never where
`NO_COLOR` is set. Without a terminal every line is plain, so that a log of a batch job has no control characters."""

import json as json_module
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

from ppoctl.cli import columns


def line(text: str = "") -> None:
    """Print a line of data."""
    print(text, flush=True)


def prose(text: str) -> None:
    """Print sentences: on a terminal they go on below themselves, a little further in; elsewhere they are a line."""
    line(_hung(text, sys.stdout))


def _hung(text: str, stream: TextIO) -> str:
    if not stream.isatty():
        return text
    hang = " " * (len(text) - len(text.lstrip()) + 2)
    first, *others = columns.wrapped(text, shutil.get_terminal_size().columns - len(hang))
    return "\n".join([first, *(f"{hang}{other}" for other in others)])


def printable(text: str) -> str:
    """The text with every control character but line breaks as its escape, since a terminal obeys control characters,
    and every letter that stdout cannot write."""
    safe = "".join(
        char if char == "\n" or char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )
    encoding = sys.stdout.encoding or "utf-8"
    return safe.encode(encoding, "backslashreplace").decode(encoding)


def print_stderr(text: str) -> None:
    """Print a line of talk: progress, notes, what to type next."""
    if _through is None:
        print(text, file=sys.stderr, flush=True)
        return
    for each in text.splitlines() or [""]:
        _through(each)


_through: Callable[[str], None] | None = None
"""What takes a line of talk in place of stderr, while a screen is open."""


@contextmanager
def talking_through(take: Callable[[str], None]) -> Iterator[None]:
    """Context in which `take` gets the lines of talk."""
    global _through
    before, _through = _through, take
    try:
        yield
    finally:
        _through = before


def passing(text: str = "") -> None:
    """Print how far something is, in a line of a terminal that the next one replaces; elsewhere nothing."""
    if on_terminal() and _through is None:
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Whether talk goes to a terminal."""
    return sys.stderr.isatty()


def agreed(question: str) -> bool:
    """Whether whoever sits at the terminal says yes to a question; anything else is a no."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def json(value: Mapping[str, Any]) -> None:
    """Print the one object of a command with `--json`: at once, or as part of `one_object`."""
    if _parts is None:
        print(json_module.dumps(_finite(value), indent=2, default=str, allow_nan=False), flush=True)
    else:
        _parts.update(value)


_parts: dict[str, Any] | None = None
"""Parts of the JSON object that is being put together; None outside of `one_object`."""


@contextmanager
def one_object() -> Iterator[None]:
    """Context of a command that was asked for JSON: whatever it gives, its error included, is printed as one object
    when it has ended, and nothing else reaches stdout (lines of libraries go to stderr)."""
    global _parts
    _parts = {}
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        whole, _parts = _parts, None
        json(whole)


def _finite(value: Any) -> Any:
    """The value with text, `"nan"` or `"inf"`, where JSON has no number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def error(message: str) -> None:
    """Print an error, in lines as `prose` has them. A message of several lines is several errors; an indented line
    belongs to the one above."""
    for text in message.splitlines() or [""]:
        if text.startswith(" "):
            print(_hung(text, sys.stderr), file=sys.stderr)
        else:
            lines = _hung(f"error: {text}", sys.stderr)
            print(lines.replace("error:", _styled("error:", "bold red", sys.stderr), 1), file=sys.stderr)
    sys.stderr.flush()


def hint(text: str) -> None:
    """Print the one command or change that mends an error."""
    print(f"\n{_styled('hint:', 'bold cyan', sys.stderr)} {text}", file=sys.stderr, flush=True)


def heading(text: str) -> None:
    """Print the title of a part of the data."""
    print(_styled(text, "bold", sys.stdout), flush=True)


def table(rows: Sequence[Sequence[object]], headers: Sequence[str] = ()) -> None:
    """Print columns, left-justified; numbers (int, float) to the right. The last column is not padded. On a terminal
    that is too narrow text goes on below itself; elsewhere every row is a line."""
    shown = [[cell(value) for value in row] for row in rows]
    texts = [*([list(headers)] if headers else []), *shown]
    if not texts:
        return
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for breaks in (columns.WORDS, columns.NAMES):
        if (widths := columns.widths_in(room, texts, breaks)) is not None:
            break
    else:
        _blocks(shown, headers, room)
        return
    if headers:
        for text in columns.laid_out(headers, widths, [False] * len(headers), breaks):
            print(_styled(text, "bold", sys.stdout))
    for row, cells in zip(rows, shown, strict=True):
        right = [isinstance(value, int | float) for value in row]
        print("\n".join(columns.laid_out(cells, widths, right, breaks)))
    sys.stdout.flush()


def _blocks(rows: Sequence[Sequence[str]], headers: Sequence[str], room: int) -> None:
    for row in rows:
        for number, text in enumerate(columns.block(row, headers, room)):
            print(text if number else _styled(text, "bold", sys.stdout))
    sys.stdout.flush()


def weighted(pieces: Sequence[str], weights: Sequence[float]) -> str:
    """The text with pieces green where their weight is above 0 and red below, stronger with its size. Plain without
    colour."""
    if not colour(sys.stdout):
        return "".join(pieces)
    largest = max((abs(weight) for weight in weights), default=0.0) or 1.0
    return "".join(_tinted(piece, weight / largest) for piece, weight in zip(pieces, weights, strict=True))


def is_coloured() -> bool:
    """Whether data is coloured."""
    return colour(sys.stdout)


def is_unicode() -> bool:
    """Whether data may have characters beyond ASCII."""
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")


def styled(text: str, style: str) -> str:
    """The text in a style where data is coloured."""
    return _styled(text, style, sys.stdout)


def is_terminal() -> bool:
    """Whether data goes to a terminal, through a pager or not."""
    return sys.stdout.isatty()


def clipped(text: str, cells: int | None) -> str:
    """The text cut to so many columns of a terminal, with `..` where something is missing; None: not cut."""
    from rich.cells import cell_len, set_cell_size

    if cells is None or cell_len(text) <= cells:
        return text
    return f"{set_cell_size(text, max(0, cells - 2)).rstrip()}.."


def colour(stream: TextIO) -> bool:
    """Whether this stream wants colour."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def cell(value: object) -> str:
    """The text of a value in a table."""
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _tinted(text: str, share: float) -> str:
    from rich.style import Style

    level = 60 + int(140 * min(abs(share), 1.0))
    style = f"on rgb(0,{level // 2},0)" if share > 0 else f"on rgb({level},0,0)" if share < 0 else ""
    return Style.parse(style).render(text) if style else text


def _styled(text: str, style: str, stream: TextIO) -> str:
    if not colour(stream):
        return text
    from rich.style import Style

    return Style.parse(style).render(text)
