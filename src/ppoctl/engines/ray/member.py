"""What runs in a process of a group."""

import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from ppoctl.engines.ray.tensors import FlatTensors

Make = Callable[[int, int, str], Any]
"""(rank, number of ranks, `host:port` where rank 0 waits) -> what answers in that process; it returns when all ranks
have come. A process alone has no address."""


@dataclass(frozen=True)
class Shared:
    """An argument that lies in the object store: read in place by every process that is given it."""

    reference: Any


class Member:
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
        return getattr(self._target, method)(*(_received(argument) for argument in arguments))


def _received(argument: Any) -> Any:
    if not isinstance(argument, Shared):
        return argument
    value = ray.get(argument.reference)
    return value.tensors() if isinstance(value, FlatTensors) else value
