"""One child process that scores, seen from the parent: start it, talk to it without ever blocking, kill it, say how
it ended. Whom to give which sample, and for how long, is the pool's business. Imports no torch."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ppoctl

READY_LIMIT_S = 60.0
"""A child that has not imported its scorer by then is taken for broken; generous, for cold network disks."""

_EXIT_LIMIT_S = 1.0
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class ScorerSpec:
    """Which function scores, in words that travel to a child: `module:name`, and its keyword arguments."""

    entry: str
    options: Mapping[str, bool | int | float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """One response to score."""

    response: str
    truth: str


class Worker:
    """A child process and what it was given. `queue` holds its unanswered samples; the first one is being scored."""

    def __init__(self, spec: ScorerSpec) -> None:
        self.spec = spec
        self.queue: deque[int] = deque()
        self.ready = False
        self.deadline = 0.0
        """`time.monotonic()` at which the sample in hand (or the start) has taken too long."""
        self.failed_starts = 0
        """In a row."""
        self.requests_fd = -1
        self.replies_fd = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox = b""
        self._inbox = b""

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        return self._child().pid

    @property
    def wants_to_write(self) -> bool:
        return bool(self._outbox)

    def start(self) -> None:
        """Start the child; returns before it is ready. Raises OSError where the machine cannot."""
        spec = {"entry": self.spec.entry, "options": dict(self.spec.options), "parent": os.getpid()}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ppoctl.rewards.child", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=_environment(),
            # Its own session and group: Ctrl-C and job signals reach the parent alone, and a kill reaches whatever
            # a scorer started.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.requests_fd, self.replies_fd = self._process.stdin.fileno(), self._process.stdout.fileno()
        for fd in (self.requests_fd, self.replies_fd):
            os.set_blocking(fd, False)
        self.ready = False
        self.deadline = time.monotonic() + READY_LIMIT_S
        self._outbox = self._inbox = b""

    def give(self, numbers: Sequence[int], questions: Sequence[Question]) -> None:
        """Queue a chunk; `write` sends it."""
        chunk = [[n, questions[n].response, questions[n].truth] for n in numbers]
        self.queue.extend(numbers)
        self._outbox += json.dumps(chunk).encode() + b"\n"

    def write(self) -> None:
        """Send what the pipe takes now. A pipe that is broken is silent here: `read` reports the end."""
        try:
            self._outbox = self._outbox[os.write(self.requests_fd, self._outbox) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._outbox = b""

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that are there; None when the child has closed its end or talks nonsense."""
        try:
            received = os.read(self.replies_fd, _READ_BYTES)
        except BlockingIOError:
            return []
        if not received:
            return None
        *lines, self._inbox = (self._inbox + received).split(b"\n")
        try:
            return [dict(json.loads(line)) for line in lines]
        except ValueError:
            return None

    def has_ended(self) -> bool:
        """Whether the child is gone by itself. Leaves it unreaped: its number must not be given to another process
        before `stop` has signalled the group."""
        return bool(_ending(self.pid))

    def stop(self) -> str:
        """Kill the child and all in its group, reap it, and say how it ended before that ("" where we killed it)."""
        process = self._child()
        how = _ending(process.pid)
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        self._process = None
        self.ready = False
        self.queue.clear()
        return how

    def wait_for_end(self) -> None:
        """Give a child that has closed its pipes the moment it needs to be gone, so that `stop` can say how."""
        limit = time.monotonic() + _EXIT_LIMIT_S
        while not self.has_ended() and time.monotonic() < limit:
            time.sleep(0.002)

    def _child(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the worker is started before it is used"
        return self._process


def _ending(pid: int) -> str:
    """How a child ended, in words; "" while it runs. It stays unreaped."""
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
