"""Runs in forked processes that are killed where a drill says."""

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable

import torch


def in_a_process(action: Callable[[], object]) -> int:
    """Run in a forked child; returns the signal that ended it, 0 when it ended well.

    The parent must not have computed with several threads before: their pool does not survive a fork.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            action()
            status = 0
        except BaseException:  # noqa: BLE001 - shown here, because the child ends without pytest
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the run failed"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killer(at: int) -> Callable[[int, str], None]:
    """Kills the process at the moment with this number."""

    def act(number: int, name: str) -> None:
        if number == at:
            kill_self()

    return act
