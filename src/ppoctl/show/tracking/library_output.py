"""Output of libraries, redirected to a file, so that it does not mix with the output of a command."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

STDOUT, STDERR = 1, 2


class LibraryOutput:
    """Output of this process and its children on stdout and stderr during a command, including output of C++ code."""

    def __init__(self) -> None:
        self._aside: BinaryIO | None = None
        self._log: Path | None = None
        """File of the output; None: a temporary file."""

    @contextmanager
    def kept_apart(self) -> Iterator[TextIO]:
        """Redirect the output to a file, and yield the stream that still reaches the terminal.

        If `sys.stderr` does not write to the process's stderr, as in a notebook, nothing is redirected. If an error
        occurs before `into` is called, the output is printed to the terminal.
        """
        if not (_is(sys.stdout, STDOUT) or sys.stdout is sys.stderr) or not _is(sys.stderr, STDERR):
            yield sys.stderr
            return
        stdout = os.dup(STDOUT)
        stderr = open(  # noqa: SIM115, PTH123 - a descriptor, closed below
            os.dup(STDERR), "w", buffering=1, encoding=sys.stderr.encoding, errors=sys.stderr.errors
        )
        with tempfile.TemporaryFile() as aside:
            self._aside, self._log = aside, None
            _write_to(aside.fileno())
            try:
                yield stderr
            except BaseException:
                self._print_output(stderr)
                raise
            finally:
                _flush()
                os.dup2(stdout, STDOUT)
                os.dup2(stderr.fileno(), STDERR)
                os.close(stdout)
                with suppress(OSError):
                    stderr.close()
                self._aside = None
                self._forget_empty()

    def into(self, log: Path) -> None:
        """Write the output to this file, including the output so far. An empty file is deleted at the end."""
        if self._aside is None:
            return
        _flush()
        with suppress(OSError), log.open("ab") as file:
            self._aside.seek(0)
            shutil.copyfileobj(self._aside, file)
            # Later output goes directly to the descriptor, and must follow this text.
            file.flush()
            _write_to(file.fileno())
            self._log = log

    def _print_output(self, stderr: TextIO) -> None:
        if self._log is None and self._aside is not None:
            _flush()
            self._aside.seek(0)
            with suppress(OSError):
                stderr.write(self._aside.read().decode(errors="replace"))

    def _forget_empty(self) -> None:
        if self._log is not None and self._log.is_file() and not self._log.stat().st_size:
            self._log.unlink()


LIBRARY_OUTPUT = LibraryOutput()
"""Output of this process."""


def _is(stream: TextIO, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor
    except (OSError, ValueError, AttributeError):
        return False


def _write_to(descriptor: int) -> None:
    _flush()
    os.dup2(descriptor, STDOUT)
    os.dup2(descriptor, STDERR)


def _flush() -> None:
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
