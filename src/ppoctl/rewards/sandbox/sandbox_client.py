"""The scorer's side of a sandbox: run a program and return its output."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from select import select
from typing import Any

import ppoctl
from ppoctl.core.errors import MissingAssetError
from ppoctl.rewards.sandbox.job import EXIT_SLACK_S, Kind, Limits, Ran, SandboxJob

_READ_BYTES = 1 << 16


class SandboxError(Exception):
    """A sandbox could not be created, or its launcher died. The program is not the cause of this error."""


class Sandbox:
    """A launcher of sandboxes, started by the first program and restarted if it dies. Only one thread may use the
    launcher, which ends with that thread."""

    def __init__(self, kind: Kind, python: Sequence[str] = ()) -> None:
        """`python` is the command line of the Python interpreter that creates sandboxes and runs programs; empty:
        this interpreter."""
        words = python or (sys.executable,)
        self._command = [*words, "-S", "-m", "ppoctl.rewards.sandbox.launcher", kind, str(os.getpid())]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the launcher; None: the launcher does not run."""
        return None if self._process is None else self._process.pid

    def run(self, job: SandboxJob) -> Ran:
        """Run a program. None of its processes is left afterwards. Raises SandboxError if the program cannot be run
        safely."""
        try:
            if self._process is None:
                self._process = _started(self._command)
            reply = _exchange(self._process, json.dumps(asdict(job)), job.limits.timeout_s + EXIT_SLACK_S)
        except (OSError, ValueError) as error:
            self.close()
            raise SandboxError(f"the launcher of sandboxes ended: {error}") from error
        if "failed" in reply:
            raise SandboxError(f"no sandbox: {reply['failed']}")
        return Ran(**reply)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Kill the launcher, and with it a running sandbox. May be called twice."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def require(kind: Kind, python: Sequence[str] = (), *, key: str = "reward") -> None:
    """Run a program that attempts operations that a sandbox must deny. Raises MissingAssetError if a sandbox cannot
    be created, or if it allows one of the operations; the error names the setting of this machine that forbids
    sandboxes and the fix. `key` is the recipe table that requires the sandbox."""
    sandbox = Sandbox(kind, python)
    try:
        ran = sandbox.run(SandboxJob(_TRIAL, limits=Limits(timeout_s=_TRIAL_S, processes=2)))
    except SandboxError as error:
        raise _refusal(kind, key, str(error)) from error
    finally:
        sandbox.close()
    if (ran.outcome, ran.output) != ("ok", _HELD):
        raise _refusal(
            kind, key, f"a test ended as `{ran.outcome} {ran.code}` with output `{ran.output.strip()[:200]}`"
        )


_TRIAL_S = 30.0
"""Seconds that a busy machine may take for the trial, which ends at once otherwise."""
_HELD = "held\n"
_TRIAL = f"""
import os, signal, socket
def refused(attempt):
    try:
        attempt()
    except OSError:
        return True
    return False
def fork():
    if os.fork() == 0:
        signal.pause()
tries = {{
    "sockets": lambda: socket.socket(),
    "files outside": lambda: open({str(Path(__file__))!r}),
    "processes of others": lambda: os.listdir("/proc/1"),
    "writing to the system": lambda: open("/usr/lib/ppoctl-trial", "w"),
    "many processes": lambda: [fork() for _ in range(4)],
}}
print(", ".join(name for name, attempt in tries.items() if not refused(attempt)) or "held")
"""
"""Program that attempts operations that a sandbox must deny, and prints those that succeeded."""


def _refusal(kind: Kind, key: str, why: str) -> MissingAssetError:
    return MissingAssetError(
        f"this machine has no safe sandbox for programs (`{key}.sandbox` is `{kind}`): {why}", hint=_fix(kind, key)
    )


def _fix(kind: Kind, key: str) -> str:
    """Return the command that allows sandboxes, according to the setting that forbids them."""
    if kind == "user":
        return "ppoctl doctor  # Linux 5.13 with Landlock, as root, and a Python that every user may read"
    for setting, forbids in (
        ("user.max_user_namespaces", "0"),
        ("kernel.unprivileged_userns_clone", "0"),
        ("kernel.apparmor_restrict_unprivileged_userns", "1"),
    ):
        with suppress(OSError):
            if Path("/proc/sys", *setting.split(".")).read_text().strip() == forbids:
                return f"sudo sysctl -w {setting}={'0' if forbids == '1' else '15000'}"
    return f"--set {key}.sandbox=user  # as root; or allow new user namespaces (Docker: --security-opt seccomp=...)"


def _started(command: list[str]) -> subprocess.Popen[bytes]:
    environment = {"PYTHONPATH": str(Path(ppoctl.__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _exchange(process: subprocess.Popen[bytes], line: str, limit_s: float) -> dict[str, Any]:
    """Send a line and return the reply. Raises OSError if the launcher ends or does not reply in time."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line.encode() + b"\n")
    process.stdin.flush()
    deadline = time.monotonic() + limit_s
    inbox = b""
    while not inbox.endswith(b"\n"):
        ready, _, _ = select([process.stdout], [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            raise TimeoutError(f"no reply within {limit_s:g} s")
        received = os.read(process.stdout.fileno(), _READ_BYTES)
        if not received:
            raise ConnectionError("it closed its pipe")
        inbox += received
    return dict(json.loads(inbox))
