"""No child outlives its parent, however the parent ends and whatever the child is doing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from leftover import all_gone

PARENT = Path(__file__).parent / "orphan_parent.py"

pytestmark = pytest.mark.usefixtures("drill_scorers")


@pytest.mark.parametrize("doing", ["idle", "hang-in-c", "hang-stubbornly"])
def test_children_of_killed_parent_end(doing: str) -> None:
    if sys.platform != "linux" and doing != "idle":
        pytest.skip("only Linux ends a hanging child with its parent")
    with _parent(doing) as parent:
        children = _children_of(parent)
        if doing != "idle":
            assert parent.stdout is not None
            assert parent.stdout.readline() == "busy\n"
        assert all(psutil.pid_exists(child) for child in children)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert all_gone(children)


@pytest.mark.parametrize("doing", ["leave", "leave-work"])
def test_parent_exit_without_close_ends_children_immediately(doing: str) -> None:
    with _parent(doing) as parent:
        children = _children_of(parent)
        try:
            parent.wait(timeout=30)  # a hanging scorer has a deadline of 600 s
        finally:
            parent.kill()
        assert all_gone(children)


def test_children_have_separate_process_groups() -> None:
    with _parent("idle") as parent:
        for child in _children_of(parent):
            assert os.getpgid(child) == child
        parent.kill()


def test_child_with_unexpected_parent_exits() -> None:
    child = [sys.executable, "-m", "ppoctl.rewards.scorer_main", '{"entry": "drill_scorers:score", "parent": 1}']
    done = subprocess.run(child, stdin=subprocess.PIPE, capture_output=True, env=_environment(), timeout=30)
    assert (done.returncode, done.stdout) == (1, b"")


def _parent(doing: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PARENT), doing], stdout=subprocess.PIPE, text=True, env=_environment()
    )


def _environment() -> dict[str, str]:
    import ppoctl

    source = str(Path(ppoctl.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ["PYTHONPATH"]])}


def _children_of(parent: subprocess.Popen[str]) -> list[int]:
    assert parent.stdout is not None
    children = [int(word) for word in parent.stdout.readline().split()]
    assert len(children) == 2
    return children
