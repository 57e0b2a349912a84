"""Process groups in Ray. All ranks receive the same call at the same time, because they communicate by collectives.

    driver: call("update", ...) --> rank 0 .. rank N-1, each in an actor of Ray --> results in rank order

If a result does not arrive by its deadline, the call hangs: the error shows where each process waits. If a process
dies, the other processes of its group are ended too. They would wait for the dead process forever, or get an error
from their collective. Several groups can be called without waiting (`begin`). `first_done` returns the calls that
finish first.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from ppoctl.core.activity import Activity, preparing
from ppoctl.core.clock import WORK
from ppoctl.core.errors import EnvironmentProblemError, HangError, PpoctlError, ProcessLostError
from ppoctl.engines.ray import shared_memory
from ppoctl.engines.ray.cluster import RayCluster
from ppoctl.engines.ray.rank_activity import RemoteActivity
from ppoctl.engines.ray.ray_worker import MakeTarget, Started, Worker

STACK_DEADLINE_S = 5.0
END_DEADLINE_S = 10.0
SAY_EVERY_S = 30.0
"""Interval in seconds between messages about what the driver waits for."""
LOOK_EVERY_S = 1.0
"""Interval in seconds between checks that all nodes are alive, while the driver waits."""


class Deadline(NamedTuple):
    """Time limit of a call."""

    seconds: float
    key: str
    """Recipe key that sets the deadline."""


@dataclass(frozen=True)
class GroupSettings:
    """Settings of the processes of one role, or of one of its engines."""

    name: str
    """Name of the group in errors."""
    role: str
    """Role whose devices the group uses."""
    size: int
    make: MakeTarget
    threads: int
    """Number of CPU threads of a node, which the role's processes on the node divide. Roles do not compute at the
    same time."""
    start_deadline_s: float
    call_deadline_s: float
    first: int = 0
    """Index of the group's first process within the role."""
    deadlines: Mapping[str, Deadline] = field(default_factory=dict)
    """Deadlines of methods that do not use the default."""
    death_notice_s: float = 5.0
    """Seconds to wait, after an error of another library, for Ray's report that a process died. Collectives fail in
    the surviving ranks before Ray notices which rank died."""

    def deadline(self, method: str) -> Deadline:
        """Return the deadline of a call of this method."""
        return self.deadlines.get(method, Deadline(self.call_deadline_s, "cluster.call_deadline_s"))


