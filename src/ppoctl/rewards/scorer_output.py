"""Output that the user's code prints. Child processes write it into pipes; the parent process copies the first bytes
of each call to its own standard error. Imports only the standard library."""

import os
import select
from contextlib import suppress
from threading import Lock

from ppoctl.core import units

KEPT_BYTES = 1 << 16
"""Maximum number of bytes per call that are copied."""
_READ_BYTES = 1 << 16
"""Capacity of a pipe in bytes."""
_STDERR = 2
_WRITE_TIMEOUT_S = 1.0


class Dropped:
    """Counter of the bytes that all processes of one scorer or environment printed beyond the limit. The first drop
    is reported immediately, and the total at the end."""

    def __init__(self, code: str) -> None:
        """`code` is the role and the name of the code in the reports, such as "scorer `gsm8k`"."""
        self._code = code
        self._count = 0
        self._lock = Lock()

    def add(self, count: int) -> None:
        """Add dropped bytes to the count."""
        with self._lock:
            is_first, self._count = self._count == 0, self._count + count
        if is_first:
            most = units.size(KEPT_BYTES)
            _write(f"\nppoctl: the {self._code} printed more than {most} in one call; the rest is dropped\n")

    def report(self) -> None:
        """Report the number of dropped bytes, and reset the count."""
        with self._lock:
            count, self._count = self._count, 0
        if count:
            _write(f"ppoctl: {units.size(count)} of the output of the {self._code} were dropped\n")


class Output:
    """The pipe from the standard output and error of one child process."""

    def __init__(self, dropped: Dropped) -> None:
        self._dropped = dropped
        self._kept = 0
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)

    def begin(self) -> None:
        """Start a call: reset the number of copied bytes."""
        self._kept = 0

    def pass_on(self) -> bool:
        """Read the bytes in the pipe, and write them to standard error up to the limit. Return False once no process
        has the other end open."""
        try:
            printed = os.read(self.reading, _READ_BYTES)
        except BlockingIOError:
            return True
        left = KEPT_BYTES - self._kept
        self._kept += min(len(printed), left)
        if left > 0:
            _write(printed[:left])
        if len(printed) > left:
            self._dropped.add(len(printed) - left)
        return bool(printed)

    def close_writing(self) -> None:
        """Close the write end in this process; the child has its own copy."""
        os.close(self.writing)
        self.writing = -1

    def close(self) -> None:
        """Copy the remaining bytes, and close the pipe."""
        self.pass_on()
        os.close(self.reading)
        if self.writing >= 0:
            os.close(self.writing)


def _write(text: str | bytes) -> None:
    """Write to standard error. Bytes that are not read within `_WRITE_TIMEOUT_S` are dropped, so that no call waits
    for a reader."""
    data = text.encode() if isinstance(text, str) else text
    writable = select.poll()
    writable.register(_STDERR, select.POLLOUT)
    with suppress(OSError):  # standard error is closed, or has no reader
        while data and writable.poll(_WRITE_TIMEOUT_S * 1000):
            data = data[os.write(_STDERR, data[: select.PIPE_BUF]) :]
