"""Programs that try to leave their sandbox or exhaust the machine. Each is contained, its end is reported, no process
is left, and the next program runs."""

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ppoctl.rewards.sandbox.job import Limits, SandboxJob
from ppoctl.rewards.sandbox.launcher import _locked
from ppoctl.rewards.sandbox.sandbox_client import Sandbox
from rewards.attacks import ATTACKS, PRELUDE
from rewards.sandboxes import WAYS, way

LIMITS = Limits(timeout_s=20.0, memory_mib=128, processes=4, output_kib=64, files_mib=4)
SHORT_S = {False: 0.3, True: 3.0}
"""Time limit in seconds of an attack that does not end by itself; True: Python must start in it, and print."""


SAME_FOR_ANY_USER = (
    "bytes",
    "environment",
    "frames",
    "limits raised",
    "many",
    "piece by piece",
    "busy",
    "sleep",
    "stops itself",
    "output",
    "writes on",
    "end",
)
"""Words in the names of attacks whose containment does not depend on the user."""
OTHER_USER = pytest.mark.ci("namespaces-*; namespaces without root-a memory bomb at once")
CASES = [
    pytest.param(
        kind, name, marks=[OTHER_USER] * (kind == WAYS[1] and any(word in name for word in SAME_FOR_ANY_USER))
    )
    for kind in WAYS
    for name in ATTACKS
]


@pytest.fixture(scope="module")
def sandbox_of() -> Iterator[Callable[[str], Sandbox]]:
    """Yield a function that returns the sandbox of a kind. One is open at a time."""
    opened: dict[str, Sandbox] = {}

    def sandbox(name: str) -> Sandbox:
        if name not in opened:
            kind, python = way(name)
            close()
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TRUTH_OF_THE_ROW", "the-expected-output")
                opened[name] = Sandbox(kind, python)
                assert opened[name].run(SandboxJob("print('up')", limits=LIMITS)).output == "up\n"
        return opened[name]

    def close() -> None:
        while opened:
            opened.popitem()[1].close()

    yield sandbox
    close()


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_attack_program_is_isolated(
    kind: str, name: str, sandbox_of: Callable[[str], Sandbox], listener: socket.socket, tmp_path: Path
) -> None:
    sandbox = sandbox_of(kind)
    attack = ATTACKS[name]
    outside = tmp_path / "outside.txt"
    outside.write_text("as it was")
    outside.chmod(0o666)
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    paths = {
        "PORT": listener.getsockname()[1],
        "OUTSIDE": str(outside),
        "LAUNCHER": sandbox.pid,
        "TESTS": os.getpid(),
    }
    constants = "".join(f"{key} = {value!r}\n" for key, value in paths.items())
    waits = "timeout" in attack.outcomes
    for timeout_s in (SHORT_S[attack.refused > 0] if waits else LIMITS.timeout_s, 30.0):
        job = SandboxJob(PRELUDE + constants + attack.program, limits=replace(LIMITS, timeout_s=timeout_s))
        ran = sandbox.run(job)
        if len(re.findall("^refused ", ran.output, re.MULTILINE)) >= attack.refused:
            break  # otherwise once more: a busy machine may not have run it for long enough
    assert ran.outcome in attack.outcomes, ran
    assert "got " not in ran.output, ran
    assert len(re.findall("^refused ", ran.output, re.MULTILINE)) >= attack.refused, ran
    assert len(ran.output) <= LIMITS.output_kib << 10
    assert outside.read_text() == "as it was"
    assert nothing_left(sandbox)
    assert sandbox.run(SandboxJob("print(input())", "on", LIMITS)).output == "on\n"


@pytest.mark.parametrize("kind", WAYS)
def test_program_that_is_being_started_is_ended(kind: str, sandbox_of: Callable[[str], Sandbox]) -> None:
    sandbox = sandbox_of(kind)
    for _ in range(20):
        job = SandboxJob("import time; time.sleep(1e6)", limits=replace(LIMITS, timeout_s=1e-6))
        assert sandbox.run(job).outcome == "timeout"
        assert nothing_left(sandbox)


def test_program_whose_supervisor_has_ended_exits_before_it_runs() -> None:
    """All processes of its user were killed when it did not have this user yet."""
    way("user")  # requires root
    tests = os.getpid()
    for supervisor in (tests, 1):
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                _locked(1_900_000_000, supervisor)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (supervisor != tests)


def nothing_left(sandbox: Sandbox) -> bool:
    assert sandbox.pid is not None
    return not psutil.Process(sandbox.pid).children(recursive=True)