class RayProcesses:
    """A group of processes in Ray. The first call starts the group. After an error the group has ended, and the next
    call restarts the group."""

    def __init__(self, group: GroupSettings, cluster: RayCluster) -> None:
        self.group = group
        self.cluster = cluster
        self.ranks: list[Any] = []
        self._is_prepared = False
        """Whether the running processes have no objects yet. The next call creates the objects."""
        self._starting: dict[Any, int] = {}
        """Pending results of the startup, with their ranks, if the processes were prestarted."""
        self._segments: list[str] = []
        self._nodes: dict[int, str] = {}

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all ranks, and return their results."""
        return self.call_ranks(range(self.group.size), method, *arguments)

    def call_ranks(self, ranks: Sequence[int], method: str, *arguments: Any) -> list[Any]:
        """Call a method of these ranks, and return their results in order. Raises the error of the first rank that
        failed, HangError, or ProcessLostError; the group has then ended."""
        return self.begin(method, *arguments, ranks=ranks).answers()

    def prestart(self) -> None:
        """Start the processes if they are not running. The first call waits until the processes are ready, and raises
        errors of the startup."""
        with preparing(f"starting the {self.group.name}"):
            self._starting = self._begin_start() or self._starting

    def prepare(self) -> None:
        """Create the processes if they are not running, and let them prepare (method `prepare` of `make`). The first
        call creates their objects. Errors of the preparation are not reported, because `make` raises them again."""
        if not self.ranks:
            with preparing(f"starting the {self.group.name}"):
                self._create_processes()
            self._is_prepared = True
            for process in self.ranks:
                _working(process.prepare).remote(self.group.make)

    def begin(self, method: str, *arguments: Any, ranks: Sequence[int] | None = None) -> "PendingCall":
        """Call a method of these ranks (default: all) without waiting. Raises an error only if the processes cannot
        be started."""
        is_complete = self.ranks and not self._is_prepared
        with nullcontext() if is_complete else preparing(f"starting the {self.group.name}"):
            starting, self._starting = self._begin_start() or self._starting, {}
        self.cluster.require_alive()
        # The arguments are stored once: all processes of a node read the same copy.
        stored_arguments = ray.put(tuple(map(self.cluster.sent_once, arguments)))
        called = range(self.group.size) if ranks is None else ranks
        waiting = {_working(self.ranks[rank].call).remote(method, stored_arguments): rank for rank in called}
        return PendingCall(self, method, starting, waiting)

    def nodes(self) -> list[str]:
        """Return the nodes of the processes. The list is complete once every process has completed a call."""
        return [node for _, node in sorted(self._nodes.items())]

    def close(self) -> None:
        """Ask the processes to end gracefully, then end them."""
        if self.ranks:
            with suppress(PpoctlError, RayError):
                self.cluster.require_alive()
                ending = [_working(rank.end).remote() for rank in self.ranks]
                ray.wait(ending, num_returns=len(ending), timeout=END_DEADLINE_S)
        self.kill()

    def kill(self) -> None:
        """End the processes immediately, and remove the shared memory that they leave behind."""
        ranks, self.ranks, self._starting = self.ranks, [], {}
        for rank in ranks:
            ray.kill(rank)
        shared_memory.remove(self._segments)
        self._segments = []

    def started(self, rank: int, report: Started) -> None:
        """Record that a process has started."""
        self._nodes[rank] = report.node
        self._segments += report.segments

    def where(self, rank: int) -> str:
        """Return the innermost stack frames of the call that this process executes."""
        try:
            return str(ray.get(_watching(self.ranks[rank].stack).remote(), timeout=STACK_DEADLINE_S))
        except RayError:
            return "does not answer"

    def _begin_start(self) -> dict[Any, int]:
        """Start the processes if they are not running, without waiting until they are ready."""
        if not self.ranks:
            self._create_processes()
        elif not self._is_prepared:
            return {}
        self._is_prepared = False
        group = self.group
        address = self._meeting_place() if group.size > 1 else ""
        return {
            _working(process.make).remote(group.make, rank, group.size, address): rank
            for rank, process in enumerate(self.ranks)
        }

    def _create_processes(self) -> None:
        self.cluster.start()
        self.cluster.require_alive()
        group = self.group
        remote: Any = ray.remote
        # The name of the class is shown in lists of processes, such as `ray::actor`.
        member = type(group.name.replace("'s ", "_").replace(" ", "_"), (Worker,), {})
        # Ray must not restart a single process: it would be missing in the collectives of its group.
        actor = remote(max_restarts=0, concurrency_groups={"work": 1, "watch": 1})(member)
        self.ranks = [
            actor.options(**self.cluster.options(group.role, rank)).remote(
                max(1, group.threads // self.cluster.neighbours(group.role, rank)),
                str(Path.cwd()),
                None if self.cluster.logs is None else self.cluster.logs / f"{group.role}-{rank}.log",
            )
            for rank in range(group.first, group.first + group.size)
        ]

    def _meeting_place(self) -> str:
        group = self.group
        try:
            pending = _watching(self.ranks[0].free_address).remote(self.cluster.host)
            until = time.monotonic() + group.start_deadline_s
            while not ray.wait([pending], timeout=LOOK_EVERY_S)[0] and time.monotonic() < until:
                self.cluster.require_alive()
            return str(ray.get(pending, timeout=0))
        except RayActorError as error:
            self.kill()
            raise _lost(self, 0, "start", error) from error
        except (GetTimeoutError, RayError) as error:
            self.kill()
            raise EnvironmentProblemError(
                f"no process of the {group.name} started within {group.start_deadline_s:g} s",
                hint="raise `cluster.start_deadline_s`, or look at `ray status`",
            ) from error


class PendingCall:
    """A call to a group, with the results so far. If several processes fail, the first error is raised."""

    def __init__(
        self, processes: RayProcesses, method: str, starting: dict[Any, int], waiting: dict[Any, int]
    ) -> None:
        group = processes.group
        self.processes = processes
        self.method = method
        self.deadline = group.deadline(method)
        self.deadline_s = self.deadline.seconds + (group.start_deadline_s if starting else 0.0)
        self.until = time.monotonic() + self.deadline_s
        self._starting = starting
        self._called = waiting
        self._answers: dict[int, Any] = {}
        self._error: Exception | None = None
        self._wait_for_cause_until = 0.0
        self.open = {**starting, **waiting}
        """Pending references with their ranks. References of the startup come first."""

    @property
    def is_starting(self) -> bool:
        """Whether some of the processes have not started yet."""
        return any(reference in self.open for reference in self._starting)

    @property
    def process_at_work(self) -> Any:
        """The first process without a result. None: all have a result, or the group has ended."""
        ranks = self.processes.ranks
        return ranks[min(self.open.values())] if self.open and ranks else None

    @property
    def is_done(self) -> bool:
        return not self.open or (self._error is not None and time.monotonic() >= self._wait_for_cause_until)

    @property
    def look_again_at(self) -> float:
        """Time at which waiting for results ends."""
        return self.until if self._error is None else min(self.until, self._wait_for_cause_until)

    def answers(self) -> list[Any]:
        """Wait for the results, and return them in the order of the called ranks. Raises the error of the call; the
        group has then ended."""
        first_done([self])
        if self._error is not None:
            self.processes.kill()  # the other ranks may wait for the failed rank in a collective
            raise self._error
        return [self._answers[rank] for rank in self._called.values()]

    def take(self, ready: Sequence[Any]) -> None:
        """Record the results that have arrived."""
        for reference in [reference for reference in self.open if reference in ready]:
            rank = self.open.pop(reference)
            try:
                answer = ray.get(reference)
            except RayTaskError as error:
                self._record_error(_as_raised(error))
            except (RayActorError, OutOfMemoryError) as error:
                # If a process dies at its start, its call may fail before its start does.
                starting = reference in self._starting or any(self.open.get(it) == rank for it in self._starting)
                self._record_error(self._lost(rank, "start" if starting else self.method, error))
            except RayError as error:
                self._record_error(error)
            else:
                if reference in self._called:
                    self._answers[rank] = answer
                else:
                    self.processes.started(rank, answer)

    def _lost(self, rank: int, method: str, error: RayError) -> Exception:
        try:
            self.processes.cluster.require_alive()
        except ProcessLostError as node_error:
            return node_error
        return _lost(self.processes, rank, method, error)

    def look_at_nodes(self) -> None:
        """Record an error if a node is lost."""
        try:
            self.processes.cluster.require_alive()
        except ProcessLostError as error:
            self._record_error(error)

    def _record_error(self, error: Exception) -> None:
        """Record an error. The first ppoctl error is raised. An error of another library is raised only if no ppoctl
        error follows."""
        if not isinstance(self._error, PpoctlError):
            foreign = not isinstance(error, PpoctlError)
            if self._error is None and foreign:
                self._wait_for_cause_until = time.monotonic() + self.processes.group.death_notice_s
            if self._error is None or not foreign:
                self._error = error
            if not foreign:
                self._wait_for_cause_until = 0.0

    def expire(self) -> None:
        """Record a HangError if the deadline has passed."""
        if not self.is_done and time.monotonic() >= self.until:
            size, late = self.processes.group.size, sorted(set(self.open.values()))
            where = "\n".join(f"  rank {rank}: {self.processes.where(rank)}" for rank in late)
            self._error = HangError(
                f"the {self.processes.group.name} has not finished `{self.method}` within "
                f"{self.deadline_s:g} s (`{self.deadline.key}`); "
                f"waiting for {len(late)} of {size} processes:\n{where}",
                hint="raise the deadline if they are computing; `ppoctl resume RUN` continues after the last "
                "committed stage",
            )

    def describe(self) -> str:
        """Return a line about what the driver waits for."""
        group, late = self.processes.group, sorted(set(self.open.values()))
        rank = late[0]
        return (
            f"waiting for {len(late)} of {group.size} processes of the {group.name} in `{self.method}`; "
            f"rank {rank}: {self.processes.where(rank)}"
        )


def _lost(processes: RayProcesses, rank: int, method: str, how: RayError) -> ProcessLostError:
    group = processes.group
    which = f"process {rank} of the {group.name}'s {group.size}" if group.size > 1 else f"the {group.name}"
    node = processes.cluster.name_of(group.role, group.first + rank)
    which += "" if node is None else f" on node `{node}`"
    if isinstance(how, OutOfMemoryError):
        return ProcessLostError(
            f"{which} was ended by Ray during `{method}`: its node ran out of memory",
            hint="everything finished is committed: `ppoctl resume RUN`; `ppoctl plan` shows what uses host memory",
        )
    return ProcessLostError(
        f"{which} died during `{method}`",
        hint="everything finished is committed: `ppoctl resume RUN`; look for the kernel's "
        "out-of-memory killer in `dmesg`",
    )


def first_done(pendings: Sequence[PendingCall]) -> list[PendingCall]:
    """Wait until at least one call is done, with a result or an error, and return the calls that are done."""
    with closing(RemoteActivity()) as watched:
        return _first_done(pendings, watched)


def _first_done(pendings: Sequence[PendingCall], watched: RemoteActivity) -> list[PendingCall]:
    notify_at = time.monotonic() + SAY_EVERY_S
    while True:
        done = [pending for pending in pendings if pending.is_done]
        if done:
            return done
        references = [reference for pending in pendings for reference in pending.open]
        until = min(notify_at, time.monotonic() + LOOK_EVERY_S, *(pending.look_again_at for pending in pendings))
        starting = [pending.processes.group.name for pending in pendings if pending.is_starting]
        if starting:
            watched.show(Activity(f"starting the {starting[0]}"))
        # The work clock measures stages, which do not include the startup of processes.
        with WORK.stopped() if starting else nullcontext():
            ready, _ = ray.wait(references, timeout=max(0.0, until - time.monotonic()))
        for pending in pendings:
            pending.take(ready)
            if not ready:
                pending.look_at_nodes()
            pending.expire()
        if not ready and not starting and (process := pendings[0].process_at_work) is not None:
            watched.look(_watching(process.act))
        if time.monotonic() >= notify_at:
            notify_at += SAY_EVERY_S
            for pending in pendings:
                if not pending.is_done:
                    pending.processes.cluster.notify(pending.describe())


def _as_raised(error: RayTaskError) -> Exception:
    """Return the error that the process raised, with the text of the stack as its cause."""
    raised: Exception = error.cause
    raised.__cause__ = error
    return raised


def _working(method: Any) -> Any:
    return method.options(concurrency_group="work")


def _watching(method: Any) -> Any:
    return method.options(concurrency_group="watch")
