"""A Ray cluster on the nodes of a Slurm job: one `srun` per node, which runs the program in `node.py`.

    driver --stdin--> srun --> node program --> ray start --block          (head: the driver's own node)
           <-stdout--                                                       stderr: RUN/logs/attempt-N/ray-NODE.log

The end of stdin ends a node's program and everything that it started. The kernel closes the driver's end of stdin
even if the driver is killed.
"""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.engines.ray.node import MARK, NodeOrder, NodeStarted

SAY_EVERY_S = 5.0
LOOK_EVERY_S = 0.2
END_DEADLINE_S = 15.0
KILL_AFTER_S = 5.0

# Without `--overlap`, a step waits while another step of the job has the CPUs. `--unbuffered`: the driver
# waits for the first line.
SRUN = (
    *("srun", "--overlap", "--nodes=1", "--ntasks=1", "--export=ALL"),
    *("--cpu-bind=none", "--mpi=none", "--unbuffered", "--quiet"),
)
OF_TASKS = (
    *("CPUS_PER_TASK", "CPUS_PER_GPU", "CPU_BIND", "DISTRIBUTION", "EXACT", "EXCLUSIVE", "EXPORT_ENV", "GPUS"),
    *(
        "GPUS_PER_NODE",
        "GPUS_PER_SOCKET",
        "GPUS_PER_TASK",
        "GPU_BIND",
        "GRES",
        "HINT",
        "MEM_BIND",
        "NNODES",
        "NPROCS",
    ),
    *("NTASKS", "NTASKS_PER_CORE", "NTASKS_PER_GPU", "NTASKS_PER_NODE", "NTASKS_PER_SOCKET", "STEP_GRES"),
    *("THREADS_PER_CORE", "TRES_PER_TASK", "TRES_BIND", "LABELIO", "HOSTFILE"),
)
"""Names, without the prefix SLURM_ or SRUN_, of variables from which `srun` would inherit the requests of the job.
Without these variables a Slurm step gets all CPUs of the job on its node. GPUs are requested by number
(`SLURM_GPUS_ON_NODE`): otherwise a Slurm step would request all of the job's `--gpus` from its single node."""
WATCHED = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}
"""A node that does not answer is considered dead after 10 s. Ray's default of 30 s or more suits nodes that may come
back."""
PATIENT = {"RAY_raylet_start_wait_time_s": "86400"}
"""Ray gives a node 30 s to start, too few on a busy one. The limit of the whole start ends the wait."""


@dataclass(frozen=True)
class JobNodes:
    """Nodes of a Slurm job."""

    job: str
    """Id of the job."""
    here: str
    """Name of this process's node."""
    addresses: Mapping[str, str]
    """Address at which Slurm reaches each node, by the name of the node, in the job's order."""
    options: tuple[str, ...] = ()
    """Additional options of `srun`, such as container options."""
    before: tuple[str, ...] = ()
    """Words before the program of a node, such as a container command."""

    def command(self, name: str) -> list[str]:
        """Return the `srun` command of a node."""
        gpus = os.environ.get("SLURM_GPUS_ON_NODE")
        gpu_options = [] if gpus is None else [f"--gpus-per-node={gpus}"]
        program = (*self.before, sys.executable, "-m", "ppoctl.engines.ray.node")
        return [*SRUN, *gpu_options, *self.options, f"--nodelist={name}", *program]


def is_of_tasks(name: str) -> bool:
    """Whether the variable contains what a job or a step requested."""
    program, _, option = name.partition("_")
    return program in ("SLURM", "SRUN") and option in OF_TASKS


class NodeStep:
    """The `srun` of one node."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self.log = log
        self.started: NodeStarted | None = None
        self._output = b""
        environment = {name: value for name, value in os.environ.items() if not is_of_tasks(name)}
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,  # Ctrl-C must reach only the driver, which then ends this process gracefully
                env={**WATCHED, **PATIENT, **environment},
            )

    def order(self, order: NodeOrder) -> None:
        """Send the node's program its order."""
        stdin = _pipe(self.process.stdin)
        with suppress(BrokenPipeError):  # the program has ended: `dead` reports that
            stdin.write(json.dumps(asdict(order)).encode() + b"\n")
            stdin.flush()

    def read(self) -> None:
        """Read the program's output."""
        self._output += os.read(_pipe(self.process.stdout).fileno(), 4096)
        for line in self._output.split(b"\n")[:-1]:  # programs of the site may print lines before ours
            _, mark, report = line.partition(MARK.encode())
            if mark and self.started is None:
                self.started = NodeStarted(**json.loads(report))

    def last_words(self) -> str:
        """Return the last message of the node's program. Without a message, return how the node's srun ended."""
        lines = [line.strip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines()]
        ours = [line for line in lines if line.startswith(f"{self.name}: ")]
        theirs = [line for line in lines if line.startswith(("srun:", "slurmstepd:"))]
        message = ours[-1].removeprefix(f"{self.name}: ") if ours else ""
        return message or (theirs or lines or [f"srun ended with code {self.process.returncode}"])[-1]


