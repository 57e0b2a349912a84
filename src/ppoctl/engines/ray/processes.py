"""A group of processes that are asked the same at the same time, because their answers meet in collectives.

    driver: call("update", ...) --> rank 0 .. rank N-1, each in an actor of Ray --> answers in the order of the ranks

An answer that does not come by its deadline is a hang: the error says who is waiting where. A process that dies takes
the others with it, since they would wait for it for ever.
"""

import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from ppoctl.engines.ray.cluster import RayCluster
from ppoctl.errors import EnvironmentProblemError, HangError, ProcessLostError

Make = Callable[[int, int, str], Any]
"""(rank, number of ranks, `host:port` where rank 0 waits) -> what answers in that process; it returns when all ranks
have come."""

STACK_DEADLINE_S = 5.0


@dataclass(frozen=True)
class Group:
    """What the processes of one role are."""

    name: str
    size: int
    make: Make
    threads: int
    """Of each process."""
    start_deadline_s: float
    call_deadline_s: float


class _Rank:
    """Lives in a process of its own. What works and what watches have a thread each: Ray hands out from the main
    thread: one that worked there would keep `stack` waiting."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._target: Any = None

    def stack(self) -> str:
        """Where this process is: the innermost frames of the thread that works."""
        for frame in sys._current_frames().values():
            stack = traceback.extract_stack(frame)
            start = next((place for place, line in enumerate(stack) if line.name in ("call", "make")), None)
            if start is not None:
                inner = [f"{Path(line.filename).name}:{line.lineno} {line.name}" for line in stack[start + 1 :]]
                return " < ".join(reversed(inner[-6:]))
        return "not at work"

    def free_address(self, host: str | None) -> str:
        """`host:port` on this process's node; `host` where it is known."""
        host = host or ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.socket() as listener:
            listener.bind((host, 0))
            return f"{host}:{listener.getsockname()[1]}"

    def make(self, make: Make, rank: int, size: int, address: str) -> None:
        torch.set_num_threads(self._threads)
        self._target = make(rank, size, address)

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self._target, method)(*arguments)


class RayProcesses:
    """The group. Nothing is started before it is first asked."""

    def __init__(self, group: Group, cluster: RayCluster) -> None:
        self.group = group
        self.cluster = cluster
        self._ranks: list[Any] = []

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What all ranks answer."""
        return self.ask(range(self.group.size), method, *arguments)

    def ask(self, ranks: Sequence[int], method: str, *arguments: Any) -> list[Any]:
        """What these ranks answer, in order.

        Raises the error of the first rank that has one, HangError, or ProcessLostError; the group is then gone.
        """
        processes = self._started()
        # Put once: every process of a node reads the same copy.
        given = ray.put(arguments)
        waiting = {_working(processes[rank].call).remote(method, given): rank for rank in ranks}
        return self._answers(waiting, method, self.group.call_deadline_s)

    def close(self) -> None:
        """End the processes."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            ray.kill(rank)

    def _started(self) -> list[Any]:
        if not self._ranks:
            self.cluster.start()
            group = self.group
            remote: Any = ray.remote
            actor = remote(num_cpus=1, max_restarts=0, concurrency_groups={"work": 1, "watch": 1})(_Rank)
            self._ranks = [actor.remote(group.threads) for _ in range(group.size)]
            try:
                address = ray.get(
                    _watching(self._ranks[0].free_address).remote(self.cluster.host), timeout=group.start_deadline_s
                )
            except (GetTimeoutError, RayError) as error:
                self.close()
                raise EnvironmentProblemError(
                    f"no process of the {group.name} came up within {group.start_deadline_s:g} s",
                    hint="raise `cluster.start_deadline_s`, or look at `ray status`",
                ) from error
            waiting = {
                _working(process.make).remote(group.make, rank, group.size, address): rank
                for rank, process in enumerate(self._ranks)
            }
            self._answers(waiting, "start", group.start_deadline_s)
        return self._ranks

    def _answers(self, waiting: dict[Any, int], method: str, deadline_s: float) -> list[Any]:
        pending, answers, until = list(waiting), dict[int, Any](), time.monotonic() + deadline_s
        while pending:
            done, pending = ray.wait(pending, timeout=max(0.0, until - time.monotonic()))
            if not done:
                error = self._hang(method, deadline_s, [waiting[reference] for reference in pending])
                self.close()
                raise error
            for reference in done:
                try:
                    answers[waiting[reference]] = ray.get(reference)
                except RayTaskError as error:
                    self.close()  # the others may wait for this one
                    raise error.cause from error
                except RayActorError as error:
                    self.close()
                    raise ProcessLostError(
                        f"process {waiting[reference]} of the {self.group.name}'s {self.group.size} died during "
                        f"`{method}`",
                        hint="everything finished is committed: `ppoctl resume RUN`; look for the kernel's "
                        "out-of-memory killer in `dmesg`",
                    ) from error
        return [answers[rank] for rank in waiting.values()]

    def _hang(self, method: str, deadline_s: float, late: list[int]) -> HangError:
        where = []
        for rank in late:
            try:
                stack = ray.get(_watching(self._ranks[rank].stack).remote(), timeout=STACK_DEADLINE_S)
            except RayError:
                stack = "does not answer"
            where.append(f"  rank {rank}: {stack}")
        return HangError(
            f"the {self.group.name} has not finished `{method}` within `cluster.call_deadline_s = {deadline_s:g}`; "
            f"waiting for {len(late)} of {self.group.size} processes:\n" + "\n".join(where),
            hint="raise the deadline if they are at work; `ppoctl resume RUN` goes on from what is committed",
        )


def _working(method: Any) -> Any:
    return method.options(concurrency_group="work")


def _watching(method: Any) -> Any:
    return method.options(concurrency_group="watch")
