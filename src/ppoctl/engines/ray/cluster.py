"""A Ray to start processes in: one of this run's own, on this machine, or one that is running already."""

import logging
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import ray

from ppoctl.errors import EnvironmentProblemError

OBJECT_STORE_BYTES = 256 * 2**20
"""Shared memory of a local Ray: rollouts and two buckets of weights pass through it; what is more goes to disk."""

PREFIX = "ppoctl-ray-"
"""Of the folders of local Rays; the process that made one follows."""


class RayCluster:
    """Started when the first process is asked for."""

    def __init__(self, processes: int, address: str | None) -> None:
        self.processes = processes
        self.address = address
        self._folder: Path | None = None
        self._is_connected = False

    @property
    def host(self) -> str | None:
        """Where processes meet in a Ray of our own, which works without a network; None: each node knows."""
        return "127.0.0.1" if self.address is None else None

    def start(self) -> None:
        """Connect. Raises EnvironmentProblemError when there is no such Ray, or it is too small."""
        if self._is_connected:
            return
        # Ray installs a SIGTERM handler of its own; ours finishes the stage.
        handler = signal.getsignal(signal.SIGTERM)
        try:
            self._start_own() if self.address is None else self._join(self.address)
        finally:
            signal.signal(signal.SIGTERM, handler)
        self._is_connected = True

    def close(self) -> None:
        """Leave; a Ray of our own ends with all its processes."""
        if self._is_connected:
            self._is_connected = False
            with suppress(Exception):  # it may have died, which is why we leave
                ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start_own(self) -> None:
        # Who may connect is left to Ray, which asks for a token of its own in a cluster started here.
        # Sockets lie in it, and their paths must be short.
        _sweep()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir="/tmp"))
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        try:
            ray.init(
                address="local",
                num_cpus=self.processes,  # what is counted is processes; threads are set in each
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(self._folder),
                _node_ip_address="127.0.0.1",
            )
        except Exception as error:
            raise EnvironmentProblemError(f"Ray could not be started on this machine: {error}") from error

    def _join(self, address: str) -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            raise EnvironmentProblemError(
                f"no Ray answers at `cluster.ray_address = {address}`: {error}", hint="ray status"
            ) from error
        self.require_room(address)

    def require_room(self, address: str) -> None:
        """Raise EnvironmentProblemError when the Ray we are connected to has too few slots for the processes."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        cores = [int(node.get("CPU", 0)) for node in nodes]
        if sum(cores) < self.processes:
            raise EnvironmentProblemError(
                f"the recipe needs {self.processes} processes beside this one, and the Ray at `{address}` has "
                f"{sum(cores)} CPU slots on {len(nodes)} nodes (the largest has {max(cores, default=0)})",
                hint="start more nodes, or lower `actor.parallel` and `critic.parallel`",
            )


def _sweep() -> None:
    """Remove what a driver that was killed left behind; its Ray ended with it."""
    for folder in Path("/tmp").glob(f"{PREFIX}*"):
        pid = folder.name.removeprefix(PREFIX).split("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
