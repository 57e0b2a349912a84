"""Redirection of what a child process prints."""

import os
import sys
from contextlib import suppress
from pathlib import Path


def write_into(log: Path) -> None:
    """Append everything that this process prints from now on, including the output of C++ libraries, to a file. If
    the file cannot be opened, the output is not redirected."""
    with suppress(OSError):
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            # Text in the buffer was printed before, so it belongs to the earlier output.
            stream.flush()
            os.dup2(descriptor, number)
        os.close(descriptor)
        # Line by line, so that the file has the last lines before a kill.
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115 - these descriptors
