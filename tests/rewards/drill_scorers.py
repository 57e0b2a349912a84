"""Scorers that misbehave on demand: the truth says how. Imported in the children, as a user's scorer would be."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from ppoctl.rewards.verdict import Verdict


def score(response: str, truth: str) -> Verdict:
    """The length of the response, unless `truth` orders a misdeed."""
    name, _, detail = truth.partition(" ")
    if name in MISDEEDS:
        return MISDEEDS[name](detail)
    return Verdict(float(len(response)))


def returns_a_bare_number(response: str, truth: str) -> float:
    return 1.0


def _hang_in_python(detail: str) -> Verdict:
    while True:
        time.sleep(0.01)


def _hang_in_c(detail: str) -> Verdict:
    # Catastrophic backtracking: C code that holds the interpreter lock and looks at signals only now and then.
    re.match(r"(a|aa)+$", "a" * 200 + "b")
    raise AssertionError("unreachable")


def _ignore_signals_and_hang(detail: str) -> Verdict:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return _hang_in_c(detail)


def _raise(detail: str) -> Verdict:
    raise ValueError(f"cannot parse\n   {object()}")


def _leave(detail: str) -> Verdict:
    sys.exit(3)


def _exit(detail: str) -> Verdict:
    os._exit(3)


def _kill_itself(detail: str) -> Verdict:
    os.kill(os.getpid(), signal.SIGKILL)
    return _hang_in_python(detail)


def _number(detail: str) -> Verdict:
    return Verdict(float(detail))


def _nan_extra(detail: str) -> Verdict:
    return Verdict(1.0, {"margin": float("nan")})


def _text(detail: str) -> Verdict:
    return Verdict("1")  # type: ignore[arg-type]


def _chatter(detail: str) -> Verdict:
    print('{"number": 0, "value": 99.0, "extras": {}}', flush=True)
    os.write(1, b"not json\n")
    assert sys.stdin.read() == ""
    return Verdict(7.0)


def _fork(detail: str) -> Verdict:
    os.fork()
    return Verdict(5.0)


def _start_a_process_and_hang(detail: str) -> Verdict:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(detail).write_text(str(process.pid))
    return _hang_in_python(detail)


def _sleep(detail: str) -> Verdict:
    time.sleep(float(detail))
    return Verdict(1.0)


def _meet(detail: str) -> Verdict:
    """Wait until as many processes as `COUNT FOLDER` says are in this function."""
    count, folder = detail.split(" ", 1)
    (Path(folder) / str(os.getpid())).touch()
    while len(list(Path(folder).iterdir())) < int(count):
        time.sleep(0.01)
    return Verdict(1.0)


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
    "start-and-hang": _start_a_process_and_hang,
    "sleep": _sleep,
    "meet": _meet,
}
