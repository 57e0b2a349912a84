"""Pager for long output, used if stdout is a terminal."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import TextIOBase
from typing import IO


class _Piped(TextIOBase):
    """An output stream that is connected to a pager. To code that writes to it, the stream looks like a terminal.

    `flush` does nothing. A pager that exits if all text fits on the screen must receive the text in one piece.
    """

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe

    @property
    def encoding(self) -> str:  # type: ignore[override] # an open stream has an encoding
        return sys.__stdout__.encoding if sys.__stdout__ is not None else "utf-8"

    def isatty(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        return self._pipe.write(text)


@contextmanager
def paged(*, wanted: bool = True) -> Iterator[None]:
    """Send the output of the context through `$PAGER`, or through `less -FRX` if the variable is not set.

    Output is printed directly if stdout is not a terminal or the program cannot be started.
    """
    program = start() if wanted and sys.stdout.isatty() else None
    if program is None or program.stdin is None:
        yield
        return
    try:
        with redirect_stdout(_Piped(program.stdin)), suppress(BrokenPipeError):  # the user has quit the pager
            yield
    finally:
        with suppress(BrokenPipeError):
            program.stdin.close()
        while program.poll() is None:
            with suppress(KeyboardInterrupt):  # Ctrl-C is meant for the pager, which continues to run
                program.wait()


def start() -> "subprocess.Popen[str] | None":
    """Start the pager and return its process; None if it cannot be started."""
    words = shlex.split(os.environ.get("PAGER") or "less -FRX")
    environment = {"LESS": "FRX", **os.environ}
    encoding = sys.stdout.encoding or "utf-8"
    try:
        return subprocess.Popen(
            words, stdin=subprocess.PIPE, text=True, encoding=encoding, errors="replace", env=environment
        )
    except (OSError, IndexError, ValueError):
        return None
