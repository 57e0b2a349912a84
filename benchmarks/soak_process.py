"""Starts `ppoctl` for `soak.py`, disturbs it, and reports leftover processes.

Commands are forked from one process that has imported torch, Megatron-Core and vLLM, but not ppoctl, which saves the
ten seconds of imports per start; or, if a case requests it, executed in a new interpreter (also under strace). That
process is the reaper of all their descendants: it becomes the parent of every orphan.
"""

import ctypes
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HANG_S = 900.0
PR_SET_CHILD_SUBREAPER, PR_CAPBSET_DROP, LINUX_CAPABILITY_VERSION_3 = 36, 24, 0x20080522
HEAVY = (
    "torch",
    "megatron.core.dist_checkpointing",
    "megatron.core.models.gpt",
    "transformers",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.model_executor.models.qwen2",
    "vllm.v1.worker.cpu_worker",
)
BEFORE_IMPORTS = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # otherwise importing pyarrow starts a thread
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_MLA_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Variables that ppoctl sets before its own imports; these imports come earlier."""


@dataclass(frozen=True)
class Slow:
    """How a command is slowed. `files`: part of the names of files whose fsync takes up to `fsync_s` more (seeded by
    `seed`), so that one role is later than the other. `strace`: every few fsyncs are delayed by the kernel, in a new
    interpreter. `pauses`: when the process is stopped and for how long, both in seconds."""

    files: str = ""
    fsync_s: float = 0.0
    seed: int = 0
    strace: tuple[str, ...] = ()
    pauses: tuple[tuple[float, float], ...] = ()
    fresh: bool = False


def slowness(rng: random.Random) -> Slow | None:
    """Return how an attempt is slowed: not at all, by one role's files, by the kernel, or by being stopped now and
    then."""
    how = rng.random()
    if how < 0.3:
        return None
    if how < 0.65:
        files = rng.choice(("states/actor", "states/critic", "steps/", ".jsonl"))
        most_s = 0.05 if files == ".jsonl" else rng.choice((0.05, 0.5, 2.0))
        return Slow(files=files, fsync_s=most_s, seed=rng.getrandbits(32))
    if how < 0.8 and (strace := shutil.which("strace")):
        late = f"inject=fsync:delay_enter={rng.choice((20000, 200000))}:when={rng.randint(1, 9)}+{rng.randint(2, 9)}"
        options = ["-DDD", "-f", "--seccomp-bpf", "-qq", "-o", "/dev/null", "-e", "trace=fsync", "-e", late]
        return Slow(strace=(strace, *options))
    if how < 0.85:
        return Slow(fresh=True)
    pauses = tuple((rng.uniform(0, 10), rng.uniform(0.01, 1.0)) for _ in range(5))
    return Slow(pauses=pauses)


@dataclass(frozen=True)
class Blow:
    """A signal of one of the kinds, sent when `reached(seconds since the start)`; the second of two is `gap_s`
    later."""

    kind: str
    reached: Callable[[float], bool]
    gap_s: float


@dataclass
class Ended:
    """A command that has ended. `code` is minus the signal number if a signal ended it."""

    words: list[str]
    code: int
    screen: str
    seconds: float
    struck: str = ""
    orphans: list[str] = field(default_factory=list)


def _processes() -> Iterator[tuple[int, int, int, str]]:
    """Return pid, parent, session and name of every process that is not a zombie."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            before, _, after = path.read_text().rpartition(")")
            fields = after.split()
            if fields[0] != "Z":
                yield int(path.parent.name), int(fields[1]), int(fields[3]), before.partition("(")[2]


