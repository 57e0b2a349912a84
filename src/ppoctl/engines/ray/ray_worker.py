"""The Ray actor that runs in each process of a process group."""

import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from ppoctl.core.activity import ACTIVITIES, Activity
from ppoctl.core.errors import EnvironmentProblemError, SenderLostError
from ppoctl.engines.child.output import write_into
from ppoctl.engines.ray import shared_memory
from ppoctl.engines.weights.bucket import Bucket, BucketLocation, FlatTensors

MakeTarget = Callable[[int, int, str], Any]
"""Creates the object whose methods are called in a process, given its rank, the number of ranks, and the `host:port`
where rank 0 waits. It returns when all ranks have arrived. For a single process, the address is empty."""


@dataclass(frozen=True)
class InStore:
    """Tensors of a bucket in Ray's object store, which every process with the reference reads in place. They are lost
    when the process that stored them ends."""

    reference: Any
    """Ray's reference to `FlatTensors`."""

    @property
    def lasts(self) -> bool:
        return True  # as long as the driver holds the reference

    def is_near(self) -> bool:
        """Whether this process can read the tensors: always, as nodes fetch objects from each other's stores."""
        return True

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors as views of shared memory. Raises SenderLostError."""
        try:
            flat: FlatTensors = ray.get(self.reference)
        except RayError as error:
            raise SenderLostError(
                f"weights were lost because the process that sent them has ended: {error}"
            ) from error
        return flat.tensors()


@dataclass(frozen=True)
class Started:
    """Result of the startup of a process, after the object of the process was created."""

    node: str
    """Ray's id of the node of the process."""
    segments: list[str]
    """Names of the shared memory segments that the process created. They must be removed if the process is killed."""


_CALLED = ("prepare", "make", "call")
"""Methods of `Worker` that execute code of the process's object."""


class Worker:
    """Ray actor of one process. `call` runs in a separate concurrency group, so that `stack` and `act` can be called
    during a call, or while a call hangs."""

    def __init__(self, threads: int, folder: str, log: Path | None) -> None:
        self._threads = threads
        self._folder = folder
        self._log = log
        self._target: Any = None
        self._held: socket.socket | None = None

    def stack(self) -> str:
        """Return the innermost stack frames of the thread that executes a call."""
        for frame in sys._current_frames().values():
            stack = traceback.extract_stack(frame)
            start = next((index for index, line in enumerate(stack) if line.name in _CALLED), None)
            if start is not None:
                inner = [f"{Path(line.filename).name}:{line.lineno} {line.name}" for line in stack[start + 1 :]]
                return " < ".join(reversed(inner[-6:]))
        return "not executing a call"

    def act(self) -> Activity | None:
        """Return the current activity of this process."""
        return ACTIVITIES.now()

    def free_address(self, host: str | None) -> str:
        """Return a free address `host:port` on this process's node, at `host` if it is given."""
        host = host or ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        # Held until `make`, whose arguments take seconds to load: no other process gets the port meanwhile.
        self._held = socket.socket()
        self._held.bind((host, 0))
        return f"{host}:{self._held.getsockname()[1]}"

    def prepare(self, make: Any) -> None:
        """Let the factory import what `make` would import."""
        self._set_up()
        make.prepare()

    def make(self, make: MakeTarget, rank: int, size: int, address: str) -> Started:
        """Create the object whose methods are called in this process."""
        self._set_up()
        before = set(shared_memory.mapped())
        if self._held is not None:
            self._held.close()
        self._target = make(rank, size, address)
        node = str(ray.get_runtime_context().get_node_id())
        created = [name for name in shared_memory.mapped() if name not in before]
        shared_memory.note(os.environ.get(shared_memory.FOLDER), created)
        return Started(node, created)

    def _set_up(self) -> None:
        _work_in(self._folder)
        if self._log is not None:
            write_into(self._log)
        # Ray sets OMP_NUM_THREADS to the number of the actor's CPUs, which is 1.
        torch.set_num_threads(self._threads)

    def end(self) -> None:
        """Make the object free the resources that it holds outside this process."""
        if hasattr(self._target, "close"):
            self._target.close()

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of the object. The bytes of a bucket stay on this node: the driver forwards only the location
        of the bytes, and only the process that loads the bucket reads them."""
        answer = getattr(self._target, method)(*map(_received, arguments))
        if isinstance(answer, Bucket):
            return replace(answer, contents=tuple(map(_stored, answer.contents)))
        return answer


def _received(argument: Any) -> Any:
    """Return the argument. If it is a reference, return the object that it refers to."""
    # Ray resolves references only at the top level of a call's arguments, and these are in a tuple.
    return ray.get(argument) if isinstance(argument, ray.ObjectRef) else argument


def _stored(content: BucketLocation) -> BucketLocation:
    """Return the content in a form that other processes can read: tensors in host memory of this process are put into
    Ray's object store."""
    return InStore(ray.put(content)) if isinstance(content, FlatTensors) else content


def _work_in(folder: str) -> None:
    """Change to the folder in which the command was started, since recipes and run directories are relative to it.
    The processes of an existing Ray cluster start in another folder. Raises EnvironmentProblemError."""
    try:
        os.chdir(folder)
    except OSError as error:
        node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        raise EnvironmentProblemError(
            f"the working directory of this command, `{folder}`, is not accessible on node {node}: {error.strerror}",
            hint="start the command in a folder that all nodes of `cluster.ray_address` share",
        ) from error
