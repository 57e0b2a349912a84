"""The Ray cluster in which processes start: an existing cluster, or a private cluster for this run, on this machine
or on the nodes of the run's job."""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ppoctl.core.errors import EnvironmentProblemError, ProcessLostError, quoted
from ppoctl.engines.ray import shared_memory
from ppoctl.engines.ray.answering import CONNECT_DEADLINE_S, require_answer
from ppoctl.engines.ray.placement import DevicePlacement
from ppoctl.engines.ray.private_folder import PARENT, PrivateFolder, sweep, write_token
from ppoctl.engines.ray.srun import JobNodes, NodeSteps

LOOPBACK = "127.0.0.1"

JOIN_EVERY_S = 0.1
"""Interval in seconds between checks whether all nodes have joined."""
NOTICE_S = 5.0
"""Seconds to wait for the srun of a node to end after Ray reports that the node is dead."""


class RayCluster:
    """Devices of a Ray cluster, reserved when the first process is started."""

    def __init__(
        self,
        placement: DevicePlacement,
        where: "str | JobNodes | None",
        start_deadline_s: float,
        object_store_bytes: int,
    ) -> None:
        """`where`: address `host:port` of an existing Ray cluster, or the nodes of a job for a private cluster. None:
        a private cluster on this machine. `object_store_bytes` applies to each node of a private cluster."""
        self.placement = placement
        self.address = where if isinstance(where, str) else None
        self.job_nodes = where if isinstance(where, JobNodes) else None
        self.start_deadline_s = start_deadline_s
        self._object_store_bytes = object_store_bytes
        self.notify: Callable[[str], None] = _ignore
        """Callback that is called with messages about what the driver waits for."""
        self.notice_s = NOTICE_S
        self.logs: Path | None = None
        """Log folder of the attempt, visible to all nodes, with one file per process. None: the output of processes
        is discarded, and the nodes of a job exchange the token of Ray in the current folder."""
        self.folder: Path | None = None
        """Private folder (`private_folder`) of a private cluster on this machine. None for other clusters."""
        self._steps: NodeSteps | None = None
        self._lost: ProcessLostError | None = None
        """Error for the first node of the job that was lost. None: no node was lost."""
        self._names: dict[str, str] = {}
        """Slurm's name of each node of the job, by Ray's node id."""
        self._gpus: list[int] = []
        """Number of GPUs of each node in `_names`."""
        self._own = ExitStack()
        self._connected = False
        self._group: PlacementGroup | None = None
        self._order: list[int] = []
        """Bundle indices sorted by node, so that neighbouring ranks are on the same node if possible."""
        self._nodes: list[str] = []
        """Node of each bundle in `_order`."""
        self._sent: tuple[object, Any] | None = None
        """The newest object that is stored once for several calls, and Ray's reference to this object."""

    @property
    def host(self) -> str | None:
        """Host at which processes of a private cluster on this machine meet, also without a network. None: each node
        uses its own address."""
        return LOOPBACK if self.address is None and self.job_nodes is None else None

    def shared_folder(self) -> Path:
        """Return a folder that all nodes can see. Often only the working directory of the command is shared."""
        return Path.cwd() if self.folder is None else self.folder

    def driver_host(self) -> str:
        """Return the host at which other nodes reach this process."""
        return self.host or str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Connect to the cluster and reserve the devices. Raises EnvironmentProblemError if the cluster does not
        exist or is too small."""
        if self._group is not None:
            return
        self.close()  # clean up after a start that failed halfway
        _silence()
        if self.job_nodes is not None:
            self._start_on_nodes(self.job_nodes)
        elif self.address is None:
            self._start_own()
        else:
            join(self.address)
        self._connected = True
        self.require_devices()
        bundles = self.placement.bundles(has_gpus=_has_gpus())
        group = placement_group(bundles, strategy="PACK", bundle_label_selector=self._pinned())
        try:
            ray.get(group.ready(), timeout=self.start_deadline_s)
        except GetTimeoutError as error:
            raise EnvironmentProblemError(
                f"{self.placement.describe()} were not free within "
                f"`cluster.start_deadline_s = {self.start_deadline_s:g}`",
                hint="look at `ray status`: another program may be using the cluster",
            ) from error
        nodes, known = placement_group_table(group)["bundles_to_node_id"], list(self._names)
        self._order = sorted(
            range(len(bundles)),
            key=lambda bundle: (known.index(nodes[bundle]) if known else nodes[bundle], bundle),
        )
        self._nodes = [str(nodes[bundle]) for bundle in self._order]
        self._group = group

    def options(self, role: str, rank: int) -> dict[str, Any]:
        """Return Ray's options for this process of the role: the node and the resources of the process."""
        assert self._group is not None, "the cluster has been started"
        bundle, share = self.placement.bundle_of(role, rank)
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._order[bundle])
        return {"num_cpus": 1, "num_gpus": share if _has_gpus() else 0, "scheduling_strategy": strategy}

    def neighbours(self, role: str, rank: int) -> int:
        """Return the number of processes of the role on this process's node, including itself."""
        return self.placement.neighbours(role, rank, self._nodes)

    def name_of(self, role: str, rank: int) -> str | None:
        """Return Slurm's name of the node of this process. None: there is no job, or it has a single node."""
        return self._names.get(self._nodes[self.placement.bundle_of(role, rank)[0]]) if self._nodes else None

    def has_gpus(self) -> bool:
        """Whether the connected cluster has GPUs."""
        return _has_gpus()

    def require_alive(self) -> None:
        """Raise ProcessLostError if this node's raylet, or a node of the job, has died. Required before every call:
        if the raylet is dead when an argument is stored, Ray ends the driver without an error."""
        self._require_nodes()
        node: Any = ray._private.worker.global_worker.node
        with socket.socket(socket.AF_UNIX) as raylet:
            if raylet.connect_ex(node.raylet_socket_name) != 0:
                raise ProcessLostError(
                    "Ray's raylet on this node died, which ended the processes of this run",
                    hint="everything finished is committed: `ppoctl resume RUN`; look for the kernel's "
                    "out-of-memory killer in `dmesg`",
                )

    def _require_nodes(self) -> None:
        if self._lost is None and self._steps is not None:
            silent = None if self._steps.dead() else self._silent_node()
            until = time.monotonic() + self.notice_s
            while silent and not self._steps.dead() and time.monotonic() < until:
                time.sleep(JOIN_EVERY_S)  # the node's srun may still report the reason
            dead = self._steps.dead()
            if dead is not None:
                self._lost = self._without(dead.name, dead.last_words())
            elif silent is not None:
                self._lost = self._without(silent, "it no longer answers")
        if self._lost is not None:
            raise self._lost

    def _silent_node(self) -> str | None:
        """Return a node of the job that Ray reports as dead. None: no such node, or the head does not answer."""
        worker: Any = ray._private.worker.global_worker
        ids = [ray.NodeID.from_hex(node) for node in self._names]
        with suppress(Exception):  # if the head does not answer, the head's srun reports the reason
            alive = worker.gcs_client.check_alive(ids, timeout=NOTICE_S)
            return next((name for name, lives in zip(self._names.values(), alive, strict=True) if not lives), None)
        return None

    def _without(self, node: str, why: str) -> ProcessLostError:
        """Return the error for a lost node, and show it immediately, since Slurm may end the job soon."""
        lost_processes = [
            f"{role} {rank}"
            for role, size in self.placement.sizes.items()
            for rank in range(size)
            if self.name_of(role, rank) == node
        ]
        assert self._steps is not None
        self._steps.lost = node
        message = f"node `{node}` is lost ({why}), and with it {', '.join(lost_processes) or 'no process yet'}"
        self.notify(message)
        return ProcessLostError(
            message,
            hint="everything finished is committed: `ppoctl resume RUN`; see `sinfo -R` for the node",
        )

    def sent_once(self, argument: object) -> object:
        """Return the argument or, if its class sets `is_sent_once`, a reference into the object store, which is
        reused until another such object is sent."""
        if not getattr(type(argument), "is_sent_once", False):
            return argument
        if self._sent is None or self._sent[0] is not argument:
            self._sent = argument, ray.put(argument)
        return self._sent[1]

    def close(self) -> None:
        """Disconnect from Ray. A private cluster ends with all its processes."""
        self._group = self._sent = None
        if self._connected:
            self._connected = False
            with suppress(Exception):  # a dead cluster may be the reason for closing
                ray.shutdown()
        self._own.close()
        self.folder = self._steps = self._lost = None
        self._names = {}

    def require_devices(self) -> None:
        """Raise EnvironmentProblemError if the connected cluster has too few devices for the processes, or too few
        CPU slots. Each process takes one slot."""
        if _has_gpus():
            self._require("GPU", self.placement.devices, "GPUs", "GPUs")
        self._require("CPU", self.placement.processes, "processes", "CPU slots")

    def _require(self, resource: str, needed: int, unit: str, slots: str) -> None:
        found = [int(node["Resources"].get(resource, 0)) for node in _alive()]
        if sum(found) < needed:
            where, more = "this machine", "use a Ray cluster of several nodes (`cluster.ray_address`)"
            if self.address is not None:
                where, more = f"the Ray cluster at `{self.address}`", "start more nodes"
            if self.job_nodes is not None:
                where, more = f"job {self.job_nodes.job}", "ask Slurm for more nodes (`slurm.nodes`)"
            layouts = ", ".join(f"`{role}.parallel`" for role in self.placement.sizes if role != "generator")
            raise EnvironmentProblemError(
                f"the recipe needs {needed} {unit} ({self.placement.describe()}), but {where} has {sum(found)} "
                f"{slots} on {len(found)} nodes (the largest has {max(found, default=0)})",
                hint=f"{more}, or lower {layouts} and `generator.engines`",
            )

    def _start_own(self) -> None:
        sweep()
        try:
            private = PrivateFolder()
        except OSError as error:
            raise EnvironmentProblemError(
                f"Ray needs a private folder in `{PARENT}`: {error.strerror}", hint=f"df -h {PARENT}"
            ) from error
        self._own.callback(private.remove)
        self.folder = private.path
        write_token(private.token)
        self._own.enter_context(_token_in(private.token))
        os.environ[shared_memory.FOLDER] = str(private.path)
        self._own.callback(os.environ.pop, shared_memory.FOLDER, None)
        _set_up_workers()
        try:
            with _loopback_only(), _keeping_signal_handler():
                ray.init(
                    address="local",
                    num_cpus=self.placement.processes,  # one slot per process: processes set their numbers of threads
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=self._object_store_bytes,
                    _temp_dir=str(private.of_ray),
                    _node_ip_address=LOOPBACK,
                )
        except Exception as error:
            raise EnvironmentProblemError(f"Ray could not be started on this machine: {error}") from error

    def _start_on_nodes(self, nodes: JobNodes) -> None:
        until = time.monotonic() + self.start_deadline_s
        logs = self.logs or Path.cwd()
        token = logs / f"ray-token-{nodes.job}"
        token.unlink(missing_ok=True)  # of a killed driver; `write_token` writes only a new file
        write_token(token)
        self._own.callback(token.unlink, missing_ok=True)
        self._own.enter_context(_token_in(token))
        _set_up_workers()
        steps = NodeSteps(nodes, logs)
        self._own.callback(steps.end, self.notify)
        address = steps.start(self.placement.processes, self._object_store_bytes, until, self.notify)
        host = address.rpartition(":")[0]
        try:
            with _loopback_only() if host == LOOPBACK else nullcontext(), _keeping_signal_handler():
                ray.init(address=address, _node_ip_address=host, log_to_driver=False, logging_level=logging.ERROR)
            self._connected = True  # now: `close` must disconnect even if a node does not join
            while len(found := _alive()) < len(nodes.addresses) and time.monotonic() < until and steps.dead() is None:
                time.sleep(JOIN_EVERY_S)
        except Exception as error:
            raise EnvironmentProblemError(f"Ray on node `{nodes.here}` does not answer: {error}") from error
        by_name = {node["NodeName"]: node for node in found}
        self._steps = steps
        self._names = {str(by_name[name]["NodeID"]): name for name in nodes.addresses if name in by_name}
        self._gpus = [int(by_name[name]["Resources"].get("GPU", 0)) for name in self._names.values()]
        self._require_nodes()
        missing = [name for name in nodes.addresses if name not in by_name]
        if missing:
            raise self._without(missing[0], "it did not join Ray within `cluster.start_deadline_s`")

    def _pinned(self) -> list[dict[str, str]] | None:
        """Return the node of each bundle. None: Ray chooses the nodes."""
        if not self._names:
            return None
        ids = list(self._names)
        return [{"ray.io/node-id": ids[node]} for node in self.placement.nodes_of_bundles(self._gpus)]


