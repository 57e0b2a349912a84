"""What a scorer prints: its child processes write into pipes, and their parent writes the first bytes of each call to
its own standard error. Standard library only."""

import os
import select
from contextlib import suppress
from threading import Lock

from ppoctl import units

KEPT_BYTES = 1 << 16
"""Bytes of one call that are kept."""
_READ_BYTES = 1 << 16
"""Bytes that a pipe holds."""
_STDERR = 2
_PATIENCE_S = 1.0


class Dropped:
    """Bytes that all processes of one scorer printed beyond the limit. The first is reported at once, the sum at the
    end."""

    def __init__(self, scorer: str) -> None:
        self._scorer = scorer
        self._count = 0
        self._lock = Lock()

    def add(self, count: int) -> None:
        """Count bytes that were dropped."""
        with self._lock:
            is_first, self._count = self._count == 0, self._count + count
        if is_first:
            most = units.size(KEPT_BYTES)
            _write(
                f"\nppoctl: the scorer `{self._scorer}` printed more than {most} in one call; the rest is dropped\n"
            )

    def report(self) -> None:
        """Write how much was dropped, and begin to count again."""
        with self._lock:
            count, self._count = self._count, 0
        if count:
            _write(f"ppoctl: {units.size(count)} that the scorer `{self._scorer}` printed were dropped\n")


class Output:
    """The pipe from the standard output and error of one child process."""

    def __init__(self, dropped: Dropped) -> None:
        self._dropped = dropped
        self._kept = 0
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)

    def begin(self) -> None:
        """A call begins, of which as many bytes are kept as of any other."""
        self._kept = 0

    def pass_on(self) -> bool:
        """Read what the pipe holds and write it within the limit. False: no process has the other end any more."""
        try:
            printed = os.read(self.reading, _READ_BYTES)
        except BlockingIOError:
            return True
        room = KEPT_BYTES - self._kept
        self._kept += min(len(printed), room)
        if room > 0:
            _write(printed[:room])
        if len(printed) > room:
            self._dropped.add(len(printed) - room)
        return bool(printed)

    def close_writing(self) -> None:
        """The child has the other end, and this process does not need it."""
        os.close(self.writing)
        self.writing = -1

    def close(self) -> None:
        """Write on what is left, and close the pipe."""
        self.pass_on()
        os.close(self.reading)
        if self.writing >= 0:
            os.close(self.writing)


def _write(text: str | bytes) -> None:
    """Write to standard error. Bytes that nobody reads there within `_PATIENCE_S` are dropped: no call waits for a
    reader."""
    data = text.encode() if isinstance(text, str) else text
    writable = select.poll()
    writable.register(_STDERR, select.POLLOUT)
    with suppress(OSError):  # it is closed, or nobody reads it any more
        while data and writable.poll(_PATIENCE_S * 1000):
            data = data[os.write(_STDERR, data[: select.PIPE_BUF]) :]
