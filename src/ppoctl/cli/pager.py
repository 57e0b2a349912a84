"""Long output of a command through the user's pager, where stdout is a terminal."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import TextIOBase
from typing import IO


class _Piped(TextIOBase):
    """A stream to a pager: for whoever writes it is the terminal that the pager shows it on. `flush` sends nothing: a
    pager that ends when all fits needs it in one go."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe

    @property
    def encoding(self) -> str:  # type: ignore[override] # a stream that was opened has one
        return sys.__stdout__.encoding if sys.__stdout__ is not None else "utf-8"

    def isatty(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        return self._pipe.write(text)


@contextmanager
def paged(*, wanted: bool = True) -> Iterator[None]:
    """Context in which what is printed goes through `$PAGER`, else `less -FRX`; off a terminal, and where there is
    no such program, it is printed as ever."""
    program = start() if wanted and sys.stdout.isatty() else None
    if program is None or program.stdin is None:
        yield
        return
    try:
        with redirect_stdout(_Piped(program.stdin)), suppress(BrokenPipeError):  # who reads has seen enough
            yield
    finally:
        with suppress(BrokenPipeError):
            program.stdin.close()
        while program.poll() is None:
            with suppress(KeyboardInterrupt):  # the pager's, which stays
                program.wait()


def start() -> "subprocess.Popen[str] | None":
    """The pager, waiting for text; None where it cannot be started."""
    words = shlex.split(os.environ.get("PAGER") or "less -FRX")
    environment = {"LESS": "FRX", **os.environ}
    encoding = sys.stdout.encoding or "utf-8"
    try:
        return subprocess.Popen(
            words, stdin=subprocess.PIPE, text=True, encoding=encoding, errors="replace", env=environment
        )
    except (OSError, IndexError, ValueError):
        return None
