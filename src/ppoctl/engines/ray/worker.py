"""The part of a process group that runs in each of its processes."""

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

from ppoctl.activity import ACTIVITIES, Activity
from ppoctl.engines.child.output import write_into
from ppoctl.engines.ray import shared_memory
from ppoctl.errors import EnvironmentProblemError, SenderLostError
from ppoctl.weights.bucket import Bucket, BucketLocation, FlatTensors

MakeTarget = Callable[[int, int, str], Any]
"""Factory of the object that answers in a process, given rank, number of ranks, and the `host:port` where rank 0
waits; it returns when all ranks have come. A process alone has no address."""


@dataclass(frozen=True)
class InStore:
    """Content of a bucket in Ray's object store: every process that is given it reads it in place. It is gone with
    the process that put it there."""

    reference: Any
    """Ray's reference to `FlatTensors`."""

    @property
    def lasts(self) -> bool:
        return True  # for as long as the driver has the reference

    def is_near(self) -> bool:
        """Whether this process can read the content: always, as nodes fetch from each other's stores."""
        return True

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Tensors of the content, as views of shared memory. Raises SenderLostError."""
        try:
            flat: FlatTensors = ray.get(self.reference)
        except RayError as error:
            raise SenderLostError(
                f"weights were lost because the process that sent them has ended: {error}"
            ) from error
        return flat.tensors()


@dataclass(frozen=True)
class Started:
    """First answer of a process, once the object that answers in it is made."""

    node: str
    """Ray's name of the node it is on."""
    segments: list[str]
    """Names of the shared memory it made, which must be removed if it is killed."""


class Worker:
    """Ray actor of one process. Work runs in a concurrency group of its own, so that a call can be looked at
    (`stack`, `act`) while it lasts or hangs."""

    def __init__(self, threads: int, folder: str, log: Path | None) -> None:
        self._threads = threads
        self._folder = folder
        self._log = log
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

    def act(self) -> Activity | None:
        """What this process says it is doing."""
        return ACTIVITIES.now()

    def free_address(self, host: str | None) -> str:
        """Address `host:port` that is free on this process's node; `host` where it is known."""
        host = host or ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.socket() as listener:
            listener.bind((host, 0))
            return f"{host}:{listener.getsockname()[1]}"

    def make(self, make: MakeTarget, rank: int, size: int, address: str) -> Started:
        """Make the object that answers in this process."""
        _work_in(self._folder)
        if self._log is not None:
            write_into(self._log)
        torch.set_num_threads(self._threads)
        before = set(shared_memory.mapped())
        self._target = make(rank, size, address)
        node = str(ray.get_runtime_context().get_node_id())
        made = [name for name in shared_memory.mapped() if name not in before]
        shared_memory.note(os.environ.get(shared_memory.FOLDER), made)
        return Started(node, made)

    def end(self) -> None:
        """Make that object free what it holds outside this process."""
        if hasattr(self._target, "close"):
            self._target.close()

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Answer of a method. The bytes of a bucket stay on this node: the driver passes on where they are, and only
        who loads them reads them."""
        answer = getattr(self._target, method)(*map(_received, arguments))
        if isinstance(answer, Bucket):
            return replace(answer, contents=tuple(map(_stored, answer.contents)))
        return answer


def _received(argument: Any) -> Any:
    """The argument itself, where a reference to it was sent."""
    return ray.get(argument) if isinstance(argument, ray.ObjectRef) else argument


def _stored(content: BucketLocation) -> BucketLocation:
    """The content as other processes find it: host memory of this process goes into the store."""
    return InStore(ray.put(content)) if isinstance(content, FlatTensors) else content


def _work_in(folder: str) -> None:
    """Go to the folder where the command was typed, which recipes and run directories are relative to: a running
    Ray's processes begin in a folder of its own. Raises EnvironmentProblemError."""
    try:
        os.chdir(folder)
    except OSError as error:
        node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        raise EnvironmentProblemError(
            f"the folder of this command, `{folder}`, is not on node {node}: {error.strerror}",
            hint="start it in a folder that all nodes of `cluster.ray_address` share",
        ) from error
