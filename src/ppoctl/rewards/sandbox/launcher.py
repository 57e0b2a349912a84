"""The process that creates sandboxes, one at a time: `python -S -m ppoctl.rewards.sandbox.launcher KIND PARENT`.

    stdin   one JSON line per job:   {"program": text, "stdin": text, "limits": {...}}, a `SandboxJob`
    stdout  one JSON line for each:  {"outcome": "ok", "code": 0, "output": text}, a `Ran`, or {"failed": "why"}

The launcher is a separate process that never receives a ground truth. So the processes that it forks for a sandbox
have no ground truth in memory. Each process of a job starts the next:

    launcher > supervisor > process 1 of the sandbox > program        namespaces
    launcher > supervisor > program                                   user

With `namespaces`, the kernel kills the supervisor when the launcher ends, and process 1 when the supervisor ends.
When process 1 ends, the kernel kills all other processes of the sandbox. With `user`, the supervisor sees its channel
close when the launcher ends, and kills all processes of the program's user. A job ends when none of its processes is
left. So no process outlives its job or the launcher. Imports only the standard library.
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
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ppoctl.rewards.sandbox import jail, kernel
from ppoctl.rewards.sandbox.job import EXIT_SLACK_S, ExitKind, Kind, Limits, Ran, SandboxJob

OUTSIDE_ID = 65534
"""User id, outside the sandbox, of a program that root starts in namespaces: the user `nobody`."""
_OWN_IDS = 0x6F000000
"""First of the user ids for kind `user`. The launcher adds its process id, so that each launcher has its own user
id."""
_MESSAGE_BYTES = 1024
_READ_BYTES = 1 << 16


class SetupError(Exception):
    """A sandbox could not be created."""


def main(kind: Kind, parent: int) -> int:
    """Run jobs until stdin ends, and return the exit code."""
    kernel.die_with_parent(signal.SIGKILL)
    # The parent ended before the death signal was set.
    if os.getppid() != parent:
        return 1
    kernel.adopt_orphans()
    for line in sys.stdin.buffer:
        fields = json.loads(line)
        job = SandboxJob(fields["program"], fields["stdin"], Limits(**fields["limits"]))
        try:
            reply: dict[str, Any] = asdict(run(kind, job))
        except (SetupError, OSError) as error:
            reply = {"failed": str(error)}
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.flush()
    return 0


def run(kind: Kind, job: SandboxJob) -> Ran:
    """Run a program in a sandbox, and return when none of its processes is left. Raises SetupError if the sandbox
    cannot be created."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reading, writing = os.pipe()
    descriptors = (_file_of(job.stdin), writing, _file_of(job.program))
    try:
        supervisor = os.fork()
        if supervisor == 0:
            ours.close()
            with suppress(OSError):
                Path("/proc/self/oom_score_adj").write_text("1000")  # if memory is short, it is killed first
            _in_child(theirs, lambda: _SUPERVISORS[kind](theirs, descriptors, job.limits))
        # With these copies open, the ends of the channel and of the pipe would never be seen.
        theirs.close()
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            return _watch(ours, supervisor, reading, job.limits)
        finally:
            ours.close()
            _end(kind, supervisor)
    finally:
        os.close(reading)


def _watch(channel: socket.socket, supervisor: int, reading: int, limits: Limits) -> Ran:
    _until_started(channel, supervisor)
    deadline = time.monotonic() + limits.timeout_s
    most, answers = limits.output_kib << 10, channel.fileno()
    output = bytearray()
    os.set_blocking(reading, False)
    message = b""
    while not message:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return _ran("timeout", 0, output)
        ready, _, _ = select.select([answers, reading], [], [], left_s)
        if reading in ready and not _read(reading, output, most):
            # The pipe has ended, and would be ready at once in each further pass.
            ready, _, _ = select.select([answers], [], [], max(deadline - time.monotonic(), 0))
        if len(output) > most:
            return _ran("output", 0, output[:most])
        if answers in ready:
            message = channel.recv(_MESSAGE_BYTES) or b"failed the sandbox's supervisor ended"
    word, _, detail = message.decode(errors="replace").partition(" ")
    if word != "ended":
        raise SetupError(detail)
    while len(output) <= most:  # read the rest of the pipe, which closes with the last process that has it open
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


def _until_started(channel: socket.socket, supervisor: int) -> None:
    channel.settimeout(EXIT_SLACK_S / 2)
    try:
        while (message := channel.recv(_MESSAGE_BYTES).decode(errors="replace")) != "started":
            if message != "unshared":
                raise SetupError(message.partition(" ")[2] or "the sandbox's supervisor ended")
            _map_users(supervisor)
            channel.send(b"mapped")
    except TimeoutError:
        raise SetupError(f"it was not created within {EXIT_SLACK_S / 2:g} s") from None


def _map_users(supervisor: int) -> None:
    """Map the users of the new namespace to users of this machine. If this process is root, the program runs as
    `nobody` and process 1 as root; otherwise both run as the user of this process."""
    process = Path(f"/proc/{supervisor}")
    if os.geteuid() == 0:
        mapping = f"0 0 1\n{jail.INSIDE_ID} {OUTSIDE_ID} 1\n"
        (process / "uid_map").write_text(mapping)
        (process / "gid_map").write_text(mapping)
        return
    (process / "uid_map").write_text(f"{jail.INSIDE_ID} {os.geteuid()} 1\n")
    # The kernel requires this before a process without root writes `gid_map`.
    (process / "setgroups").write_text("deny")
    (process / "gid_map").write_text(f"{jail.INSIDE_ID} {os.getegid()} 1\n")


