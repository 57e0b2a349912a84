"""No process of environments outlives its parent, however the parent ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import ppoctl
from leftover import all_gone

PARENT = Path(__file__).parent / "environment_parent.py"


@pytest.mark.parametrize("doing", ["idle", "hang-in-c", "leave"])
def test_environments_end_with_their_parent(doing: str) -> None:
    if sys.platform != "linux" and doing != "idle":
        pytest.skip("only Linux ends a hanging child with its parent")
    paths = [str(Path(ppoctl.__file__).parents[1]), str(PARENT.parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        [sys.executable, str(PARENT), doing], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        children = [int(word) for word in parent.stdout.readline().split()]
        assert len(children) == 2
        if doing != "leave":
            assert all(psutil.pid_exists(child) for child in children)
            parent.send_signal(signal.SIGKILL)
        parent.wait(timeout=30)
    assert all_gone(children)
