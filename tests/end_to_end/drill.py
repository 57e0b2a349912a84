"""Runs in forked processes, killed at a moment that a fault-injection test (drill) chooses."""

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence

import jaxtyping
import torch


def in_a_process(action: Callable[[], object], *, exits: bool = False) -> int:
    """Run in a forked child; return the signal that ended it, or 0 if it succeeded. With `exits`: return its exit
    code, with signals negative; resources that it leaves to this process are released.

    The parent must not have computed with several threads before: their pool does not survive a fork.
    """
    child = _start(action)
    return os.waitstatus_to_exitcode(_status_of(child)) if exits else _end_of(child)


def side_by_side(actions: Sequence[Callable[[], object]]) -> None:
    """Run all of them, distributed over one forked child per core; fail if any fails."""
    hands = min(len(os.sched_getaffinity(0)), len(actions))
    children = [_start(lambda i=i: [action() for action in actions[i::hands]]) for i in range(hands)]
    ends = [os.waitpid(child, 0)[1] for child in children]
    assert ends == [0] * hands, "a run failed"


def _start(action: Callable[[], object]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            # Shapes in these runs are checked in the undisturbed run.
            jaxtyping.config.update("jaxtyping_disable", True)
            action()
            status = 0
        except BaseException:  # noqa: BLE001 - shown here, because the child ends without pytest
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return child


def _status_of(child: int) -> int:
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            return status


def _end_of(child: int) -> int:
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the run failed"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killer(at: int) -> Callable[[int, str], None]:
    """Return a witness action that kills the process at the moment with this number."""

    def act(number: int, name: str) -> None:
        if number == at:
            kill_self()

    return act