def _in_namespaces(channel: socket.socket, descriptors: tuple[int, int, int], limits: Limits) -> None:
    """Supervise a job of kind `namespaces`: enter the namespaces, and start their process 1."""
    kernel.die_with_parent(signal.SIGKILL)
    jail.enter_namespaces(channel)
    mine, childs = socket.socketpair()
    first = os.fork()
    if first == 0:
        mine.close()
        kernel.die_with_parent(signal.SIGKILL)
        # The death signal is set now. A reply shows that the supervisor was still alive afterwards.
        if childs.send(b"?") != 1 or childs.recv(1) != b"!":
            os._exit(1)
        _in_child(channel, lambda: _process_1(channel, descriptors, limits))
    childs.close()
    if mine.recv(1) == b"?":
        mine.send(b"!")
    os.waitpid(first, 0)


def _process_1(channel: socket.socket, descriptors: tuple[int, int, int], limits: Limits) -> None:
    kernel.hide_memory()
    os.umask(0o022)
    jail.make_root(limits)
    channel.send(b"started")
    program = os.fork()
    if program == 0:
        _in_child(channel, lambda: jail.become_program(descriptors, channel.fileno(), limits, _as_nobody))
    for descriptor in descriptors:
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


def _as_own_user(channel: socket.socket, descriptors: tuple[int, int, int], limits: Limits) -> None:
    """Supervise a job of kind `user`: stay root, wait for the end of the program or of the launcher, and kill all
    processes of the user."""
    os.setsid()
    own_id = _OWN_IDS + os.getppid()
    # Raises an error before `started` is sent, if the kernel has no Landlock.
    kernel.landlock_version()
    channel.send(b"started")
    supervisor, program = os.getpid(), os.fork()
    if program == 0:
        lock = partial(_locked, own_id, supervisor)
        _in_child(channel, lambda: jail.become_program(descriptors, channel.fileno(), limits, lock))
    for descriptor in descriptors:
        os.close(descriptor)
    watched = select.poll()
    watched.register(os.pidfd_open(program), select.POLLIN)
    watched.register(channel, select.POLLIN)
    watched.poll()
    ended, status = os.waitpid(program, os.WNOHANG)
    if not ended:
        os.kill(program, signal.SIGKILL)  # it may not have its user yet
    _end_all_of(own_id)
    if ended:
        channel.send(f"ended {status}".encode())


def _locked(own_id: int, supervisor: int) -> None:
    """Become the user of the program. If the supervisor has ended, all processes of this user were killed already, so
    exit. Otherwise this process is one of them from now on."""
    _become(own_id)
    if os.getppid() != supervisor:
        os._exit(1)
    os.chdir("/")
    kernel.leave_files(jail.folders(), jail.devices())


def _become(own_id: int) -> None:
    os.setgroups([])
    os.setresgid(own_id, own_id, own_id)
    os.setresuid(own_id, own_id, own_id)


def _end_all_of(user: int) -> None:
    """Kill all processes of a user with a single system call, so that no fork escapes."""
    killer = os.fork()
    if killer == 0:
        with suppress(OSError):
            _become(user)
            if os.getuid() == user:
                os.kill(-1, signal.SIGKILL)
        os._exit(0)
    os.waitpid(killer, 0)


def _end(kind: Kind, supervisor: int) -> None:
    """Kill the remaining processes of a job, and reap all of them."""
    with suppress(ProcessLookupError):
        os.kill(supervisor, signal.SIGKILL)
    if kind == "user":
        os.waitpid(supervisor, 0)
        _end_all_of(_OWN_IDS + os.getpid())
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _in_child(channel: socket.socket, work: Callable[[], None]) -> NoReturn:
    """Do the work and exit. An error is reported over the channel."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - a forked process must not return into its parent's code
        with suppress(OSError):
            channel.send(f"failed {error}".encode()[:_MESSAGE_BYTES])
    os._exit(1)


def _file_of(text: str) -> int:
    """Return a read-only descriptor of a text."""
    writing = os.memfd_create("text")
    with os.fdopen(writing, "wb") as file:
        file.write(text.encode(errors="replace"))
        file.flush()
        return os.open(f"/proc/self/fd/{writing}", os.O_RDONLY)


def _read(reading: int, output: bytearray, most: int) -> bool:
    """Read the available bytes, until `output` exceeds `most` by one byte. Return False at the end of the pipe."""
    with suppress(BlockingIOError):
        received = os.read(reading, min(_READ_BYTES, most + 1 - len(output)) or 1)
        output += received
        return bool(received)
    return True


def _ran(outcome: ExitKind, code: int, output: bytes | bytearray) -> Ran:
    return Ran(outcome, code, bytes(output).decode(errors="replace"))


_SUPERVISORS: dict[str, Callable[[socket.socket, tuple[int, int, int], Limits], None]] = {
    "namespaces": _in_namespaces,
    "user": _as_own_user,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))  # type: ignore[arg-type]
