"""The only module that prints.

Data goes to stdout, messages go to stderr. Colour is used only on a terminal, and never if `NO_COLOR` is set. Without
a terminal every line is plain, so that the log of a batch job has no control characters.
"""

import json as json_module
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, TextIO

from ppoctl.cli import columns

if TYPE_CHECKING:
    from ppoctl.run.startable import Messages


PLAIN_WIDTH = 80
"""Width of output that is not for a terminal, if its width can be chosen."""


def line(text: str = "") -> None:
    """Print a line of data."""
    print(text, flush=True)


def prose(text: str) -> None:
    """Print sentences: wrapped with a hanging indent on a terminal, on one line otherwise."""
    line(_wrapped(text, sys.stdout))


def _wrapped(text: str, stream: TextIO) -> str:
    if not stream.isatty():
        return text
    hang = " " * (len(text) - len(text.lstrip()) + 2)
    first, *others = columns.wrapped(text, shutil.get_terminal_size().columns - len(hang))
    return "\n".join([first, *(f"{hang}{other}" for other in others)])


def printable(text: str) -> str:
    """Return the text with escapes instead of control characters, except line breaks: a terminal would obey them.

    Characters that stdout cannot encode are escaped, too.
    """
    safe = "".join(
        char if char == "\n" or char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )
    encoding = sys.stdout.encoding or "utf-8"
    return safe.encode(encoding, "backslashreplace").decode(encoding)


def print_stderr(text: str) -> None:
    """Print one message line to stderr: progress, a note, or the next command to type."""
    if _through is None:
        print(text, file=sys.stderr, flush=True)
        return
    for each in text.splitlines() or [""]:
        _through(each)


_through: Callable[[str], None] | None = None
"""Function that receives message lines while a screen is open. Without a screen, messages go to stderr."""


@contextmanager
def talking_through(take: Callable[[str], None]) -> Iterator[None]:
    """Pass message lines to `take`, instead of stderr, within the context."""
    global _through
    before, _through = _through, take
    try:
        yield
    finally:
        _through = before


def passing(text: str = "") -> None:
    """Print progress on a line of the terminal, which the next call replaces. Without a terminal, print nothing."""
    if on_terminal() and _through is None:
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def messages() -> "Messages":
    """Return the two functions with which checks report to the user: `print_stderr` and `passing`."""
    from ppoctl.run.startable import Messages

    return Messages(print_stderr, passing)


def on_terminal() -> bool:
    """Whether stderr is a terminal."""
    return sys.stderr.isatty()


def agreed(question: str) -> bool:
    """Ask the user a question on the terminal, and return whether the answer was `y` or `yes`."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def json(value: Mapping[str, Any]) -> None:
    """Print the JSON object of a command with `--json`, or add it to the object of an open `one_object`."""
    if _parts is None:
        print(json_module.dumps(_finite(value), indent=2, default=str, allow_nan=False), flush=True)
    else:
        _parts.update(value)


_parts: dict[str, Any] | None = None
"""Fields of the JSON object that is being collected; None outside of `one_object`."""


@contextmanager
def one_object() -> Iterator[None]:
    """Collect the output of a command with `--json` in one object, which is printed when the command ends.

    An error is added to the object, too. Output of libraries goes to stderr, so that stdout contains only the object.
    """
    global _parts
    _parts = {}
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        collected, _parts = _parts, None
        json(collected)


def _finite(value: Any) -> Any:
    """Return the value with the texts `"nan"`, `"inf"` in place of numbers that JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def error(message: str) -> None:
    """Print an error message, wrapped as in `prose`.

    Each line of the message is a separate error. An indented line continues the error above it.
    """
    for text in message.splitlines() or [""]:
        if text.startswith(" "):
            print(_wrapped(text, sys.stderr), file=sys.stderr)
        else:
            lines = _wrapped(f"error: {text}", sys.stderr)
            print(lines.replace("error:", _styled("error:", "bold red", sys.stderr), 1), file=sys.stderr)
    sys.stderr.flush()


def hint(text: str) -> None:
    """Print the command or change that fixes an error."""
    print(f"\n{_styled('hint:', 'bold cyan', sys.stderr)} {text}", file=sys.stderr, flush=True)


def heading(text: str) -> None:
    """Print the title of a section of the data."""
    print(_styled(text, "bold", sys.stdout), flush=True)


def table(rows: Sequence[Sequence[object]], headers: Sequence[str] = ()) -> None:
    """Print a table. Numbers (int, float) are right-aligned, other values are left-aligned.

    The last column is not padded. On a terminal that is too narrow, cells are wrapped. Without a terminal, every row
    is one line.
    """
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


def weighted(pieces: Sequence[str], weights: Sequence[float], largest: float | None = None) -> str:
    """Return the text with green pieces for weights above 0 and red pieces for weights below 0.

    A larger absolute weight gives a stronger colour; `largest` gives the strongest. If it is None, it is the largest
    absolute weight. If stdout has no colour, the text is plain.
    """
    if not colour(sys.stdout):
        return "".join(pieces)
    if largest is None:
        largest = max((abs(weight) for weight in weights), default=0.0)
    largest = largest or 1.0
    return "".join(_tinted(piece, weight / largest) for piece, weight in zip(pieces, weights, strict=True))


def is_coloured() -> bool:
    """Whether stdout is coloured."""
    return colour(sys.stdout)


def is_unicode() -> bool:
    """Whether stdout can write non-ASCII characters."""
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")


def styled(text: str, style: str) -> str:
    """Return the text in a style if stdout is coloured."""
    return _styled(text, style, sys.stdout)


def is_terminal() -> bool:
    """Whether stdout is a terminal, directly or through a pager."""
    return sys.stdout.isatty()


def width() -> int:
    """Return the columns of the terminal; without a terminal, 80."""
    return shutil.get_terminal_size().columns if is_terminal() else PLAIN_WIDTH


def clipped(text: str, cells: int | None) -> str:
    """Return the text shortened to `cells` columns of a terminal. A shortened text ends with `..`.

    If `cells` is None, the text is not shortened.
    """
    from rich.cells import cell_len, set_cell_size

    if cells is None or cell_len(text) <= cells:
        return text
    return f"{set_cell_size(text, max(0, cells - 2)).rstrip()}.."


def colour(stream: TextIO) -> bool:
    """Whether to write colour to this stream: it is a terminal, and neither `NO_COLOR` nor `TERM=dumb` is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def cell(value: object) -> str:
    """Return the text of a value in a table."""
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _tinted(text: str, strength: float) -> str:
    from rich.style import Style

    level = 60 + int(140 * min(abs(strength), 1.0))
    style = f"on rgb(0,{level // 2},0)" if strength > 0 else f"on rgb({level},0,0)" if strength < 0 else ""
    return Style.parse(style).render(text) if style else text


def _styled(text: str, style: str, stream: TextIO) -> str:
    if not colour(stream):
        return text
    from rich.style import Style

    return Style.parse(style).render(text)
