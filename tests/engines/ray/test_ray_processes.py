"""Groups of processes in a real Ray: answers, errors, deaths and hangs."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from ppoctl.engines.ray.cluster import RayCluster
from ppoctl.engines.ray.processes import Group, RayProcesses
from ppoctl.errors import EnvironmentProblemError, HangError, NonFiniteError, ProcessLostError


def worker() -> Callable[[int, int, str], Any]:
    """Made here, so that Ray sends the class along instead of importing this file."""

    class Worker:
        def __init__(self, rank: int, size: int, address: str) -> None:
            self.rank, self.size, self.address = rank, size, address

        def who(self, greeting: str) -> tuple[str, int, int]:
            return greeting, self.rank, self.size

        def meeting_place(self) -> str:
            return self.address

        def pid(self) -> int:
            return os.getpid()

        def fail_at(self, rank: int) -> None:
            if self.rank == rank:
                raise NonFiniteError("loss is `nan`", hint="look")
            time.sleep(60)  # as a rank that waits for the others in a collective

        def die_at(self, rank: int) -> None:
            if self.rank == rank:
                os.kill(os.getpid(), 9)
            time.sleep(60)

        def hang_at(self, rank: int) -> None:
            if self.rank == rank:
                time.sleep(60)

    return Worker


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    made = RayCluster(2, None)
    yield made
    made.close()


@pytest.fixture
def group() -> Group:
    return Group("actor", 2, worker(), threads=1, start_deadline_s=60.0, call_deadline_s=60.0)


@pytest.fixture
def processes(cluster: RayCluster, group: Group) -> Iterator[RayProcesses]:
    made = RayProcesses(group, cluster)
    yield made
    made.close()


def test_all_are_asked_and_answer_in_the_order_of_their_ranks(processes):
    assert processes.call("who", "hello") == [("hello", 0, 2), ("hello", 1, 2)]
    assert processes.ask([1], "who", "you") == [("you", 1, 2)]
    places = processes.call("meeting_place")
    assert len(set(places)) == 1
    assert places[0].split(":")[0] == "127.0.0.1"
    pids = processes.call("pid")
    assert len({*pids, os.getpid()}) == 3


def test_an_error_is_raised_as_it_was_and_the_others_do_not_wait_for_ever(processes):
    pids = processes.call("pid")
    started = time.monotonic()
    with pytest.raises(NonFiniteError) as caught:
        processes.call("fail_at", 1)
    assert (caught.value.message, caught.value.hint) == ("loss is `nan`", "look")
    assert time.monotonic() - started < 30
    assert_gone(pids)


def test_a_death_names_the_process(processes):
    pids = processes.call("pid")
    with pytest.raises(ProcessLostError, match="process 0 of the actor's 2 died during `die_at`"):
        processes.call("die_at", 0)
    assert_gone(pids)


def test_a_hang_says_who_is_waiting_where(cluster, group):
    processes = RayProcesses(replace(group, call_deadline_s=4.0), cluster)
    pids = processes.call("pid")
    with pytest.raises(HangError, match=r"waiting for 1 of 2 processes:\n  rank 1: .*hang_at") as caught:
        processes.call("hang_at", 1)
    assert "rank 0" not in caught.value.message
    assert_gone(pids)


def test_a_running_ray_that_is_too_small_is_explained(cluster, processes):
    import ray

    processes.call("pid")
    address = ray.get_runtime_context().gcs_address
    greedy = RayCluster(5, address)
    with pytest.raises(EnvironmentProblemError, match=r"needs 5 processes .* has 2 CPU slots on 1 nodes"):
        greedy.require_room(address)


def assert_gone(pids: list[int]) -> None:
    """Ray ends them within moments."""
    until = time.monotonic() + 10
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < until, "a process of the group is still there"
        time.sleep(0.1)