def join(address: str, answer_s: float = CONNECT_DEADLINE_S) -> None:
    """Connect this process to an existing Ray cluster. Raises EnvironmentProblemError if no cluster answers: within
    `answer_s` to the connection, and again in Ray's protocol."""
    _silence()
    _show_token()
    try:
        require_answer(address, answer_s)
        with _keeping_signal_handler():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise EnvironmentProblemError(
            f"no Ray cluster answers at `cluster.ray_address = {address}`: {error}",
            hint=f"see `ray status --address {quoted(address)}`; a cluster that requires a token accepts clients "
            "with the same `RAY_AUTH_TOKEN` or ~/.ray/auth_token",
        ) from error


def _silence() -> None:
    # Ray prints events of its processes, in colour, into our output. We raise errors for these events instead.
    ray._private.worker.print_to_stdstream = _ignore
    # Ray also prints errors that no caller has read, because another error has already ended the call.
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"


def _show_token() -> None:
    """Make Ray send this machine's token. If a token exists, a cluster from `ray start` requires it, but a driver
    does not send it by default. A cluster that requires no token accepts connections with a token too."""
    from ray._private.authentication.authentication_token_setup import _enable_token_auth

    raylet: Any = ray._raylet
    tokens = raylet.AuthenticationTokenLoader.instance()
    if "RAY_AUTH_MODE" not in os.environ and tokens.has_token(ignore_auth_mode=True):
        _enable_token_auth()


def _set_up_workers() -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # By default Ray runs its workers with niceness 15. Our workers are the main load, not a background task.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray reads this spelling


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _ignore(*_: Any, **__: Any) -> None:
    """Do nothing, in place of Ray's function that prints messages, and of `notify` until a callback is set."""


def _has_gpus() -> bool:
    return bool(ray.cluster_resources().get("GPU"))  # type: ignore[no-untyped-call]


@contextmanager
def _keeping_signal_handler() -> Iterator[None]:
    """Context in which Ray installs no SIGTERM handler. Ray's handler would end the process with code 15. Our handler
    finishes the stage."""
    utils: Any = ray._private.utils
    before, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda _: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = before


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Context in which Ray keeps the loopback address. Ray would otherwise replace it by a routable address and
    listen on every interface, except on systems for which it does not support clusters of several nodes."""
    constants: Any = ray._private.ray_constants
    before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _token_in(file: Path) -> Iterator[None]:
    """Context in which Ray's ports require the token in this file, regardless of the environment."""
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(file))
    _reload_token()
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
        _reload_token()


def _reload_token() -> None:
    raylet: Any = ray._raylet
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    raylet.Config.initialize("")  # the configuration contains the authentication mode
