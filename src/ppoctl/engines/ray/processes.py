"""Groups of processes that are asked the same at the same time, because their answers meet in collectives.

    driver: call("update", ...) --> rank 0 .. rank N-1, each in an actor of Ray --> answers in the order of the ranks

An answer that does not come by its deadline is a hang: the error says who is waiting where. A process that dies takes
the others with it, since they would wait for it for ever, or hear from their collective that somebody is gone.
Several groups can be asked without waiting (`begin`), and whoever is ready first is served first (`first_done`).
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from ppoctl.activity import Activity, preparing
from ppoctl.clock import WORK
from ppoctl.engines.ray import shared_memory
from ppoctl.engines.ray.activity import RemoteActivity
from ppoctl.engines.ray.cluster import RayCluster
from ppoctl.engines.ray.worker import MakeTarget, Started, Worker
from ppoctl.errors import EnvironmentProblemError, HangError, PpoctlError, ProcessLostError

STACK_DEADLINE_S = 5.0
END_DEADLINE_S = 10.0
DEATH_NOTICE_S = 5.0
"""Seconds that an error which is none of ours waits for the news of a death: a collective breaks in the ranks that
live before Ray has noticed which one does not."""
SAY_EVERY_S = 30.0
"""Seconds between the lines in which a wait says what it is waiting for."""
LOOK_EVERY_S = 1.0
"""Seconds between two looks, in a wait, whether all nodes are there."""


class Deadline(NamedTuple):
    """Time by which an answer must have come."""

    seconds: float
    key: str
    """Recipe key that sets the deadline."""


@dataclass(frozen=True)
class GroupSettings:
    """Settings of the processes of one role, or of one of its engines."""

    name: str
    """Name of the group in errors."""
    role: str
    """Role whose place on the devices the group has."""
    size: int
    make: MakeTarget
    threads: int
    """CPU threads of a node, which the role's processes there share: roles take turns."""
    start_deadline_s: float
    call_deadline_s: float
    first: int = 0
    """Index of the group's first process among those of the role."""
    deadlines: Mapping[str, Deadline] = field(default_factory=dict)
    """Deadlines of methods that have one of their own."""

    def deadline(self, method: str) -> Deadline:
        """Deadline of an answer to this method."""
        return self.deadlines.get(method, Deadline(self.call_deadline_s, "cluster.call_deadline_s"))


