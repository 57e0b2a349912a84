"""An object in a separate process on this machine, without Ray: the driver calls its methods by name over a socket.

    driver: ChildProcess.begin("advance", ...) --> serving --> target.advance(...) --> Reply.answers()

This module imports only the standard library, so that a child can be started before the driver's slow imports. The
child ends with its parent, however the parent ends. It receives none of the parent's signals. After an error the
child ends, and the next call restarts it.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import ppoctl
from ppoctl.core.activity import preparing
from ppoctl.core.errors import ProcessLostError

START = 0
"""Number of the reply that reports whether the object was created."""


@dataclass(frozen=True)
class ChildFactory:
    """The function that creates the object of a child process, and the arguments of the call."""

    entry: str
    """Function, as `module:function`."""
    arguments: tuple[Any, ...]
    threads: int
    """Number of CPU threads."""


@dataclass(frozen=True)
class Failure:
    """An exception that was raised in the child."""

    error: BaseException
    stack: str
    """Formatted traceback."""

    def raised(self) -> BaseException:
        """Return the error, with its stack as a note."""
        self.error.add_note(f"in a child process:\n{self.stack}")
        return self.error


class ChildProcess:
    """The process of one object. The first call starts it, unless it was prestarted."""

    def __init__(self, name: str, target: ChildFactory) -> None:
        """`name` is shown in errors and progress messages."""
        self.name = name
        self.target = target
        self._process: subprocess.Popen[bytes] | None = None
        self._last_number = START
        self._methods: dict[int, str] = {}
        """Name of the method of each pending call, by the number of the call."""
        self._answers: dict[int, tuple[Any, Failure | None]] = {}
        """Replies that arrived while another reply was waited for."""

    @property
    def is_running(self) -> bool:
        """Whether the process was started and has had no error."""
        return self._process is not None

    def start(self) -> None:
        """Start the process if it is not running, without waiting for it."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ppoctl.engines.child.serving"],
                stdin=theirs.fileno(),
                env={**os.environ, "OMP_NUM_THREADS": str(self.target.threads), "PYTHONPATH": _module_path()},
                # A separate session: Ctrl-C and job signals reach only the parent.
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self._methods, self._answers = {START: "start"}, {}
        self._send(self.target)

    def wait_until_started(self) -> None:
        """Start the process if it is not running, and wait until the object is created. Raises the error of the
        creation, or ProcessLostError."""
        self.start()
        if START in self._methods:
            with preparing(f"starting {self.name}"):
                self._answer(START)

    def begin(self, method: str, *arguments: Any) -> "ChildReply":
        """Wait until the object is created, then start a call without waiting for its result."""
        self.wait_until_started()
        self._last_number += 1
        self._methods[self._last_number] = method
        self._send((self._last_number, method, arguments))
        return ChildReply(self, self._last_number)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method and return its result."""
        return self.begin(method, *arguments).answers()[0]

    def close(self) -> None:
        """End the process immediately."""
        process, self._process = self._process, None
        if process is None:
            return
        self._methods = {}
        self.connection.close()
        # The child has a group of its own, so processes that libraries started in it end too.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def answer(self, number: int) -> Any:
        """Wait for the result of the call with this number. Raises the method's error, or ProcessLostError; the
        process has then ended."""
        if number not in self._methods:  # the call went to a process that has ended
            raise self._lost(number)
        return self._answer(number)

    def has_answer(self, number: int) -> bool:
        """Whether `answer` would not wait for the process."""
        return number in self._answers or number not in self._methods

    def _answer(self, number: int) -> Any:
        try:
            while number not in self._answers:
                received, *content = self.connection.recv()
                self._answers[received] = (content[0], content[1])
        except (EOFError, ConnectionError) as broken:
            lost = self._lost(number)
            self.close()
            raise lost from broken
        except BaseException:
            self.close()  # a message may have been read or written only in part
            raise
        answer, failure = self._answers.pop(number)
        self._methods.pop(number)
        if failure is not None:
            self.close()
            raise failure.raised()
        return answer

    def _send(self, message: Any) -> None:
        with suppress(ConnectionError):  # the wait for the reply reports that the process has ended
            self.connection.send(message)

    def _lost(self, number: int) -> ProcessLostError:
        during = f" during `{self._methods[number]}`" if number in self._methods else ""
        return ProcessLostError(
            f"the process of {self.name} died{during}",
            hint="everything finished is committed: `ppoctl resume RUN`; look for the kernel's out-of-memory killer "
            "in `dmesg`",
        )


@dataclass(frozen=True)
class ChildReply:
    """A pending result (`weights.engine_calls.Reply`)."""

    child: ChildProcess
    number: int

    def answers(self) -> list[Any]:
        """Wait for the result and return it in a list."""
        return [self.child.answer(self.number)]


def first_done(replies: Sequence[ChildReply]) -> list[ChildReply]:
    """Wait until at least one of these replies has arrived, with a result or an error, and return those that have. No
    process may have another pending call."""
    if done := [reply for reply in replies if reply.child.has_answer(reply.number)]:
        return done
    waiting = {reply.child.connection: reply for reply in replies}
    # A connection of a process that has ended is ready, too.
    return [waiting[ready] for ready in wait(list(waiting)) if isinstance(ready, Connection)]


_prestarted: list[ChildProcess] = []


@contextmanager
def prestarted(*children: ChildProcess) -> Iterator[None]:
    """Context in which these processes start in parallel with the caller's work. `taken` returns a process to its
    user. At the end of the context, the remaining processes are ended."""
    try:
        for child in children:
            child.start()
            _prestarted.append(child)
        yield
    finally:
        while _prestarted:
            _prestarted.pop().close()


def taken(target: ChildFactory) -> ChildProcess | None:
    """Return the process that was prestarted with this target, and make the caller its owner. None: no such
    process."""
    for child in _prestarted:
        if child.target == target:
            _prestarted.remove(child)
            return child
    return None


def _module_path() -> str:
    """Return the module search path with which the child imports this installation of ppoctl."""
    return os.pathsep.join(filter(None, (str(Path(ppoctl.__file__).parents[1]), os.environ.get("PYTHONPATH", ""))))
