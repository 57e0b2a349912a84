"""The parent's side of a child process that runs code of the user, such as a scorer or environments: start it, send a
message, wait for the reply until the deadline, kill the process, and report how it ended. Imports no torch.

`rewards.message_loop` is the child's side.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Literal

import ppoctl
from ppoctl.core import units
from ppoctl.core.errors import PpoctlError
from ppoctl.rewards.function import ScorerSpec
from ppoctl.rewards.scorer_output import Dropped, Output

READY_LIMIT_S = 180.0
"""Seconds within which a child must have imported the user's code. The limit is generous, for cold network disks."""

_STARTS = 3
"""Maximum number of starts of a child that is killed while it starts: memory may be short for a moment."""
_EXIT_LIMIT_S = 10.0
_READ_BYTES = 1 << 16


class NoReplyError(Exception):
    """A child did not reply to a message, and has been killed."""

    def __init__(self, reason: Literal["timeout", "died", "too_large"], message: str) -> None:
        super().__init__(message)
        self.reason = reason


class UserProcess(ABC):
    """A child process, started by the first message, and started again after a message during which it ended. Only
    one thread may use it, and that thread must outlive it: the kernel ends the child with the thread that started
    it."""

    module: ClassVar[str]
    """Module that the child runs."""
    role: ClassVar[str]
    """Name of the user's code in messages."""
    reply_bytes: ClassVar[int]
    """Maximum size of a reply. A child that sends more is killed."""

    def __init__(self, spec: ScorerSpec, dropped: Dropped) -> None:
        """`dropped` counts the output bytes beyond the limit, for all processes of this code together."""
        self.spec = spec
        self._dropped = dropped
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()
        """Held while the child starts or ends, so that `close` finds either no child or one that it can kill."""
        self._closed = False
        self._socket: socket.socket
        """This end of the child's stdin and stdout, while it runs."""
        self._output: Output | None = None
        """Pipe of the child's output, while it runs."""
        self._inbox = bytearray()
        self._sent = 0

    @property
    def pid(self) -> int | None:
        """Process id of the child; None: the child does not run."""
        process = self._process
        return None if process is None else process.pid

    @abstractmethod
    def refused(self, why: str) -> PpoctlError:
        """Return the error of a child that cannot be started."""

    def start_if_ended(self) -> bool:
        """Start the child unless it runs. Return whether it was started. Raises the error of `refused`."""
        if self._process is not None and (self._inbox or self._is_readable() or self._ending()):
            self._stop()  # it ended, or wrote something that is not a reply, between two messages: nothing is lost
        if self._process is not None:
            return False
        self._start()
        return True

    def call(self, message: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Return the child's reply to a message. A child that does not reply is killed.

        Raises NoReplyError.
        """
        self._sent += 1
        line = json.dumps({"number": self._sent, **message}).encode() + b"\n"
        try:
            reply = self._exchange(line, limit_s)
        except TimeoutError:
            if how := self._stop():
                raise NoReplyError("died", how) from None
            raise NoReplyError("timeout", f"no answer within {limit_s:g} s") from None
        except OverflowError:
            self._stop()
            raise NoReplyError("too_large", self._too_large()) from None
        if reply is None or reply.get("number") != self._sent:  # it ended, or another process wrote into the pipe
            raise NoReplyError("died", self._ended())
        return reply

    def close(self) -> None:
        """Kill the child and never start it again. A thread that waits for its reply is woken."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                _kill(self._process)
                # A process that the user's code started may also have the other end open, and survive the kill.
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def reap(self) -> None:
        """Reap a child that was closed, once no other thread uses it."""
        if self._process is not None:
            self._stop()

    def _start(self) -> None:
        how = ""
        for _ in range(_STARTS):
            self._spawn()
            try:
                message = self._exchange(b"", READY_LIMIT_S)
            except TimeoutError:
                self._stop()
                raise self._cannot_start("it did not finish its imports in time") from None
            except OverflowError:
                self._stop()
                raise self._cannot_start(self._too_large()) from None
            if message is None:
                how = self._ended()
                continue
            if "ready" in message:
                return
            self._stop()
            raise self._cannot_start(str(message.get("failed")))
        raise self._cannot_start(how)

    def _spawn(self) -> None:
        spec = {**vars(self.spec), "options": dict(self.spec.options), "parent": os.getpid()}
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._closed:
                ours.close()
                raise self._cannot_start("it was closed")
            try:
                self._output = Output(self._dropped)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", self.module, json.dumps(spec)],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=self._output.writing,
                    env=_environment(),
                    # A separate session and group: Ctrl-C and job signals reach only the parent, and a kill reaches
                    # every process that the user's code started.
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                self._close_output()
                raise self._cannot_start(str(error)) from error
            self._socket, self._inbox = ours, bytearray()
            # With this copy open, the end of the child's output would never be seen.
            self._output.close_writing()

    def _exchange(self, line: bytes, limit_s: float) -> dict[str, Any] | None:
        """Send a line (may be empty), and return the next message; None if the child has closed its end or its
        message is not valid. Raises TimeoutError, and OverflowError if the message is too large."""
        deadline = time.monotonic() + limit_s
        if self._output is not None:
            self._output.begin()
        try:
            self._socket.settimeout(limit_s)
            with suppress(BrokenPipeError):  # the child has ended; its last message can still be read
                if line:
                    self._socket.sendall(line)
            waiting = self._waiting()
            is_complete = b"\n" in self._inbox
            while not is_complete:
                # Poll for at least 1 ms: a parent that was suspended past the deadline must still read a reply that
                # the child sent in time.
                ready = [number for number, _ in waiting.poll(max(deadline - time.monotonic(), 0.001) * 1000)]
                if self._output is not None and self._output.reading in ready and not self._output.pass_on():
                    waiting.unregister(self._output.reading)
                if self._socket.fileno() in ready:
                    received = self._socket.recv(_READ_BYTES)
                    if not received:
                        return None
                    self._inbox += received
                    is_complete = b"\n" in received
                    if len(self._inbox) > self.reply_bytes:
                        raise OverflowError
                elif time.monotonic() > deadline:
                    raise TimeoutError
        except ConnectionError:
            return None
        finally:
            if self._output is not None:
                self._output.pass_on()
        first, _, self._inbox = self._inbox.partition(b"\n")
        try:
            return dict(json.loads(first))
        except (TypeError, ValueError, RecursionError):
            return None

    def _is_readable(self) -> bool:
        """Whether the child has sent something, or has closed its end."""
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        return bool(readable.poll(0))

    def _waiting(self) -> select.poll:
        """Return a poll object for messages and output of the child."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        if self._output is not None:
            waiting.register(self._output.reading, select.POLLIN)
        return waiting

    def _ended(self) -> str:
        """Return how the child ended after it closed its pipes. The child may take a moment to exit."""
        assert self._process is not None
        limit = time.monotonic() + _EXIT_LIMIT_S
        while not self._ending() and time.monotonic() < limit:
            time.sleep(0.002)
        return self._stop() or f"the {self.role} closed or misused the pipe to its parent"

    def _stop(self) -> str:
        """Kill and reap the child and its process group. Return how the child had ended before ("" if it was
        running)."""
        with self._lock:
            process = self._process
            assert process is not None
            how = self._ending()
            _kill(process)
            process.wait()
            self._socket.close()
            self._close_output()
            self._process = None
        return how

    def _close_output(self) -> None:
        if self._output is not None:
            self._output.close()
            self._output = None

    def _cannot_start(self, why: str) -> PpoctlError:
        return self.refused(f"the {self.role} `{self.spec.known_as or self.spec.entry}` does not start: {why}")

    def _too_large(self) -> str:
        return f"the answer is larger than {units.size(self.reply_bytes)}"

    def _ending(self) -> str:
        """Return how the child ended, as text; "" while it runs. The child is not reaped: its process id must not be
        reused before its group has been signalled."""
        assert self._process is not None
        try:
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return f"the {self.role}'s process ended, and other code in this process has read its exit status"
        if ended is None:
            return ""
        if ended.si_code == os.CLD_EXITED:
            return f"the {self.role} ended its process with exit code {ended.si_status}"
        name = signal.strsignal(ended.si_status)
        return f"the {self.role}'s process was killed by signal {ended.si_status} ({name})"


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()


def _environment() -> dict[str, str]:
    """Return the parent's environment, changed so that the child imports this installation of ppoctl, and hashes
    strings in the same way in every run."""
    paths = [str(Path(ppoctl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONHASHSEED": "0"}
