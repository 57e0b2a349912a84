"""Where a process that others started prints."""

import os
import sys
from contextlib import suppress
from pathlib import Path


def write_into(log: Path) -> None:
    """Send what this process prints from now on, libraries in C++ included, to a file, behind what is there. Nothing
    changes where the file cannot be opened: a process works without it."""
    with suppress(OSError):
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(descriptor, number)
        os.close(descriptor)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115 - these descriptors
