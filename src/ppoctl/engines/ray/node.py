"""The program on each node of a job. It runs Ray on the node. When it ends, no process or file of Ray remains there.

stdin   <- one line, a NodeOrder as JSON; the end of stdin means the end of the run, for any reason
stdout  -> one line, NodeStarted as JSON, once Ray is running
stderr  -> one line with the reason why Ray ended, if that was not the end of the run

python -m ppoctl.engines.ray.node
"""

import ctypes
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from ppoctl.engines.ray import shared_memory
from ppoctl.engines.ray.private_folder import PrivateFolder, sweep

SET_CHILD_SUBREAPER = 36
LOOK_EVERY_S = 0.05
"""Interval in seconds between checks whether Ray is running. Ray reports that in a file."""
END_DEADLINE_S = 10.0
ENDS = (signal.SIGINT, signal.SIGHUP)
DAEMONS = ("raylet", "gcs_server")
"""Programs of Ray without which it does not run."""
MARK = "ppoctl-ray "
"""Prefix of the line that reports that Ray is running."""


@dataclass(frozen=True)
class NodeOrder:
    """Input of a node's program."""

    name: str
    """Slurm's name of the node."""
    towards: str
    """Address of another node. This node uses the local address from which it reaches the other node."""
    head: str | None
    """Address `ip:port` of the Ray cluster to join. None: this node is the head."""
    slots: int
    """Number of CPU slots of the node. Each process takes one slot."""
    object_store_bytes: int


@dataclass(frozen=True)
class NodeStarted:
    """Output of a node's program when Ray is running."""

    address: str
    """Address `ip:port` of the Ray cluster, which other nodes join."""


def main() -> int:
    """Execute the order in the first line of stdin. Return 0 if Ray ended because the run ended, otherwise 1."""
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    order = NodeOrder(**json.loads(line))
    # When Slurm ends a job it sends SIGTERM to every process. Only the driver may end Ray and its workers: the driver
    # may still save states in the time until SIGKILL (`KillWait`).
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    wakeup_pipe, signal_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(signal_end)
    # Python writes a signal to the pipe only if the signal has a handler.
    for number in (*ENDS, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core files when Ray is killed
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)  # adopt orphans of Ray, so that they can be ended
    sweep()
    folder = PrivateFolder()
    try:
        try:
            end = _run(order, folder, wakeup_pipe)
            if end is not None and end.at_start:  # once more: a busy node may have been too slow for Ray's own limits
                _end_children()
                end = _run(order, folder, wakeup_pipe)
        except OSError as error:
            end = _RayEnd(f"Ray could not be started: {error}")
        if end is not None:
            _write_line(2, f"{order.name}: {end.reason}")
    finally:
        _end_children()
        folder.remove()
        if order.head is None:  # the driver removes the token unless it was killed
            Path(os.environ["RAY_AUTH_TOKEN_PATH"]).unlink(missing_ok=True)
    return int(end is not None)


@dataclass(frozen=True)
class _RayEnd:
    """An end of Ray that is not the end of the run."""

    reason: str
    at_start: bool = False
    """Whether Ray failed before it was running."""


def _run(order: NodeOrder, folder: PrivateFolder, wakeup_pipe: int) -> _RayEnd | None:
    """Run Ray until it ends. None: the run ended."""
    ip = address_towards(order.towards)
    log, up, is_up = folder.path / "said", folder.of_ray / "ray_current_cluster", False
    up.unlink(missing_ok=True)  # of a start that failed
    with log.open("wb") as output:
        child = subprocess.Popen(
            _command(order, ip, folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(ip, folder),
        )
    while True:
        ready, _, _ = select.select([0, wakeup_pipe], [], [], None if is_up else LOOK_EVERY_S)
        if 0 in ready and not os.read(0, 4096):
            return None
        if wakeup_pipe in ready and (ends := set(os.read(wakeup_pipe, 64)) & set(ENDS)):
            return _RayEnd(f"ended by {signal.Signals(ends.pop()).name}")
        if child.poll() is not None:
            return _RayEnd(_failure_reason(log, child.returncode), at_start=not is_up)
        # `ray start` does not notice a daemon that ended: it waits without a limit.
        if not is_up and (lost := lost_daemon(child.pid)) is not None:
            return _RayEnd(f"Ray's {lost} ended before Ray had started", at_start=True)
        if not is_up and up.is_file() and (address := up.read_text(encoding="utf-8").strip()):
            is_up = True
            _write_line(1, MARK + json.dumps(asdict(NodeStarted(address))))


def lost_daemon(pid: int) -> str | None:
    """Return the name of a daemon of Ray that the process with this id has started and that has ended; None: all of
    them are running."""
    with suppress(psutil.NoSuchProcess):
        for each in psutil.Process(pid).children(recursive=True):
            if each.status() == psutil.STATUS_ZOMBIE and each.name() in DAEMONS:
                return str(each.name())
    return None


def _command(order: NodeOrder, ip: str, folder: PrivateFolder) -> list[str]:
    mode = ["--head", "--port=0", "--include-dashboard=false"] if order.head is None else [f"--address={order.head}"]
    return [
        *(sys.executable, "-m", "ppoctl.engines.ray.raylet", "start", "--block", *mode),
        *(f"--node-ip-address={ip}", f"--node-name={order.name}", f"--num-cpus={order.slots}"),
        *(f"--object-store-memory={order.object_store_bytes}", f"--temp-dir={folder.of_ray}"),
        # Ray chooses free ports, since jobs may share a node.
        *("--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"),
        *("--disable-usage-stats", "--log-color=false"),
    ]


def _environment(ip: str, folder: PrivateFolder) -> dict[str, str]:
    """Return the environment variables of Ray on this node. All processes of the run on this node inherit them."""
    variables = {**os.environ, shared_memory.FOLDER: str(folder.path)}
    # The user's variable may name another cluster, and Ray's programs would connect to it.
    variables.pop("RAY_ADDRESS", None)
    interface = next((name for name, its in psutil.net_if_addrs().items() if any(a.address == ip for a in its)), None)
    if interface is not None:  # the node's name may resolve to the loopback address
        variables.setdefault("GLOO_SOCKET_IFNAME", interface)
        variables.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # `=`: the exact name, not a prefix
    return variables


def address_towards(other: str) -> str:
    """Return the local IP address from which this node reaches another node. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # a UDP socket sends nothing on connect
        return str(probe.getsockname()[0])


def _failure_reason(log: Path, code: int) -> str:
    """Return a message about which of Ray's processes died, or how Ray's command ended. Before that, copy Ray's
    complete output to stderr."""
    lines = [line.rstrip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    _write_line(2, "\n".join(lines))
    died = [match for line in lines if (match := re.search(r"(\w+) \[exit code=(-?\d+)", line))]
    if died:
        return "; ".join(f"Ray's {match[1]} {_ended(int(match[2]))}" for match in died)
    errors = [line.strip() for line in lines if "Error" in line]
    return f"`ray start` {_ended(code)}" + (f": {errors[-1]}" if errors else "")


def _write_line(stream: int, text: str) -> None:
    with suppress(OSError):  # the reader may have ended
        os.write(stream, f"{text}\n".encode())


def _ended(code: int) -> str:
    return f"ended with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def _end_children() -> None:
    this_process, until = psutil.Process(), time.monotonic() + END_DEADLINE_S
    # Again until none is left: a process may start others before it is killed.
    while (left := this_process.children(recursive=True)) and time.monotonic() < until:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)


if __name__ == "__main__":
    sys.exit(main())
