"""Parts for the tests of the runner of `gpu_first.py`: the behaviors of parts on a real GPU."""

import faulthandler
import os
import subprocess
import sys
import time

from gpu_parts.lines import JOB, Skipped, notify


def works() -> None:
    notify("works", right=True, number=7)


def hangs() -> None:
    waits_for_ever()


def waits_for_ever() -> None:
    time.sleep(600)


def hangs_with_a_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    notify("hangs_with_a_process", pid=child.pid)
    waits_for_ever()


def crashes() -> None:
    notify("crashes", right=True)
    faulthandler._sigsegv()


def stops_in_mid_line() -> None:
    with JOB.file.open("a") as lines:
        lines.write('{"part": "stops_in_mid_line", "ri')
    os._exit(3)


def fails() -> None:
    raise RuntimeError("an illegal memory access was encountered")


def measures_wrongly() -> None:
    notify("ipc", right=False)


def skips() -> None:
    raise Skipped("no such kernel")


def is_silent() -> None:
    pass
