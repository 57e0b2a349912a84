"""The process that makes sandboxes, one after the other: `python -S -m ppoctl.rewards.sandbox.launcher KIND PARENT`.

    stdin   one JSON line per job:   {"program": text, "stdin": text, "limits": {...}}, a `Job`
    stdout  one JSON line for each:  {"outcome": "ok", "code": 0, "output": text}, a `Ran`, or {"failed": "why"}

It is a process of its own, so that what forks into a sandbox has never held a ground truth. Of each job it is the
first ancestor:

    launcher > warder > process 1 of the sandbox > program        namespaces
    launcher > warder > program                                   user

With the launcher the warder ends, with the warder process 1, by signals of the kernel, and with process 1 all of the
sandbox. The warder of a user has its descriptors closed, and ends all of that user's processes. A job is over when no
process of it is left; so none outlives its job, and none outlives the launcher. Standard library only.
"""

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from ppoctl.rewards.sandbox import jail, kernel
from ppoctl.rewards.sandbox.job import EXIT_SLACK_S, ExitKind, Kind, Limits, Ran, SandboxJob

OUTSIDE_ID = 65534
"""User of this machine that a program is where root starts it in namespaces: nobody."""
_OWN_IDS = 0x6F000000
"""Users from here on, by process id of the launcher, belong to nobody else."""
_MESSAGE_BYTES = 1024
_READ_BYTES = 1 << 16


class SetupError(Exception):
    """A sandbox could not be made."""


def main(kind: Kind, parent: int) -> int:
    """Serve until stdin ends; the exit code."""
    kernel.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    kernel.adopt_orphans()
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        job = SandboxJob(asked["program"], asked["stdin"], Limits(**asked["limits"]))
        try:
            reply: dict[str, Any] = asdict(run(kind, job))
        except (SetupError, OSError) as error:
            reply = {"failed": str(error)}
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.flush()
    return 0


def run(kind: Kind, job: SandboxJob) -> Ran:
    """Run a program in a sandbox, and come back when no process of it is left. Raises SetupError where the sandbox
    cannot be made."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reading, writing = os.pipe()
    given = (_file_of(job.stdin), writing, _file_of(job.program))
    try:
        warder = os.fork()
        if warder == 0:
            ours.close()
            with suppress(OSError):
                Path("/proc/self/oom_score_adj").write_text("1000")  # the first to go where memory is short
            _in_child(theirs, lambda: _WARDERS[kind](theirs, given, job.limits))
        theirs.close()
        for descriptor in given:
            os.close(descriptor)
        try:
            return _watch(ours, warder, reading, job.limits)
        finally:
            ours.close()
            _end(kind, warder)
    finally:
        os.close(reading)


def _watch(channel: socket.socket, warder: int, reading: int, limits: Limits) -> Ran:
    _until_started(channel, warder)
    deadline = time.monotonic() + limits.timeout_s
    most, answers = limits.output_kib << 10, channel.fileno()
    output = bytearray()
    os.set_blocking(reading, False)
    said = b""
    while not said:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return _ran("timeout", 0, output)
        ready, _, _ = select.select([answers, reading], [], [], left_s)
        if reading in ready and not _read(reading, output, most):
            ready, _, _ = select.select([answers], [], [], max(deadline - time.monotonic(), 0))
        if len(output) > most:
            return _ran("output", 0, output[:most])
        if answers in ready:
            said = channel.recv(_MESSAGE_BYTES) or b"failed the sandbox's warder ended"
    word, _, detail = said.decode(errors="replace").partition(" ")
    if word != "ended":
        raise SetupError(detail)
    while len(output) <= most:  # what lies in the pipe still; it closes with the last process that could write
        ready, _, _ = select.select([reading], [], [], EXIT_SLACK_S / 2)
        if not ready or not _read(reading, output, most):
            break
    status = int(detail)
    if len(output) > most:
        return _ran("output", 0, output[:most])
    if os.WIFSIGNALED(status):
        return _ran("signal", os.WTERMSIG(status), output)
    code = os.WEXITSTATUS(status)
    return _ran("exit" if code else "ok", code, output)


def _until_started(channel: socket.socket, warder: int) -> None:
    channel.settimeout(EXIT_SLACK_S / 2)
    try:
        while (said := channel.recv(_MESSAGE_BYTES).decode(errors="replace")) != "started":
            if said != "unshared":
                raise SetupError(said.partition(" ")[2] or "the sandbox's warder ended")
            _map_users(warder)
            channel.send(b"mapped")
    except TimeoutError:
        raise SetupError(f"it was not made within {EXIT_SLACK_S / 2:g} s") from None


def _map_users(warder: int) -> None:
    """Say who users of the new namespace are outside: with root's privilege nobody is the program and root is its
    process 1, else both are the user who runs this."""
    process = Path(f"/proc/{warder}")
    if os.geteuid() == 0:
        told = f"0 0 1\n{jail.INSIDE_ID} {OUTSIDE_ID} 1\n"
        (process / "uid_map").write_text(told)
        (process / "gid_map").write_text(told)
        return
    (process / "uid_map").write_text(f"{jail.INSIDE_ID} {os.geteuid()} 1\n")
    (process / "setgroups").write_text("deny")
    (process / "gid_map").write_text(f"{jail.INSIDE_ID} {os.getegid()} 1\n")


def _in_namespaces(channel: socket.socket, given: tuple[int, int, int], limits: Limits) -> None:
    """The warder of namespaces: its child is process 1 of them."""
    kernel.die_with_parent(signal.SIGKILL)
    jail.enter_namespaces(channel)
    mine, childs = socket.socketpair()
    first = os.fork()
    if first == 0:
        mine.close()
        kernel.die_with_parent(signal.SIGKILL)
        # Armed now; the word comes from a warder that was alive after that, or never.
        if childs.send(b"?") != 1 or childs.recv(1) != b"!":
            os._exit(1)
        _in_child(channel, lambda: _process_1(channel, given, limits))
    childs.close()
    if mine.recv(1) == b"?":
        mine.send(b"!")
    os.waitpid(first, 0)


def _process_1(channel: socket.socket, given: tuple[int, int, int], limits: Limits) -> None:
    kernel.hide_memory()
    os.umask(0o022)
    jail.make_root(limits)
    channel.send(b"started")
    program = os.fork()
    if program == 0:
        _in_child(channel, lambda: jail.become_program(given, channel.fileno(), limits, _as_nobody))
    for descriptor in given:
        os.close(descriptor)
    while True:
        ended, status = os.wait()
        if ended == program:
            channel.send(f"ended {status}".encode())
            return


def _as_nobody() -> None:
    os.chdir("/tmp")
    if os.geteuid() == 0:
        _become(jail.INSIDE_ID)


def _as_own_user(channel: socket.socket, given: tuple[int, int, int], limits: Limits) -> None:
    """The warder of a user: it stays root, sees the launcher end, and then ends what is the user's."""
    os.setsid()
    own_id = _OWN_IDS + os.getppid()
    kernel.landlock_version()
    channel.send(b"started")
    program = os.fork()
    if program == 0:
        _in_child(channel, lambda: jail.become_program(given, channel.fileno(), limits, lambda: _locked(own_id)))
    for descriptor in given:
        os.close(descriptor)
    watched = select.poll()
    watched.register(os.pidfd_open(program), select.POLLIN)
    watched.register(channel, select.POLLIN)
    watched.poll()
    ended, status = os.waitpid(program, os.WNOHANG)
    _end_all_of(own_id)
    if ended:
        channel.send(f"ended {status}".encode())


