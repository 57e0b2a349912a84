"""Commands as typed, each in a separate process: a new interpreter, or a fork of `fork_server`."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from end_to_end.fork_server import ONE_THREAD

TESTS = Path(__file__).parents[1]
TIMEOUT_S = 500.0


def fresh(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run `python -m ppoctl WORDS` in a new interpreter."""
    command = [sys.executable, "-m", "ppoctl", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


@dataclass
class Running:
    """A command that has been started."""

    pid: int
    stderr: IO[str]
    returncode: int | None = None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class Forked:
    """Forks commands from one process that has done the imports. One command at a time."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "end_to_end.fork_server", str(theirs.fileno())],
                cwd=TESTS,
                env={**os.environ, **ONE_THREAD},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._answers = self._channel.makefile("r")

    def close(self) -> None:
        self._answers.close()
        self._channel.close()
        self._server.wait()

    def __call__(self, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run `python -m ppoctl WORDS` to its end."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            code = self.wait(self.start(folder, ["ppoctl", *words], out, err))
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(words, code, out.read(), err.read())

    def succeeds(self, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run `python -m ppoctl WORDS`, which must end with exit code 0."""
        done = self(folder, *words)
        assert done.returncode == 0, done.stderr
        return done

    @contextmanager
    def running(self, folder: Path, *words: str) -> Iterator[Running]:
        """Start `python -m ppoctl WORDS`, to be read and signalled while it runs; wait for its end."""
        reading, writing = os.pipe()
        with os.fdopen(reading) as stderr, tempfile.TemporaryFile("w") as out:
            with os.fdopen(writing, "w") as err:
                running = Running(self.start(folder, ["ppoctl", *words], out, err), stderr)
            try:
                yield running
            except BaseException:
                running.send_signal(signal.SIGKILL)
                raise
            finally:
                running.returncode = self.wait(running.pid)

    def start(self, folder: Path, words: list[str], out: IO[str], err: IO[str]) -> int:
        """Start `python -m WORDS` in this folder, on these streams; return its process id."""
        request = {"words": words, "folder": str(folder), "environment": dict(os.environ)}
        text = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(self._channel, [text], [out.fileno(), err.fileno()])
        self._channel.sendall(text[sent:])
        return int(self._answer())

    def wait(self, pid: int, *, timeout_s: float = TIMEOUT_S) -> int:
        """Return the exit code of the last command; minus the signal number if a signal killed it."""
        self._channel.settimeout(timeout_s)
        try:
            return int(self._answer())
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise

    def _answer(self) -> str:
        """Return a line of the server, which ends only when this process closes the channel."""
        answer = self._answers.readline()
        assert answer, f"the preloaded process ended with {self._server.wait()}; see its stderr"
        return answer
