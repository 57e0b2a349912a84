"""The output for an episode: its turns with their calls, and the observations.

The first character of a line shows who wrote it, so that a text cannot imitate another part: a space for the actor,
`>` for a call as the environment received it, `|` for the environment, and a letter for a title.
"""

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ppoctl.cli import render

if TYPE_CHECKING:
    from ppoctl.runs.episode_parts import EpisodePart


def show(parts: "Iterable[EpisodePart]", pieces: Sequence[str] = (), weights: Sequence[float] = ()) -> None:
    """Print the parts of an episode. `pieces` and `weights`: text and colour of each token of the response; without
    them, the texts of the messages are printed."""
    largest = max(map(abs, weights), default=0.0)
    for part in parts:
        render.line()
        render.heading(part.title)
        if not part.is_turn:
            for message in part.messages:
                _lines(f"| {render.clipped(_one_line(message.role), 20)}: ", message.content)
        elif part.start < part.end:
            texts = [_indented(piece) for piece in pieces[part.start : part.end]]
            render.line(f"  {render.weighted(texts, weights[part.start : part.end], largest)}")
        else:
            for message in part.messages:
                render.line(f"  {_indented(message.content)}")
        for call in part.calls:
            _lines("> ", _one_line(call))


def _lines(prefix: str, text: str) -> None:
    """Print the lines of a text, each after the prefix. On a terminal, long lines are wrapped."""
    room = shutil.get_terminal_size().columns - len(prefix) if render.is_terminal() else None
    for line in render.printable(text).split("\n"):
        for piece in _wrapped(line, room):
            render.line(f"{prefix}{piece}".rstrip())


def _wrapped(line: str, room: int | None) -> Iterator[str]:
    if room is None or len(line) <= room:
        yield line
    else:
        yield from textwrap.wrap(line, max(room, 8), drop_whitespace=False)


def _indented(text: str) -> str:
    return render.printable(text).replace("\n", "\n  ")


def _one_line(text: str) -> str:
    return render.printable(text).replace("\n", "\\n")
