"""Scorers that misbehave on demand: the ground truth names the fault. Scorer processes import it, like a user's
scorer."""

import ctypes
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ppoctl.core.batch.scores import ScoreRequest
from ppoctl.rewards.function import NoScoreError, RewardValue


def score(request: ScoreRequest) -> RewardValue:
    """Return the length of the response, unless the ground truth names a fault."""
    name, _, detail = (request.truth or "").partition(" ")
    if name in MISDEEDS:
        return MISDEEDS[name](detail)
    return RewardValue(float(len(request.response)))


def all_that_it_is_given(request: ScoreRequest) -> RewardValue:
    """Raise an error whose message is the digest of all inputs."""
    raise ValueError(hashlib.sha256(repr(request).encode()).hexdigest())


def returns_a_bare_number(request: ScoreRequest) -> float:
    return 1.0


def _hang_in_python(detail: str) -> RewardValue:
    while True:
        time.sleep(0.01)


def _hang_in_c(detail: str) -> RewardValue:
    """Hang in C code that holds the interpreter lock; create the file first, if one is named."""
    if detail:
        Path(detail).touch()
    while True:
        ctypes.PyDLL(None).sleep(600)


def _ignore_signals_and_hang(detail: str) -> RewardValue:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return _hang_in_c(detail)


def _raise(detail: str) -> RewardValue:
    raise ValueError(f"cannot parse\n   {object()}")


def _leave(detail: str) -> RewardValue:
    sys.exit(3)


def _exit(detail: str) -> RewardValue:
    os._exit(3)


def _kill_itself(detail: str) -> RewardValue:
    os.kill(os.getpid(), signal.SIGKILL)
    return _hang_in_python(detail)


def _number(detail: str) -> RewardValue:
    return RewardValue(float(detail))


def _nan_extra(detail: str) -> RewardValue:
    return RewardValue(1.0, {"margin": float("nan")})


def _text(detail: str) -> RewardValue:
    return RewardValue("1")  # type: ignore[arg-type]


def _chatter(detail: str) -> RewardValue:
    print('{"number": 1, "value": 99.0, "extras": {}}', flush=True)
    os.write(1, b"not json\n")
    assert sys.stdin.read() == ""
    return RewardValue(7.0)


def _print_without_end(detail: str) -> RewardValue:
    while True:
        print("x" * 10**6)
        time.sleep(0.05)


def _print(detail: str) -> RewardValue:
    print("x" * int(detail))
    print("y" * int(detail), file=sys.stderr)
    return RewardValue(1.0)


def _leave_a_daemon_and_hang(detail: str) -> RewardValue:
    """Start a daemon that inherits all descriptors, has its own process group, and ends when the file is deleted."""
    Path(detail).touch()
    if os.fork() == 0:
        os.setsid()
        while Path(detail).exists():
            time.sleep(0.01)
        os._exit(0)
    Path(f"{detail}-hangs").touch()
    return _hang_in_python(detail)


def _fork(detail: str) -> RewardValue:
    os.fork()
    return RewardValue(5.0)


def _start_a_process_and_hang(detail: str) -> RewardValue:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(detail).write_text(str(process.pid))
    return _hang_in_python(detail)


def _sleep(detail: str) -> RewardValue:
    time.sleep(float(detail))
    return RewardValue(1.0)


def _tokens(detail: str) -> RewardValue:
    values = [float(word) for word in detail.split()]
    return RewardValue(sum(values), token_values=values)


def _unreachable(detail: str) -> RewardValue:
    raise NoScoreError("unreachable", detail)


def _meet(detail: str) -> RewardValue:
    """Wait until N processes are in this function; the ground truth has N and a folder."""
    count, folder = detail.split(" ", 1)
    (Path(folder) / str(os.getpid())).touch()
    while len(list(Path(folder).iterdir())) < int(count):
        time.sleep(0.01)
    return RewardValue(1.0)


MISDEEDS = {
    "hang-in-python": _hang_in_python,
    "hang-in-c": _hang_in_c,
    "hang-stubbornly": _ignore_signals_and_hang,
    "raise": _raise,
    "sys.exit": _leave,
    "os._exit": _exit,
    "kill": _kill_itself,
    "number": _number,
    "nan-extra": _nan_extra,
    "text": _text,
    "chatter": _chatter,
    "fork": _fork,
    "print-without-end": _print_without_end,
    "print": _print,
    "leave-a-daemon-and-hang": _leave_a_daemon_and_hang,
    "start-and-hang": _start_a_process_and_hang,
    "sleep": _sleep,
    "meet": _meet,
    "tokens": _tokens,
    "unreachable": _unreachable,
}