class RayProcesses:
    """A group of processes in Ray. Nothing is started before the group is first asked; after an error it is gone, and
    the next question starts it anew."""

    def __init__(self, group: GroupSettings, cluster: RayCluster) -> None:
        self.group = group
        self.cluster = cluster
        self.ranks: list[Any] = []
        self._starting: dict[Any, int] = {}
        """What the processes were asked for when they were started ahead."""
        self._segments: list[str] = []
        self._nodes: dict[int, str] = {}

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Answers of all ranks."""
        return self.call_ranks(range(self.group.size), method, *arguments)

    def call_ranks(self, ranks: Sequence[int], method: str, *arguments: Any) -> list[Any]:
        """Answers of these ranks, in order. Raises the error of the first rank that has one, HangError, or
        ProcessLostError; the group is then gone."""
        return self.begin(method, *arguments, ranks=ranks).answers()

    def prestart(self) -> None:
        """Start the processes where they are not running; whoever asks them first waits until they can answer, and is
        told what went wrong."""
        with preparing(f"starting the {self.group.name}"):
            self._starting = self._begin_start() or self._starting

    def begin(self, method: str, *arguments: Any, ranks: Sequence[int] | None = None) -> "PendingCall":
        """Ask these ranks (all of them), and go on. Raises only when the processes cannot be started."""
        with preparing(f"starting the {self.group.name}") if not self.ranks else nullcontext():
            starting, self._starting = self._begin_start() or self._starting, {}
        self.cluster.require_alive()
        # Put once: every process of a node reads the same copy.
        given = ray.put(tuple(map(self.cluster.sent_once, arguments)))
        asked = range(self.group.size) if ranks is None else ranks
        waiting = {_working(self.ranks[rank].call).remote(method, given): rank for rank in asked}
        return PendingCall(self, method, starting, waiting)

    def nodes(self) -> list[str]:
        """Nodes on which the processes run: complete once all have answered something."""
        return [node for _, node in sorted(self._nodes.items())]

    def close(self) -> None:
        """Ask the processes to end in order, if they can."""
        if self.ranks:
            with suppress(PpoctlError, RayError):
                self.cluster.require_alive()
                ending = [_working(rank.end).remote() for rank in self.ranks]
                ray.wait(ending, num_returns=len(ending), timeout=END_DEADLINE_S)
        self.kill()

    def kill(self) -> None:
        """End the processes at once, and remove what they leave."""
        ranks, self.ranks, self._starting = self.ranks, [], {}
        for rank in ranks:
            ray.kill(rank)
        shared_memory.remove(self._segments)
        self._segments = []

    def started(self, rank: int, says: Started) -> None:
        """Hear that one of the processes has started."""
        self._nodes[rank] = says.node
        self._segments += says.segments

    def where(self, rank: int) -> str:
        """Innermost frames of what this process is doing."""
        try:
            return str(ray.get(_watching(self.ranks[rank].stack).remote(), timeout=STACK_DEADLINE_S))
        except RayError:
            return "does not answer"

    def _begin_start(self) -> dict[Any, int]:
        """Start the processes where they are not running, without waiting until they can answer."""
        if self.ranks:
            return {}
        self.cluster.start()
        self.cluster.require_alive()
        group = self.group
        remote: Any = ray.remote
        # The class gives the process its name: `ray::actor` in a list of processes.
        member = type(group.name.replace("'s ", "_").replace(" ", "_"), (Worker,), {})
        actor = remote(max_restarts=0, concurrency_groups={"work": 1, "watch": 1})(member)
        self.ranks = [
            actor.options(**self.cluster.options(group.role, rank)).remote(
                max(1, group.threads // self.cluster.neighbours(group.role, rank)),
                str(Path.cwd()),
                None if self.cluster.logs is None else self.cluster.logs / f"{group.role}-{rank}.log",
            )
            for rank in range(group.first, group.first + group.size)
        ]
        address = self._meeting_place() if group.size > 1 else ""
        return {
            _working(process.make).remote(group.make, rank, group.size, address): rank
            for rank, process in enumerate(self.ranks)
        }

    def _meeting_place(self) -> str:
        group = self.group
        try:
            asked = _watching(self.ranks[0].free_address).remote(self.cluster.host)
            until = time.monotonic() + group.start_deadline_s
            while not ray.wait([asked], timeout=LOOK_EVERY_S)[0] and time.monotonic() < until:
                self.cluster.require_alive()
            return str(ray.get(asked, timeout=0))
        except RayActorError as error:
            self.kill()
            raise _lost(self, 0, "start", error) from error
        except (GetTimeoutError, RayError) as error:
            self.kill()
            raise EnvironmentProblemError(
                f"no process of the {group.name} came up within {group.start_deadline_s:g} s",
                hint="raise `cluster.start_deadline_s`, or look at `ray status`",
            ) from error


class PendingCall:
    """A question to a group, and the answers so far. The first thing that goes wrong decides."""

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
        self._asked = waiting
        self._answers: dict[int, Any] = {}
        self._error: Exception | None = None
        self._heard_until = 0.0
        self.open = {**starting, **waiting}
        """References of what has not been answered, by rank: the start first, where there is one."""

    @property
    def is_starting(self) -> bool:
        """Whether some of the processes have not come up."""
        return any(reference in self.open for reference in self._starting)

    @property
    def process_at_work(self) -> Any:
        """The first process that has not answered; None: all have, or are gone."""
        ranks = self.processes.ranks
        return ranks[min(self.open.values())] if self.open and ranks else None

    @property
    def is_done(self) -> bool:
        return not self.open or (self._error is not None and time.monotonic() >= self._heard_until)

    @property
    def look_again_at(self) -> float:
        """Time at which waiting for an answer ends."""
        return self.until if self._error is None else min(self.until, self._heard_until)

    def answers(self) -> list[Any]:
        """Answers in the order of the ranks that were asked, waited for. Raises what went wrong; the group is then
        gone."""
        first_done([self])
        if self._error is not None:
            self.processes.kill()  # the others may wait for the one that failed
            raise self._error
        return [self._answers[rank] for rank in self._asked.values()]

    def take(self, ready: Sequence[Any]) -> None:
        """Take note of the answers that have come."""
        for reference in [reference for reference in self.open if reference in ready]:
            rank = self.open.pop(reference)
            try:
                answer = ray.get(reference)
            except RayTaskError as error:
                self._record_error(_as_raised(error))
            except (RayActorError, OutOfMemoryError) as error:
                method = "start" if reference in self._starting else self.method
                self._record_error(self._lost(rank, method, error))
            except RayError as error:
                self._record_error(error)
            else:
                if reference in self._asked:
                    self._answers[rank] = answer
                else:
                    self.processes.started(rank, answer)

    def _lost(self, rank: int, method: str, error: RayError) -> Exception:
        try:
            self.processes.cluster.require_alive()
        except ProcessLostError as of_node:
            return of_node
        return _lost(self.processes, rank, method, error)

    def look_at_nodes(self) -> None:
        """Call the question lost if a node is."""
        try:
            self.processes.cluster.require_alive()
        except ProcessLostError as error:
            self._record_error(error)

    def _record_error(self, error: Exception) -> None:
        """Take note of an error. The first of ours decides; another one only where none follows."""
        if not isinstance(self._error, PpoctlError):
            foreign = not isinstance(error, PpoctlError)
            if self._error is None and foreign:
                self._heard_until = time.monotonic() + DEATH_NOTICE_S
            if self._error is None or not foreign:
                self._error = error
            if not foreign:
                self._heard_until = 0.0

    def expire(self) -> None:
        """Call the question a hang if its deadline has passed."""
        if not self.is_done and time.monotonic() >= self.until:
            size, late = self.processes.group.size, sorted(set(self.open.values()))
            where = "\n".join(f"  rank {rank}: {self.processes.where(rank)}" for rank in late)
            self._error = HangError(
                f"the {self.processes.group.name} has not finished `{self.method}` within "
                f"{self.deadline_s:g} s (`{self.deadline.key}`); "
                f"waiting for {len(late)} of {size} processes:\n{where}",
                hint="raise the deadline if they are at work; `ppoctl resume RUN` goes on from what is committed",
            )

    def describe(self) -> str:
        """A line on what is being waited for."""
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
            hint="everything finished is committed: `ppoctl resume RUN`; `ppoctl plan` says what takes host memory",
        )
    return ProcessLostError(
        f"{which} died during `{method}`",
        hint="everything finished is committed: `ppoctl resume RUN`; look for the kernel's "
        "out-of-memory killer in `dmesg`",
    )


def first_done(pendings: Sequence[PendingCall]) -> list[PendingCall]:
    """Questions that are done, well or not; waits until there is at least one."""
    with closing(RemoteActivity()) as watched:
        return _first_done(pendings, watched)


def _first_done(pendings: Sequence[PendingCall], watched: RemoteActivity) -> list[PendingCall]:
    say_at = time.monotonic() + SAY_EVERY_S
    while True:
        done = [pending for pending in pendings if pending.is_done]
        if done:
            return done
        references = [reference for pending in pendings for reference in pending.open]
        until = min(say_at, time.monotonic() + LOOK_EVERY_S, *(pending.look_again_at for pending in pendings))
        starting = [pending.processes.group.name for pending in pendings if pending.is_starting]
        if starting:
            watched.show(Activity(f"starting the {starting[0]}"))
        with WORK.stopped() if starting else nullcontext():
            ready, _ = ray.wait(references, timeout=max(0.0, until - time.monotonic()))
        for pending in pendings:
            pending.take(ready)
            if not ready:
                pending.look_at_nodes()
            pending.expire()
        if not ready and not starting and (process := pendings[0].process_at_work) is not None:
            watched.look(_watching(process.act))
        if time.monotonic() >= say_at:
            say_at += SAY_EVERY_S
            for pending in pendings:
                if not pending.is_done:
                    pending.processes.cluster.notify(pending.describe())


def _as_raised(error: RayTaskError) -> Exception:
    """The error as the process raised it; the text of its stack is kept as the cause."""
    raised: Exception = error.cause
    raised.__cause__ = error
    return raised


def _working(method: Any) -> Any:
    return method.options(concurrency_group="work")


def _watching(method: Any) -> Any:
    return method.options(concurrency_group="watch")
