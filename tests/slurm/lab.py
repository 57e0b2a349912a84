"""A real Slurm of several nodes on this machine, for tests: `with Lab() as lab: ...`.

Everything of it is in one short folder below /tmp: own configuration, munge key and socket; the ports are its own,
too. So labs run side by side, and the system's own Slurm is not touched. There are two kinds of nodes:

    ports        all at this machine's loopback address, a port each; works without root
    namespaces   each with a network, host name, /tmp and shared memory of its own; needs root. Only the network of
                 these nodes can be cut, and only on these leftovers can be listed. Of all folders in /tmp they see
                 the lab's, in which `shared` is for runs

Partitions: `main`; `graced`, whose jobs get 20 s when they are preempted; `urgent`, whose jobs preempt the others'.

Daemons are children of this process, so their process ids cannot be reused before they are waited for; they get a
signal to end when this process dies. Any other process with this lab's configuration in its environment belongs to a
job.
"""

import ctypes
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil

from slurm import network

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "sinfo")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
HOST = socket.gethostname().split(".")[0]
DEVICES = ("/dev/null", "/dev/zero")
"""Stand-ins for GPUs: Slurm counts device files, and does not open them."""
SET_DEATH_SIGNAL = 1

CONFIGURATION = """\
ClusterName=lab
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# How long a credential holds, and so how long a requeued job waits before it may start again: the least there is
# (Slurm's own: 120)
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd-%n
# What needs no cgroups, no device of its own and no mail
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
SwitchType=switch/none
MpiDefault=none
PropagateResourceLimits=NONE
# Nodes claim CPUs and memory that need not exist; who was down comes back by itself
SlurmdParameters=config_overrides
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# Slurm's usual intervals would be most of a test's time
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
KillWait=30
SlurmdTimeout=6
SlurmctldTimeout=10
MessageTimeout=10
InactiveLimit=0
CompleteWait=0
MinJobAge=86400
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# Whoever is pushed out gets the signal that it asked for, at the start of its grace
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 DefaultTime=10 PreemptMode=REQUEUE State=UP
PartitionName=graced Nodes=ALL PriorityTier=1 DefaultTime=10 PreemptMode=REQUEUE GraceTime=20 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 DefaultTime=10 PreemptMode=OFF State=UP
"""


class LabError(Exception):
    """A failure of the lab; the message has the last lines of the daemons' logs."""