class NodeSteps:
    """The Slurm steps of all nodes of a job. The head is the first."""

    def __init__(
        self,
        nodes: JobNodes,
        logs: Path,
        *,
        say_every_s: float = SAY_EVERY_S,
        end_deadline_s: float = END_DEADLINE_S,
    ) -> None:
        """Start the program of each node. All nodes must end gracefully within `end_deadline_s`; after that, their
        sruns are terminated, and finally killed."""
        self.nodes = nodes
        self._say_every_s, self._end_deadline_s = say_every_s, end_deadline_s
        self.lost: str | None = None
        """Name of a lost node. `end` does not wait for this node."""
        self._steps = [
            NodeStep(name, nodes.command(name), logs / f"ray-{name}.log")
            for name in sorted(nodes.addresses, key=lambda name: name != nodes.here)
        ]

    def start(self, slots: int, object_store_bytes: int, until: float, notify: Callable[[str], None]) -> str:
        """Start Ray on all nodes, and return its address. Raises EnvironmentProblemError if a node's program ends, or
        has not started Ray at the time `until`."""
        head, *others = self._steps
        towards = self.nodes.addresses[others[0].name]
        head.order(NodeOrder(head.name, towards, None, slots, object_store_bytes))
        address = self._wait_for([head], until, notify)
        for step in others:
            step.order(NodeOrder(step.name, address.rpartition(":")[0], address, slots, object_store_bytes))
        return self._wait_for(others, until, notify)

    def _wait_for(self, steps: list[NodeStep], until: float, notify: Callable[[str], None]) -> str:
        """Wait until Ray has started on these nodes, and return its address."""
        notify_at = time.monotonic() + self._say_every_s
        while waiting := [step for step in steps if step.started is None]:
            if (dead := self.dead()) is not None:
                raise EnvironmentProblemError(
                    f"Ray did not start on node `{dead.name}` of job {self.nodes.job}: {dead.last_words()}",
                    hint=f"tail {dead.log}",
                )
            names = ", ".join(f"`{step.name}`" for step in waiting)
            if time.monotonic() >= until:
                raise EnvironmentProblemError(
                    f"Ray did not start on {names} of job {self.nodes.job} within `cluster.start_deadline_s`",
                    hint=f"tail {waiting[0].log}",
                )
            if time.monotonic() >= notify_at:
                notify_at += self._say_every_s
                notify(f"waiting for Ray on {names} of {len(self._steps)} nodes")
            outputs = {_pipe(step.process.stdout): step for step in waiting}
            for output in select.select(list(outputs), [], [], LOOK_EVERY_S)[0]:
                outputs[output].read()
        started = steps[0].started
        assert started is not None
        return started.address

    def dead(self) -> NodeStep | None:
        """Return the step of a node whose `srun` has ended. None: all steps are running."""
        return next((step for step in self._steps if step.process.poll() is not None), None)

    def end(self, notify: Callable[[str], None]) -> None:
        """End Ray on all nodes, and wait until all processes and files of Ray are gone. If that takes long, call
        `notify` with a message."""
        for step in self._steps:
            with suppress(OSError):
                _pipe(step.process.stdin).close()
        now = time.monotonic()
        notify_at, until = now + self._say_every_s, now + self._end_deadline_s
        waited_for = [step for step in self._steps if step.name != self.lost]
        for step in waited_for:
            _wait(step.process, notify_at)
        if late := [f"`{step.name}`" for step in waited_for if step.process.poll() is None]:
            seconds = self._end_deadline_s + KILL_AFTER_S
            notify(f"waiting for Ray to end on {', '.join(late)}, at most {seconds:g} s in all")
        for step in waited_for:
            _wait(step.process, until)
        for step in self._steps:
            if step.name != self.lost:
                step.process.terminate()
            else:
                step.process.kill()
        until = time.monotonic() + KILL_AFTER_S
        for step in self._steps:
            _wait(step.process, until)
            step.process.kill()
            step.process.wait()
            _pipe(step.process.stdout).close()


def _wait(process: "subprocess.Popen[Any]", until: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, until - time.monotonic()))


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None, "the process was opened with pipes"
    return pipe
