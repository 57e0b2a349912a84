"""The program of one node of a job, which runs Ray's part there and leaves nothing of it behind.

stdin   <- one line, a NodeOrder as JSON; the end of stdin is the end of the run, however that came
stdout  -> one line, NodeStarted as JSON, once Ray is up
stderr  -> one line on what ended Ray, where that was not the end of the run

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
"""Seconds between two looks whether Ray is up, which it says in a file."""
END_DEADLINE_S = 10.0
ENDS = (signal.SIGINT, signal.SIGHUP)


MARK = "ppoctl-ray "
"""What the line about the start begins with."""


@dataclass(frozen=True)
class NodeOrder:
    """What a node's program is told."""

    name: str
    """Slurm's name of the node."""
    towards: str
    """Address of another node: this one's is that from which the other is reached."""
    head: str | None
    """Address `ip:port` of the Ray to join; None: this node is the head."""
    slots: int
    """CPU slots, of which each process takes one."""
    object_store_bytes: int


@dataclass(frozen=True)
class NodeStarted:
    """What a node's program says when Ray is up."""

    address: str
    """Address `ip:port` of the Ray, which other nodes join."""


def main() -> int:
    """Do what the first line of stdin asks; returns 0 where the run's end was the end, else 1."""
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    order = NodeOrder(**json.loads(line))
    # Slurm sends it to every process of a job that it ends. Ray and its workers are for the driver to end, which may
    # still save in the time until SIGKILL (`KillWait`).
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakes)
    for number in (*ENDS, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a Ray that is ended leaves no core files
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)  # whatever loses its parent becomes a child of this process
    sweep()
    folder = PrivateFolder()
    try:
        try:
            why = _run(order, folder, woken)
        except OSError as error:
            why = f"Ray could not be started: {error}"
        if why is not None:
            _say(2, f"{order.name}: {why}")
    finally:
        _end_children()
        folder.remove()
        if order.head is None:  # also where the driver, which does it else, was killed
            Path(os.environ["RAY_AUTH_TOKEN_PATH"]).unlink(missing_ok=True)
    return int(why is not None)


def _run(order: NodeOrder, folder: PrivateFolder, woken: int) -> str | None:
    """What ended Ray; None: the end of the run."""
    ip = address_towards(order.towards)
    said = folder.path / "said"
    with said.open("wb") as output:
        child = subprocess.Popen(
            _command(order, ip, folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(ip, folder),
        )
    up = folder.of_ray / "ray_current_cluster"
    is_up = False
    while True:
        ready, _, _ = select.select([0, woken], [], [], None if is_up else LOOK_EVERY_S)
        if 0 in ready and not os.read(0, 4096):
            return None
        if woken in ready and (ends := set(os.read(woken, 64)) & set(ENDS)):
            return f"ended by {signal.Signals(ends.pop()).name}"
        if child.poll() is not None:
            return _last_words(said, child.returncode)
        if not is_up and up.is_file() and (address := up.read_text(encoding="utf-8").strip()):
            is_up = True
            _say(1, MARK + json.dumps(asdict(NodeStarted(address))))


def _command(order: NodeOrder, ip: str, folder: PrivateFolder) -> list[str]:
    place = ["--head", "--port=0", "--include-dashboard=false"] if order.head is None else [f"--address={order.head}"]
    return [
        *(sys.executable, "-m", "ppoctl.engines.ray.raylet", "start", "--block", *place),
        *(f"--node-ip-address={ip}", f"--node-name={order.name}", f"--num-cpus={order.slots}"),
        *(f"--object-store-memory={order.object_store_bytes}", f"--temp-dir={folder.of_ray}"),
        # Every port is one that is free: jobs may share a node.
        *("--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"),
        *("--disable-usage-stats", "--log-color=false"),
    ]


def _environment(ip: str, folder: PrivateFolder) -> dict[str, str]:
    """Environment of Ray's part on this node, and so of all processes of the run there."""
    found = {**os.environ, shared_memory.FOLDER: str(folder.path)}
    found.pop("RAY_ADDRESS", None)
    interface = next((name for name, its in psutil.net_if_addrs().items() if any(a.address == ip for a in its)), None)
    if interface is not None:  # gloo's own choice is what the node's name resolves to, which may be loopback
        found.setdefault("GLOO_SOCKET_IFNAME", interface)
        found.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # this one, not all whose names begin so
    return found


def address_towards(other: str) -> str:
    """This node's IP address as the other one sees it. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((other, 9))  # sends nothing
        return str(asked.getsockname()[0])


def _last_words(said: Path, code: int) -> str:
    """Which of Ray's processes died, or else how its command ended; all that it said goes to stderr first."""
    lines = [
        line.rstrip() for line in said.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
    ]
    _say(2, "\n".join(lines))
    died = [match for line in lines if (match := re.search(r"(\w+) \[exit code=(-?\d+)", line))]
    if died:
        return "; ".join(f"Ray's {match[1]} {_ended(int(match[2]))}" for match in died)
    errors = [line.strip() for line in lines if "Error" in line]
    return f"`ray start` {_ended(code)}" + (f": {errors[-1]}" if errors else "")


def _say(stream: int, text: str) -> None:
    with suppress(OSError):  # whoever listened is gone
        os.write(stream, f"{text}\n".encode())


def _ended(code: int) -> str:
    return f"ended with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def _end_children() -> None:
    me, until = psutil.Process(), time.monotonic() + END_DEADLINE_S
    while (left := me.children(recursive=True)) and time.monotonic() < until:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)


if __name__ == "__main__":
    sys.exit(main())
