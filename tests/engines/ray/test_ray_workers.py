"""Workers as Ray starts them, in new interpreters. (Those of `test_ray_processes.py` are forked.)"""

import os
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from ppoctl.core.errors import ProcessLostError
from ppoctl.engines.ray.cluster import RayCluster
from ppoctl.engines.ray.groups_of_processes import GroupSettings, RayProcesses
from ppoctl.engines.ray.placement import DevicePlacement
from ppoctl.recipe.parallel import OBJECT_STORE_BYTES


def worker() -> Callable[[int, int, str], Any]:
    """Return a class defined locally, so that Ray sends it along instead of importing this file."""

    class Worker:
        def __init__(self, rank: int, size: int, address: str) -> None:
            self.rank = rank

        def who(self) -> tuple[int, int]:
            return self.rank, os.getpid()

        def die_at(self, rank: int) -> None:
            if self.rank == rank:
                os.kill(os.getpid(), 9)
            time.sleep(60)  # the other waits for the dead rank

    return Worker


@pytest.mark.slow
@pytest.mark.minutes(0.5)
def test_unforked_workers_behave_like_forked_workers() -> None:
    cluster = RayCluster(
        DevicePlacement({"actor": 2}, colocated=True),
        None,
        start_deadline_s=120.0,
        object_store_bytes=OBJECT_STORE_BYTES,
    )
    group = GroupSettings("actor", "actor", 2, worker(), threads=1, start_deadline_s=120.0, call_deadline_s=60.0)
    processes = RayProcesses(group, cluster)
    try:
        answers = processes.call("who")
        assert [rank for rank, _ in answers] == [0, 1]
        assert [psutil.Process(pid).parent().name() for _, pid in answers] == ["raylet"] * 2
        with pytest.raises(ProcessLostError, match="process 1 of the actor's 2 died during `die_at`"):
            processes.call("die_at", 1)
    finally:
        processes.close()
        cluster.close()
