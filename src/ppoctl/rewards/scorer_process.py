"""The parent's side of one scorer process: start it, send requests, wait for the scores until the deadline, kill the
process, and report how it ended. Imports no torch."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import ppoctl
from ppoctl.batch.scores import Score, ScoreRequest
from ppoctl.errors import RewardError
from ppoctl.rewards.function import ScorerSpec
from ppoctl.rewards.scorer_output import Dropped, Output

READY_LIMIT_S = 60.0
"""Seconds within which a child must have imported its scorer. The limit is generous, for cold network disks."""

_STARTS = 3
"""Maximum number of starts of a child that is killed while it starts: memory may be short for a moment."""
_EXIT_LIMIT_S = 1.0
_READ_BYTES = 1 << 16


class ScorerProcess:
    """A child process, started by the first request, and started again after a request during which it ended. Only
    one thread may use it, and that thread must outlive it: the kernel ends the child with the thread that started
    it."""

    def __init__(self, spec: ScorerSpec, timeout_s: float, dropped: Dropped) -> None:
        """`dropped` counts the output bytes beyond the limit, for all processes of this scorer together."""
        self.spec = spec
        self._dropped = dropped
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()
        """Held while the child starts or ends, so that `close` finds either no child or one that it can kill."""
        self._closed = False
        self._socket: socket.socket
        """This end of the child's stdin and stdout, while it runs."""
        self._output: Output | None = None
        """Pipe of the child's output, while it runs."""
        self._inbox = b""
        self._sent = 0

    @property
    def pid(self) -> int | None:
        """Process id of the child; None: the child does not run."""
        process = self._process
        return None if process is None else process.pid

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return the child's score of each response. A child that hangs is killed; if it hangs or dies, only these
        requests are lost.

        Raises RewardError when no child can be started.
        """
        if self._process is not None and _ending(self._process.pid):
            self._stop()  # the child ended between two requests, so no sample is lost
        if self._process is None:
            self._start()
        self._sent += 1
        payload = [request.as_json() for request in requests]
        line = json.dumps({"number": self._sent, "requests": payload}).encode() + b"\n"
        began = time.monotonic()
        try:
            reply = self._exchange(line, self._timeout_s)
        except TimeoutError:
            if how := self._stop():
                return [Score(None, "error", how)] * len(requests)
            late = f"no score within {self._timeout_s:g} s"
            return [Score(None, "timeout", late, seconds=self._timeout_s)] * len(requests)
        if reply is None or reply.get("number") != self._sent:  # it ended, or another process wrote into the pipe
            return [Score(None, "error", self._ended())] * len(requests)
        seconds = (time.monotonic() - began) / len(requests)
        return [replace(_parsed(fields), seconds=seconds) for fields in reply["scores"]]

    def close(self) -> None:
        """Kill the child and never start it again. A thread that waits for its reply is woken."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                _kill(self._process)
                # A process that the scorer started may also have the other end open, and survive the kill.
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
                    [sys.executable, "-m", "ppoctl.rewards.scorer_main", json.dumps(spec)],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=self._output.writing,
                    env=_environment(),
                    # A separate session and group: Ctrl-C and job signals reach only the parent, and a kill reaches
                    # every process that the scorer started.
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                self._close_output()
                raise self._cannot_start(str(error)) from error
            self._socket, self._inbox = ours, b""
            self._output.close_writing()

    def _exchange(self, line: bytes, limit_s: float) -> dict[str, Any] | None:
        """Send a line (may be empty), and return the next message; None if the child has closed its end or its
        message is not valid. Raises TimeoutError."""
        deadline = time.monotonic() + limit_s
        if self._output is not None:
            self._output.begin()
        try:
            self._socket.settimeout(limit_s)
            with suppress(BrokenPipeError):  # the child has ended; its last message can still be read
                if line:
                    self._socket.sendall(line)
            waiting = self._waiting()
            while b"\n" not in self._inbox:
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
        except (ValueError, RecursionError):
            return None

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
        while not _ending(self._process.pid) and time.monotonic() < limit:
            time.sleep(0.002)
        return self._stop() or "the scorer closed or misused the pipe to its parent"

    def _stop(self) -> str:
        """Kill and reap the child and its process group. Return how the child had ended before ("" if it was
        running)."""
        with self._lock:
            process = self._process
            assert process is not None
            how = _ending(process.pid)
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

    def _cannot_start(self, why: str) -> RewardError:
        return RewardError(
            f"the scorer `{self.spec.known_as or self.spec.entry}` does not start: {why}",
            hint=self.spec.hint or f"python -m {self.spec.entry.partition(':')[0]} shows why it cannot be imported",
        )


def _parsed(fields: dict[str, Any]) -> Score:
    if "error" in fields:
        return Score(None, fields.get("outcome", "error"), str(fields["error"]))
    tokens = tuple(fields["tokens"]) if "tokens" in fields else None
    return Score(
        float(fields["value"]), "ok", extras=dict(fields["extras"]), token_values=tokens, answer=fields.get("answer")
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()


def _ending(pid: int) -> str:
    """Return how a child ended, as text; "" while it runs. The child is not reaped: its process id must not be reused
    before its group has been signalled."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "the scorer's process ended, and other code in this process has read its exit status"
    if ended is None:
        return ""
    if ended.si_code == os.CLD_EXITED:
        return f"the scorer ended its process with exit code {ended.si_status}"
    return f"the scorer's process was killed by signal {ended.si_status} ({signal.strsignal(ended.si_status)})"


def _environment() -> dict[str, str]:
    """Return the parent's environment, changed so that the child imports this installation of ppoctl, and hashes
    strings in the same way in every run."""
    paths = [str(Path(ppoctl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONHASHSEED": "0"}