class Lab:
    """A cluster that is up between `__enter__` and `__exit__`; its Slurm programs are run with `environ`."""

    def __init__(
        self,
        nodes: int = 2,
        *,
        kind: Literal["ports", "namespaces"] = "ports",
        cpus: int = 4,
        gpus: int = 2,
    ) -> None:
        assert gpus in (0, 2), "a node has no GPUs, or two"
        self.nodes = tuple(f"node{number}" for number in range(1, nodes + 1))
        self.folder = Path(tempfile.mkdtemp(prefix="lab-", dir="/tmp"))
        self.network = network.Network(self.nodes, self.folder) if kind == "namespaces" else None
        self.environ: Mapping[str, str] = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))},
            "PATH": PATH,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }
        self._cpus, self._gpus = cpus, gpus
        self._commands: dict[str, list[str]] = {}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def shared(self) -> Path:
        """Folder that every node sees."""
        return self.folder / "shared"

    # -- start and end

    def __enter__(self) -> "Lab":
        try:
            self._configure()
            for name in self._commands:
                self.start(name)
                if name == "munged":  # Slurm's daemons do not wait for it
                    self._until(lambda: (self.folder / "munge/socket").exists(), 10, "munged's socket")
            self.wait_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End jobs, daemons and what they left, and remove the folder."""
        with suppress(LabError, subprocess.TimeoutExpired):
            if self.is_running("slurmctld"):
                self.cancel_all()
        for name in reversed(self._daemons):
            self.kill(name, signal.SIGTERM)
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        if self.network is not None:
            self.network.remove()
        shutil.rmtree(self.folder)

    def _configure(self) -> None:
        folder = self.folder
        folder.chmod(0o755)  # munge must be reachable for all users
        for name in ("munge", "state", "log", "shared", *(f"spool/{node}" for node in self.nodes)):
            (folder / name).mkdir(parents=True)
        if self.network is not None:
            self.network.make()
        ports = iter(_free_ports(1 + len(self.nodes)))
        port = next(ports)
        gpus = f" Gres=gpu:{self._gpus}" if self._gpus else ""
        places = [
            f"NodeName={node} {self._place(node)} Port={next(ports)} CPUs={self._cpus} RealMemory=4000{gpus}"
            for node in self.nodes
        ]
        text = CONFIGURATION.format(
            folder=folder,
            host=HOST,
            address=self.network.address if self.network else "127.0.0.1",
            port=port,
            user=pwd.getpwuid(os.getuid()).pw_name,
            nodes="\n".join(places),
        )
        (folder / "slurm.conf").write_text(text)
        devices = ",".join(DEVICES[: self._gpus])
        (folder / "gres.conf").write_text(f"Name=gpu File={devices}\n" if devices else "")
        # Even without cgroups slurmd looks for them, unless the configuration names their version.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "munge/key").write_bytes(os.urandom(1024))
        (folder / "munge/key").chmod(0o600)
        munge = {"key-file": "key", "socket": "socket", "seed-file": "seed", "pid-file": "pid", "log-file": "log"}
        files = [f"--{option}={folder}/munge/{name}" for option, name in munge.items()]
        self._commands["munged"] = ["munged", "--foreground", "--force", "--num-threads=2", *files]
        self._commands["slurmctld"] = ["slurmctld", "-D"]
        for node in self.nodes:
            inside = self.network.enter(node) if self.network else []
            self._commands[node] = [*inside, "slurmd", "-D", "-N", node]

    def _place(self, node: str) -> str:
        if self.network is None:
            return f"NodeHostname={HOST} NodeAddr=127.0.0.1"
        return f"NodeHostname={node} NodeAddr={self.network.addresses[node]}"

    # -- daemons: `munged`, `slurmctld`, and a node's slurmd by the name of the node

    def start(self, name: str) -> None:
        """Start a daemon that is not running."""
        with (self.folder / f"log/{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                self._commands[name],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Kill a daemon; return when it has ended. The jobs of a slurmd continue."""
        daemon = self._daemons[name]
        daemon.send_signal(number)
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def is_running(self, name: str) -> bool:
        return name in self._daemons and self._daemons[name].poll() is None

    def cut(self, node: str) -> None:
        """Cut the node's network: the node continues, but is unreachable."""
        assert self.network is not None
        self.network.cut(node)

    def restore(self, node: str) -> None:
        """Restore the network of a node."""
        assert self.network is not None
        self.network.restore(node)

    @property
    def configuration(self) -> str:
        """Text of `slurm.conf`."""
        return (self.folder / "slurm.conf").read_text()

    def reconfigure(self, text: str) -> None:
        """Replace `slurm.conf`. A slurmd reads it some time after `scontrol` has returned, and ends if it is empty or
        half written, so the file is replaced in one step. The controller of a busy machine may not answer within
        `MessageTimeout`, so the command is repeated."""
        written = self.folder / "slurm.conf.new"
        written.write_text(text)
        written.replace(self.folder / "slurm.conf")
        self._until(self._reconfigured, 120, "the controller to read slurm.conf")

    def _reconfigured(self) -> bool:
        with suppress(LabError):
            self.run_program("scontrol", "reconfigure")
            return True
        return False

    # -- Slurm's own programs

    def run_program(self, *words: str, timeout_s: float = 15) -> str:
        """Return the output of one of Slurm's programs. Raise LabError if it fails."""
        done = subprocess.run(
            words, env=self.environ, capture_output=True, text=True, timeout=timeout_s, check=False, cwd="/tmp"
        )
        if done.returncode:
            raise LabError(f"{' '.join(words)}: {done.stderr}")
        return done.stdout

    def states(self) -> dict[str, str]:
        """Return the state of each node, such as `idle` or `down*`."""
        lines = self.run_program("sinfo", "-h", "-N", "-p", "main", "-o", "%N %t").splitlines()
        return {line.split()[0]: line.split()[1] for line in lines}

    def wait_idle(self, *, seconds: float = 120) -> None:
        """Wait until every node is up and empty."""
        self._until(self._is_idle, seconds, "idle nodes")

    def _is_idle(self) -> bool:
        try:
            return set(self.states().values()) == {"idle"}
        except LabError:
            return False

    def submit(self, script: str, log: Path, *options: str) -> str:
        """Submit lines of shell, whose output goes to `log`; return the job's id."""
        where = ("--parsable", "--open-mode=append", f"--output={log}", f"--chdir={log.parent}")
        return self.run_program("sbatch", *where, *options, f"--wrap={script}").strip()

    def job(self, id: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        words = self.run_program("scontrol", "-o", "show", "job", id).split()
        return {key: value for key, _, value in (word.partition("=") for word in words)}

    def wait_for(self, id: str, *states: str, seconds: float = 120) -> dict[str, str]:
        """Wait until the job is in one of these states; return its fields."""
        self._until(lambda: self.job(id)["JobState"] in states, seconds, f"job {id} to be {' or '.join(states)}")
        return self.job(id)

    def cancel_all(self) -> None:
        """End every job; return when Slurm has none."""
        ids = self.run_program("squeue", "-h", "--states=PENDING,RUNNING,SUSPENDED", "-o", "%A").split()
        if ids:
            self.run_program("scancel", "--full", "--signal=KILL", *ids)
            self.run_program("scancel", *ids)
            self._until(lambda: not self.run_program("squeue", "-h", "-o", "%A").split(), 120, "an empty queue")

    # -- processes

    def processes(self) -> list[psutil.Process]:
        """Return processes of jobs, wherever they are, and their `slurmstepd` processes."""
        daemons = {daemon.pid for daemon in self._daemons.values()}
        found = psutil.process_iter(["pid", "ppid"])
        return [each for each in found if not daemons & set(each.info.values()) and self._is_of_a_job(each)]

    def _is_of_a_job(self, process: psutil.Process) -> bool:
        """Return whether a process belongs to a job. slurmstepd overwrites its environment with its title; its open
        files show which lab it belongs to."""
        with suppress(psutil.Error, OSError):
            if process.environ().get("SLURM_CONF") == self.environ["SLURM_CONF"]:
                return True
            if process.name().startswith("slurm"):
                open_files = Path(f"/proc/{process.pid}/fd").iterdir()
                return any(str(file.readlink()).startswith(f"{self.folder}/") for file in open_files)
        return False

    def wait_for_processes(self, count: int, *, seconds: float = 120) -> None:
        """Wait until jobs have this number of processes; a `slurmstepd` may end after its job has."""
        self._until(lambda: len(self.processes()) == count, seconds, f"{count} processes of jobs")

    def left(self, *, seconds: float = 10) -> list[str]:
        """Return what jobs left running, after a while: id and command line of each process."""
        with suppress(LabError):
            self.wait_for_processes(0, seconds=seconds)
        return [_described(process) for process in self.processes()]

    def log(self, name: str) -> str:
        """Return the log of a daemon."""
        found = [self.folder / "log" / file for file in (name, f"slurmd-{name}", f"{name}.out")]
        return "\n".join(path.read_text(errors="replace") for path in found if path.exists())

    def _until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                ended = [name for name in self._daemons if not self.is_running(name)]
                tails = [f"-- {name}\n{self.log(name)[-1500:]}" for name in self._commands]
                with suppress(LabError):
                    tails.insert(0, self.run_program("scontrol", "-o", "show", "nodes"))
                raise LabError("\n".join([f"waited {seconds:g} s for {what}; daemons that ended: {ended}", *tails]))
            time.sleep(0.02)


def wait_for_text(log: Path, text: str, *, seconds: float = 120) -> str:
    """Wait until the text is in the file; return the file's content."""
    deadline = time.monotonic() + seconds
    while True:
        found = log.read_text(errors="replace") if log.exists() else ""
        if text in found:
            return found
        if time.monotonic() > deadline:
            raise LabError(f"no `{text}` within {seconds:g} s in {log}:\n{found[-3000:]}")
        time.sleep(0.02)


def missing() -> list[str]:
    """Return the programs that a lab needs and this machine does not have."""
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGTERM)


def _free_ports(count: int) -> list[int]:
    """Return free ports outside those of Ray's workers and those that the kernel gives to clients."""
    found: list[int] = []
    for port in random.sample(range(20000, 32000), 1000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            found.append(port)
        if len(found) == count:
            return found
    raise LabError("no free ports")


def _described(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:150]}"
    except psutil.Error:
        return f"{process.pid}"
