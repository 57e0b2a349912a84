"""An object in a child process, without Ray: it answers, fails, dies, and ends with its parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from leftover import all_gone
from ppoctl.core.errors import ProcessLostError
from ppoctl.engines.child.process import ChildFactory, ChildProcess, first_done, prestarted, taken

HERE = str(Path(__file__).parent)
COUNTER = ChildFactory("child_target:Counter", (40,), 3)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildProcess]:
    monkeypatch.setenv("PYTHONPATH", HERE)
    made = ChildProcess("the counter", COUNTER)
    yield made
    made.close()


def test_child_replies_in_order_and_skips_unclaimed_reply(child: ChildProcess) -> None:
    assert not child.is_running
    forgotten, second = child.begin("add", [1, 1]), child.begin("add", [5])
    assert second.answers() == [47]
    assert child.call("add", [3]) == 50
    assert forgotten.answers() == [42]
    assert child.call("pid") not in (os.getpid(), None)
    assert child.call("threads") == "3"
    assert child.call("typed") == ""  # its standard input is not the socket


def test_child_error_keeps_traceback_and_next_call_restarts_child(
    child: ChildProcess,
) -> None:
    assert child.call("add", [1]) == 41
    with pytest.raises(KeyError, match="seven") as raised:
        child.call("fails")
    [note] = raised.value.__notes__
    assert "in fail\n" in note
    assert not child.is_running
    assert child.call("add", [2]) == 42
    with pytest.raises(RuntimeError, match="Unportable: not seven"):
        child.call("fails_alone")
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        child.call("missing")


def test_first_call_raises_constructor_error_of_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", HERE)
    with pytest.raises(ValueError, match="no room"):
        ChildProcess("it", ChildFactory("child_target:refuse", ("no room",), 1)).call("add", [1])


def test_killed_child_fails_pending_call_and_restarts(child: ChildProcess, tmp_path: Path) -> None:
    first = child.call("pid")
    waiting = child.begin("never", str(tmp_path / "at work"))
    while not (tmp_path / "at work").exists():
        time.sleep(0.01)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(ProcessLostError, match="the process of the counter died during `never`") as raised:
        waiting.answers()
    assert "resume RUN" in str(raised.value.hint)
    with pytest.raises(ProcessLostError):
        waiting.answers()
    assert child.call("add", [2]) == 42
    assert child.call("pid") != first


def test_child_ignores_job_signals(child: ChildProcess) -> None:
    pid = child.call("pid")
    assert os.getsid(pid) != os.getsid(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert child.call("add", [2]) == 42


@pytest.mark.parametrize("how", ["closed", "killed"])
@pytest.mark.parametrize("during", ["call", "start"])
def test_busy_child_ends_with_its_parent(tmp_path: Path, how: str, during: str) -> None:
    file = str(tmp_path / "at work")
    target, begin = {
        "call": ("child_target:Counter', (0,)", f"child.begin('never', {file!r})"),
        "start": (f"child_target:start_forever', ({file!r},)", "child.start()"),
    }[during]
    script = (
        "import sys; from ppoctl.engines.child.process import *\n"
        f"child = ChildProcess('it', ChildFactory('{target}, 1))\n"
        f"{begin}\nprint(child._process.pid, flush=True)\n"
        "sys.stdin.read(); child.close(); print('closed', flush=True); sys.stdin.close()"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((HERE, *sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        pid = int(parent.stdout.readline())
        while not (tmp_path / "at work").exists():
            time.sleep(0.01)
        if how == "killed":
            parent.kill()
        else:
            parent.stdin.close()
        assert all_gone([pid], within_s=20)
        parent.wait()


def test_prestarted_child_is_taken_once_and_unused_children_end(
    child: ChildProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ChildProcess("another", ChildFactory("child_target:Counter", (1,), 3))
    with prestarted(child, other):
        assert taken(ChildFactory("child_target:Counter", (2,), 3)) is None
        found = taken(COUNTER)
        assert found is child
        assert taken(COUNTER) is None
        left = other.call("pid")
    assert all_gone([left], within_s=20)
    assert child.call("add", [2]) == 42


def test_first_reply_of_several_children_arrives_first(child: ChildProcess, tmp_path: Path) -> None:
    second = ChildProcess("another", ChildFactory("child_target:Counter", (1,), 3))
    files = [str(tmp_path / name) for name in "ab"]
    try:
        pid = second.call("pid")
        slow, quick = child.begin("when_told", files[0]), second.begin("when_told", files[1])
        Path(files[1]).touch()
        assert first_done([slow, quick]) == [quick]
        assert quick.answers() == [files[1]]
        dead = second.begin("never", str(tmp_path / "at work"))
        os.kill(pid, signal.SIGKILL)
        assert first_done([slow, dead]) == [dead]
        with pytest.raises(ProcessLostError, match="another died during `never`"):
            dead.answers()
        assert first_done([slow, dead]) == [dead], "an ended call does not wait"
        Path(files[0]).touch()
        assert first_done([slow]) == [slow]
        assert slow.answers() == [files[0]]
    finally:
        second.close()