class Starter:
    """Runs one command at a time."""

    def __init__(self, env: dict[str, str]) -> None:
        self._channel, theirs = socket.socketpair()
        self._env = {**os.environ, **BEFORE_IMPORTS, **env}
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=self._env,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C in this process must not reach it
            )
        self._answers = self._channel.makefile("r")
        assert self._answers.readline() == "ready\n"

    def close(self) -> None:
        self._answers.close()
        self._channel.close()
        self._server.wait()

    def __call__(
        self,
        folder: Path,
        words: list[str],
        *,
        blow: Blow | None = None,
        slow: Slow | None = None,
        powerless: bool = False,
    ) -> Ended:
        """Run `ppoctl WORDS` in this folder to its end, with these signals."""
        slow = slow or Slow()
        screen = folder / "screen"
        screen.write_text("")
        request = {
            "words": words,
            "folder": str(folder),
            "screen": str(screen),
            "powerless": powerless,
            "files": slow.files,
            "fsync_s": slow.fsync_s,
            "seed": slow.seed,
            "strace": slow.strace,
            "fresh": slow.fresh,
        }
        began = time.monotonic()
        self._channel.sendall(json.dumps(request).encode() + b"\n")
        pid = int(self._answers.readline())
        struck = self._strike(pid, began, blow, slow.pauses)
        code = int(self._answers.readline())
        seconds = time.monotonic() - began
        return Ended(words, code, screen.read_text(errors="replace"), seconds, struck, self._orphans(pid))

    def _over(self, within_s: float) -> bool:
        return bool(select.select([self._channel], [], [], within_s)[0])

    def _strike(self, pid: int, began: float, blow: Blow | None, pauses: tuple[tuple[float, float], ...]) -> str:
        """Send the signals; return when the command has ended, or is about to."""
        to_come, struck = sorted(pauses), ""
        while not self._over(0.002):
            now = time.monotonic() - began
            if to_come and now >= to_come[0][0]:
                pause_s = to_come.pop(0)[1]
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGSTOP)
                    self._over(pause_s)
                    os.kill(pid, signal.SIGCONT)
            if blow is not None and not struck and blow.reached(now) and self._hit(pid, blow):
                struck = f"{blow.kind} at {now:.2f} s"
            if now > HANG_S:
                os.killpg(pid, signal.SIGKILL)
                return f"{struck} hung for {HANG_S:.0f} s"
        return struck

    def _hit(self, pid: int, blow: Blow) -> bool:
        """Send a signal; return False if its target does not exist yet."""
        if blow.kind == "reward child":
            # Not an engine: requests that are sent again are in the ledger.
            children = [child for child, parent, _, _ in _processes() if parent == pid and _is_scorer(child)]
            if children:
                os.kill(children[0], signal.SIGKILL)
            return bool(children)
        group = "group" in blow.kind
        for number, name in enumerate(word for word in blow.kind.split() if word != "group"):
            if number and self._over(blow.gap_s):
                break
            try:
                (os.killpg if group else os.kill)(pid, signal.Signals[f"SIG{name}"])
            except ProcessLookupError:  # it has just ended
                return bool(number)
        return True

    def _orphans(self, session: int) -> list[str]:
        """Return descendants that outlive the command by more than ten seconds; they are killed."""
        for _ in range(100):
            left = [each for each in _processes() if session == each[2] or each[1] == self._server.pid]
            if not left:
                return []
            time.sleep(0.1)
        for pid, *_ in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [f"{pid} {name}" for pid, _, _, name in left]


def _is_scorer(pid: int) -> bool:
    with suppress(OSError):
        return b"ppoctl.rewards" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork a child for each request and report its pid and how it ended; return in each child, with its request."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    channel.sendall(b"ready\n")
    with channel.makefile("r") as lines:
        while line := lines.readline():
            pid = os.fork()
            if pid == 0:
                os.setsid()
                return dict(json.loads(line))
            channel.sendall(f"{pid}\n".encode())
            _, status = os.waitpid(pid, 0)
            try:
                channel.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            except BrokenPipeError:  # the client has ended
                return None
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    return None


def become(request: dict[str, Any]) -> None:
    """Become the requested command."""
    os.chdir(request["folder"])
    screen = os.open(request["screen"], os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(screen, number)
    if request["powerless"]:
        _give_up_capabilities()
    if request["fresh"] or request["strace"]:
        command = [*request["strace"], sys.executable, "-m", "ppoctl", *request["words"]]
        os.execvp(command[0], command)
    if request["files"]:
        _slow_fsync(request["files"], request["fsync_s"], random.Random(request["seed"]))
    sys.path[0] = request["folder"]
    sys.argv[1:] = request["words"]
    runpy.run_module("ppoctl", run_name="__main__", alter_sys=True)


def _give_up_capabilities() -> None:
    """Give up root's capabilities in this process and all descendants: it remains the owner of its files, but cannot
    read files without permission."""
    libc = ctypes.CDLL(None)
    for capability in range(64):
        libc.prctl(
            PR_CAPBSET_DROP, capability, 0, 0, 0
        )  # the highest number is unknown; an error beyond it is ignored
    header, nothing = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    assert libc.capset(header, nothing) == 0


def _slow_fsync(files: str, most_s: float, rng: random.Random) -> None:
    """Make fsync slow for files whose names contain one of these."""
    fsync = os.fsync

    def slow(file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        if files in str(Path(f"/proc/self/fd/{number}").readlink()):
            time.sleep(rng.uniform(0, most_s))
        fsync(number)

    os.fsync = slow


def _main() -> None:
    import gc
    import importlib

    devnull, stderr = os.open(os.devnull, os.O_WRONLY), os.dup(2)
    os.dup2(devnull, 2)
    for name in HEAVY:
        importlib.import_module(name)
    os.dup2(stderr, 2)
    assert not [name for name in sys.modules if name.partition(".")[0] == "ppoctl"]
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a second thread does not survive a fork"
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        received = serve(requests)
    if received is not None:
        become(received)


if __name__ == "__main__":
    _main()