def _locked(own_id: int) -> None:
    _become(own_id)
    os.chdir("/")
    kernel.leave_files(jail.folders(), jail.devices())


def _become(own_id: int) -> None:
    os.setgroups([])
    os.setresgid(own_id, own_id, own_id)
    os.setresuid(own_id, own_id, own_id)


def _end_all_of(user: int) -> None:
    """Kill all processes of a user, in one call of the kernel that no fork slips through."""
    killer = os.fork()
    if killer == 0:
        with suppress(OSError):
            _become(user)
            if os.getuid() == user:
                os.kill(-1, signal.SIGKILL)
        os._exit(0)
    os.waitpid(killer, 0)


def _end(kind: Kind, warder: int) -> None:
    """End what is left of a job, and take the exit status of all of it."""
    with suppress(ProcessLookupError):
        os.kill(warder, signal.SIGKILL)
    if kind == "user":
        os.waitpid(warder, 0)
        _end_all_of(_OWN_IDS + os.getpid())
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _in_child(channel: socket.socket, work: Callable[[], None]) -> NoReturn:
    """Do the work and leave for good; an error is told over the channel."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - a forked process must not return into its parent's code
        with suppress(OSError):
            channel.send(f"failed {error}".encode()[:_MESSAGE_BYTES])
    os._exit(1)


def _file_of(text: str) -> int:
    """A descriptor to read a text from, which nothing can be written to."""
    writing = os.memfd_create("text")
    with os.fdopen(writing, "wb") as file:
        file.write(text.encode(errors="replace"))
        file.flush()
        return os.open(f"/proc/self/fd/{writing}", os.O_RDONLY)


def _read(reading: int, output: bytearray, most: int) -> bool:
    """Take what is there, a little more than `most` at most; False at the end."""
    with suppress(BlockingIOError):
        received = os.read(reading, min(_READ_BYTES, most + 1 - len(output)) or 1)
        output += received
        return bool(received)
    return True


def _ran(outcome: ExitKind, code: int, output: bytes | bytearray) -> Ran:
    return Ran(outcome, code, bytes(output).decode(errors="replace"))


_WARDERS: dict[str, Callable[[socket.socket, tuple[int, int, int], Limits], None]] = {
    "namespaces": _in_namespaces,
    "user": _as_own_user,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))  # type: ignore[arg-type]
