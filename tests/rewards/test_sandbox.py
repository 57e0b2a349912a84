"""Sandbox: a machine that forbids it is reported with the cause, and no program outlives its sandbox."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from leftover import all_gone
from ppoctl.core.errors import MissingAssetError
from ppoctl.rewards.sandbox.job import Limits, Ran, SandboxJob
from ppoctl.rewards.sandbox.sandbox_client import Sandbox, SandboxError, require
from rewards.sandboxes import WAYS, way

FOLDER = Path(__file__).parent
SLEEPS_STUBBORNLY = """
import ctypes, os, signal, time
for _ in range(2):
    os.fork()
    os.setsid() if os.getpid() != os.getpgid(0) else None
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # no signal when a parent ends
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
time.sleep(60)
"""
LONG = Limits(timeout_s=60.0, processes=4)


@pytest.mark.parametrize("name", WAYS)
def test_working_sandbox_is_accepted(name: str) -> None:
    require(*way(name))


@pytest.mark.parametrize(
    ("name", "what", "why"),
    [
        ("namespaces", "namespaces", "unshare: Operation not permitted"),
        ("namespaces", "mounts", "mount of /: Operation not permitted"),
        ("namespaces", "filters", "a test ended as `ok 0` with output `sockets`"),
        ("user", "landlock", "Landlock: Operation not permitted"),
        ("user", "users", "Operation not permitted"),
    ],
)
def test_missing_isolation_raises_and_names_cause(name: str, what: str, why: str) -> None:
    kind, python = way(name)
    with pytest.raises(MissingAssetError) as refused:
        require(kind, [*python, "-S", str(FOLDER / "forbidding.py"), what])
    assert f"no safe sandbox for programs (`reward.sandbox` is `{kind}`)" in refused.value.message
    assert why in refused.value.message
    assert refused.value.hint


def test_sandbox_hint_names_key_of_requesting_table(monkeypatch: pytest.MonkeyPatch) -> None:
    # No setting of this machine forbids it.
    monkeypatch.setattr(Path, "read_text", lambda _: "")
    with pytest.raises(MissingAssetError) as refused:
        require("namespaces", ["/bin/false"], key="reward.cases.apps")
    assert (refused.value.hint or "").startswith("--set reward.cases.apps.sandbox=user")


def test_invalid_sandbox_python_raises() -> None:
    with pytest.raises(MissingAssetError, match="no safe sandbox"):
        require("namespaces", ["/bin/false"])
    with pytest.raises(MissingAssetError, match="no safe sandbox"):
        require("namespaces", ["/nowhere/python"])


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("killed", ["launcher", "supervisor", "process 1"])
def test_killed_process_leaves_no_program_and_sandbox_recovers(name: str, killed: str) -> None:
    with closing(Sandbox(*way(name))) as sandbox, working(sandbox) as (launcher, inside, end):
        victim = {"launcher": launcher, "supervisor": inside[0], "process 1": inside[1]}[killed]
        victim.kill()
        assert all_gone(process.pid for process in inside)
        assert isinstance(end(), SandboxError | Ran)
        assert sandbox.run(SandboxJob("print('on')")).output == "on\n"


def test_inherited_descriptors_are_closed_in_programs() -> None:
    left_open = ("sh", "-c", 'exec 9</etc/passwd; exec "$@"', "sh", sys.executable)
    with closing(Sandbox("namespaces", left_open)) as sandbox:
        ran = sandbox.run(SandboxJob("import os\ntry: print(os.read(9, 10))\nexcept OSError: print('closed')"))
    assert ran.output == "closed\n"


@pytest.mark.parametrize("name", WAYS)
def test_sandbox_processes_are_first_to_be_killed_for_memory(name: str) -> None:
    with closing(Sandbox(*way(name))) as sandbox, working(sandbox) as (launcher, inside, _):
        assert {Path(f"/proc/{process.pid}/oom_score_adj").read_text() for process in inside} == {"1000\n"}
        launcher.kill()


def test_sandbox_processes_end_with_scorer_process(tmp_path: Path) -> None:
    script = (
        "import sys; from ppoctl.rewards.sandbox.sandbox_client import Sandbox\n"
        "from ppoctl.rewards.sandbox.job import *\n"
        "sandbox = Sandbox('namespaces'); sandbox.run(SandboxJob('pass')); print(sandbox.pid, flush=True)\n"
        f"sandbox.run(SandboxJob({SLEEPS_STUBBORNLY!r}, limits=Limits(timeout_s=60.0)))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as scorer:
        assert scorer.stdout is not None
        launcher = psutil.Process(int(scorer.stdout.readline()))
        inside = wait_for(launcher)
        scorer.kill()
    assert all_gone(process.pid for process in (launcher, *inside))


def test_program_text_is_lossless_and_hashes_are_reproducible() -> None:
    text = "snow \u2603\n\x00 and a lone \ud800\n"
    with closing(Sandbox("namespaces")) as sandbox:
        ran = sandbox.run(SandboxJob("import sys; sys.stdout.write(sys.stdin.read())", text))
        assert ran == Ran("ok", 0, "snow \u2603\n\x00 and a lone ?\n")
        first, second = (sandbox.run(SandboxJob("print(hash('a'), __name__)")) for _ in range(2))
    assert first == second
    assert first.output.endswith(" __main__\n")


class working:  # noqa: N801 - reads as a word of the sentence
    """Context with a stubborn program that runs: the launcher, its descendants, and a function that waits for the
    end."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.found: list[object] = []
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.found.append(self.sandbox.run(SandboxJob(SLEEPS_STUBBORNLY, limits=LONG)))
        except SandboxError as error:
            self.found.append(error)

    def __enter__(self) -> tuple[psutil.Process, list[psutil.Process], Callable[[], object]]:
        self.sandbox.run(SandboxJob("pass"))  # the launcher ends with the thread that started it
        assert self.sandbox.pid is not None
        self.thread.start()
        launcher = psutil.Process(self.sandbox.pid)
        return launcher, wait_for(launcher), self._ended

    def _ended(self) -> object:
        self.thread.join(20)
        return self.found[0]

    def __exit__(self, *_: object) -> None:
        self.thread.join(20)


def wait_for(launcher: psutil.Process) -> list[psutil.Process]:
    """Return the processes below a launcher, from the top, once the program has four processes."""
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        with suppress(psutil.NoSuchProcess):
            inside = launcher.children(recursive=True)
            if len(inside) >= 5:
                return sorted(inside, key=lambda process: process.pid)
        time.sleep(0.01)
    raise AssertionError(launcher.children(recursive=True))
