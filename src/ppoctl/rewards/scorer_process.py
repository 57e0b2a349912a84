"""One child process that scores, seen from the parent: start it, ask it and wait until its deadline, kill it, say how
it ended. Imports no torch."""

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
"""A child that has not imported its scorer by then is taken for broken; generous, for cold network disks."""

_STARTS = 3
"""A child that is killed while it starts is started again this often: memory may be short for a moment."""
_EXIT_LIMIT_S = 1.0
_READ_BYTES = 1 << 16


class ScorerProcess:
    """A child process that is started by the first request and again after each that it did not survive. One thread
    asks it, and lives on while it does: the kernel ends the child with the thread that started it."""

    def __init__(self, spec: ScorerSpec, timeout_s: float, dropped: Dropped) -> None:
        """`dropped`: counts the output that is not kept, of all processes of this scorer together."""
        self.spec = spec
        self._dropped = dropped
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()
        """Held while the child begins or ends, so that `close` meets either none or one that it can kill."""
        self._closed = False
        self._socket: socket.socket
        """Our end of its stdin and stdout, while it runs."""
        self._output: Output | None = None
        """What it prints, while it runs."""
        self._inbox = b""
        self._asked = 0

    @property
    def pid(self) -> int | None:
        """Process id of the child; None where it does not run."""
        process = self._process
        return None if process is None else process.pid

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """What the child says of each response. One that hangs or dies over them is killed, and costs these requests
        only.

        Raises RewardError when no child can be started.
        """
        if self._process is not None and _ending(self._process.pid):
            self._stop()  # between two samples, so nobody's fault and nobody's loss
        if self._process is None:
            self._start()
        self._asked += 1
        asked = [{**vars(each), "messages": [vars(message) for message in each.messages]} for each in requests]
        line = json.dumps({"number": self._asked, "requests": asked}).encode() + b"\n"
        began = time.monotonic()
        try:
            reply = self._exchange(line, self._timeout_s)
        except TimeoutError:
            if how := self._stop():
                return [Score(None, "error", how)] * len(requests)
            late = f"no score within {self._timeout_s:g} s"
            return [Score(None, "timeout", late, seconds=self._timeout_s)] * len(requests)
        if reply is None or reply.get("number") != self._asked:  # the end, or something else writes into its pipe
            return [Score(None, "error", self._ended())] * len(requests)
        seconds = (time.monotonic() - began) / len(requests)
        return [replace(_heard(told), seconds=seconds) for told in reply["scores"]]

    def close(self) -> None:
        """Kill the child, whatever it is doing, for good; another thread that waits for it hears that it is gone."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                _kill(self._process)
                # A process that the scorer started may have the other end too, and outlive the kill.
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def reap(self) -> None:
        """Take the exit status of a child that was closed, once no other thread asks it."""
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
                    # Its own session and group: Ctrl-C and job signals reach the parent alone, and a kill reaches
                    # whatever a scorer started.
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                self._close_output()
                raise self._cannot_start(str(error)) from error
            self._socket, self._inbox = ours, b""
            self._output.close_writing()

    def _exchange(self, line: bytes, limit_s: float) -> dict[str, Any] | None:
        """Send a line (or nothing), and wait for the next message; None when the child has closed its end or talks
        nonsense. Raises TimeoutError."""
        deadline = time.monotonic() + limit_s
        if self._output is not None:
            self._output.begin()
        try:
            self._socket.settimeout(limit_s)
            with suppress(BrokenPipeError):  # it has ended, and what it said before that waits to be read
                if line:
                    self._socket.sendall(line)
            waiting = self._waiting()
            while b"\n" not in self._inbox:
                # Not 0, which would not look: a parent that was stopped for an hour must not blame the child.
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
        """Waits for a message of the child, and for what it prints."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        if self._output is not None:
            waiting.register(self._output.reading, select.POLLIN)
        return waiting

    def _ended(self) -> str:
        """How a child ended that has closed its pipes, which it needs a moment for."""
        assert self._process is not None
        limit = time.monotonic() + _EXIT_LIMIT_S
        while not _ending(self._process.pid) and time.monotonic() < limit:
            time.sleep(0.002)
        return self._stop() or "the scorer closed or misused the pipe to its parent"

    def _stop(self) -> str:
        """Kill the child and all in its group, reap it, and say how it ended before that ("" where we killed it)."""
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


def _heard(told: dict[str, Any]) -> Score:
    if "error" in told:
        return Score(None, told.get("outcome", "error"), str(told["error"]))
    tokens = tuple(told["tokens"]) if "tokens" in told else None
    return Score(
        float(told["value"]), "ok", extras=dict(told["extras"]), token_values=tokens, answer=told.get("answer")
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()


def _ending(pid: int) -> str:
    """How a child ended, in words; "" while it runs. It stays unreaped: its number must not be given to another
    process before its group has been signalled."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "the scorer's process is gone, and something else in this process has taken its exit status"
    if ended is None:
        return ""
    if ended.si_code == os.CLD_EXITED:
        return f"the scorer ended its process with exit code {ended.si_status}"
    return f"the scorer's process was killed by signal {ended.si_status} ({signal.strsignal(ended.si_status)})"


def _environment() -> dict[str, str]:
    """The parent's, such that the child finds this very ppoctl, and hashes text the same in every run."""
    paths = [str(Path(ppoctl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONHASHSEED": "0"}
