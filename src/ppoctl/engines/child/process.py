"""An object in a process of its own on this machine, without Ray: asked by a method's name, over a socket.

    driver: ChildProcess.begin("advance", ...) --> serving --> target.advance(...) --> Reply.answers()

Light: it can be started before this process has imported anything that takes long. The child ends with its parent,
however that ends, and hears none of the signals that are meant for it. After an error it is gone, and the next
question starts it anew.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ppoctl
from ppoctl.activity import preparing
from ppoctl.errors import ProcessLostError

START = 0
"""Number of the answer that says whether the object was made."""


@dataclass(frozen=True)
class ChildFactory:
    """What the process makes: a function of a module, called there with these arguments."""

    entry: str
    """Written as `module:function`."""
    arguments: tuple[Any, ...]
    threads: int
    """CPU threads to compute with."""


@dataclass(frozen=True)
class Failure:
    """What was raised there."""

    error: BaseException
    stack: str
    """Its traceback, in words."""

    def raised(self) -> BaseException:
        """The error, with its stack as a note."""
        self.error.add_note(f"in a process of its own:\n{self.stack}")
        return self.error


class ChildProcess:
    """The process of one object. Nothing is started before it is first asked, or started ahead."""

    def __init__(self, name: str, target: ChildFactory) -> None:
        """`name` is for errors, and for whoever shows what is being prepared."""
        self.name = name
        self.target = target
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = START
        self._methods: dict[int, str] = {}
        """What was asked of this process and is not answered, by number."""
        self._answers: dict[int, tuple[Any, Failure | None]] = {}
        """Answers that came while another one was waited for."""

    @property
    def is_running(self) -> bool:
        """Whether it was started, and nothing went wrong since."""
        return self._process is not None

    def start(self) -> None:
        """Start the process where it is not running, and go on."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ppoctl.engines.child.serving"],
                stdin=theirs.fileno(),
                env={**os.environ, "OMP_NUM_THREADS": str(self.target.threads), "PYTHONPATH": _path()},
                # Its own session: Ctrl-C and job signals reach the parent alone.
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._methods, self._answers = {START: "start"}, {}
        self._send(self.target)

    def wait_until_started(self) -> None:
        """Start the process where it is not running, and wait until the object is made. Raises what making it raised,
        or ProcessLostError."""
        self.start()
        if START in self._methods:
            with preparing(f"starting {self.name}"):
                self._answer(START)

    def begin(self, method: str, *arguments: Any) -> "ChildReply":
        """Ask, and go on, once the object is made."""
        self.wait_until_started()
        self._asked += 1
        self._methods[self._asked] = method
        self._send((self._asked, method, arguments))
        return ChildReply(self, self._asked)

    def call(self, method: str, *arguments: Any) -> Any:
        """The answer of a method."""
        return self.begin(method, *arguments).answers()[0]

    def close(self) -> None:
        """End the process at once."""
        process, self._process = self._process, None
        if process is None:
            return
        self._methods = {}
        self._connection.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def answer(self, number: int) -> Any:
        """Wait for the answer of this number. Raises what the method raised, or ProcessLostError; the process is then
        gone."""
        if number not in self._methods:  # asked of a process that is gone
            raise self._lost(number)
        return self._answer(number)

    def _answer(self, number: int) -> Any:
        try:
            while number not in self._answers:
                came, *said = self._connection.recv()
                self._answers[came] = (said[0], said[1])
        except (EOFError, ConnectionError) as broken:
            lost = self._lost(number)
            self.close()
            raise lost from broken
        except BaseException:
            self.close()  # in the middle of a message, perhaps
            raise
        answer, failure = self._answers.pop(number)
        self._methods.pop(number)
        if failure is not None:
            self.close()
            raise failure.raised()
        return answer

    def _send(self, message: Any) -> None:
        with suppress(ConnectionError):  # whoever waits for the answer hears that the process is gone
            self._connection.send(message)

    def _lost(self, number: int) -> ProcessLostError:
        during = f" during `{self._methods[number]}`" if number in self._methods else ""
        return ProcessLostError(
            f"the process of {self.name} died{during}",
            hint="everything finished is committed: `ppoctl resume RUN`; look for the kernel's out-of-memory killer "
            "in `dmesg`",
        )


@dataclass(frozen=True)
class ChildReply:
    """An answer on its way (`weights.calls.Reply`)."""

    child: ChildProcess
    number: int

    def answers(self) -> list[Any]:
        """Wait for it."""
        return [self.child.answer(self.number)]


_ahead: list[ChildProcess] = []


@contextmanager
def prestarted(*children: ChildProcess) -> Iterator[None]:
    """Context in which these processes start beside whatever this one does, until `taken` finds them; at its end
    those that nobody took are gone."""
    try:
        for child in children:
            child.start()
            _ahead.append(child)
        yield
    finally:
        while _ahead:
            _ahead.pop().close()


def taken(target: ChildFactory) -> ChildProcess | None:
    """The process that was started ahead to make this, which is the caller's from now on."""
    for child in _ahead:
        if child.target == target:
            _ahead.remove(child)
            return child
    return None


def _path() -> str:
    """Where the child finds this very ppoctl."""
    return os.pathsep.join(filter(None, (str(Path(ppoctl.__file__).parents[1]), os.environ.get("PYTHONPATH", ""))))
