"""Engines that only keep the weights that they receive, each in a separate process: engine handles in real process
groups."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from ppoctl.core.errors import ProcessLostError
from ppoctl.engines.weights.bucket import Bucket, NamedTensors
from ppoctl.engines.weights.canary import CanaryScores
from ppoctl.engines.weights.receiving import ReceivingEngine
from ppoctl.models.convert.checksum import LoadedWeight, checksum_of

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Defect:
    """A defect of one engine, for one transfer."""

    bucket: int
    """Bucket at which it acts; 0: before it has joined."""
    act: Callable[[NamedTensors], None]


def dies(tensors: NamedTensors) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def flips_a_bit(tensors: NamedTensors) -> None:
    tensors[-1][1].view(-1).view(torch.int32)[3] ^= 1


class Receiver(ReceivingEngine):
    """The object that answers in such a process."""

    def __init__(self, defect: Defect | None) -> None:
        self.defect = defect
        self.held: dict[str, Tensor] = {}
        self.buckets = 0
        self.received: list[str] = []
        """Names of the tensors of the last transfer."""

    def takes_weights(self) -> bool:
        return True

    def holds_weights(self) -> bool:
        return bool(self.held)

    def begin_weights(self) -> None:
        self.buckets, self.received = 0, []

    def receive_weights(self, *arguments: Any) -> None:
        self._plant([])
        super().receive_weights(*arguments)

    def take_weights(self, bucket: Bucket) -> None:
        if self.buckets == 0:
            self._plant([])
        super().take_weights(bucket)

    def load(self, tensors: NamedTensors) -> None:
        self.buckets += 1
        self._plant(tensors)
        self.received += dict(tensors)
        self.held |= {name: tensor.clone() for name, tensor in tensors}

    def end_weights(self) -> list[LoadedWeight]:
        return [LoadedWeight(name, checksum_of(tensor), None) for name, tensor in self.held.items()]

    def restart(self, folder: str) -> list[LoadedWeight]:
        raise NotImplementedError

    def tensor_rank(self) -> int:
        return 0

    def vocab_size(self) -> int:
        return 100

    def score(self, tokens: Sequence[int], draws: int) -> CanaryScores:
        return CanaryScores((0.0,) * (len(tokens) - 1), (0,) * draws, (0.0,) * draws)

    def tensors(self) -> dict[str, Any]:
        return {name: tensor.numpy() for name, tensor in self.held.items()}

    def last_received(self) -> list[str]:
        return self.received

    def _plant(self, tensors: NamedTensors) -> None:
        if self.defect is not None and self.defect.bucket == self.buckets:
            self.defect.act(tensors)


@dataclass
class ReceiverHost:
    """Starts the process on request, with the planted defect the first time."""

    name: str
    defect: Defect | None = None
    starts: int = 0
    pipe: Connection | None = field(default=None, repr=False)
    process: Any = field(default=None, repr=False)

    def begin(self, method: str, *arguments: Any) -> "Awaited":
        if self.pipe is None:
            context = multiprocessing.get_context("forkserver")
            self.pipe, theirs = context.Pipe()
            defect, self.defect = self.defect, None
            self.process = context.Process(target=_serve, args=(theirs, defect), daemon=True)
            self.process.start()
            theirs.close()
            self.starts += 1
        self.pipe.send((method, arguments))
        return Awaited([self.pipe], [self.name], self.close)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe = self.process = None


def _serve(pipe: Connection, defect: Defect | None) -> None:
    torch.set_num_threads(1)
    receiver = Receiver(defect)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(receiver, method)(*arguments)))
        except Exception as error:  # noqa: BLE001 - the caller raises it
            pipe.send((False, error))


class Awaited:
    """A `Reply`: one answer from each of these pipes. A death takes precedence over other errors."""

    def __init__(self, pipes: Sequence[Connection], names: Sequence[str], lose: Callable[[], None]) -> None:
        self.pipes, self.names, self.lose = list(pipes), names, lose
        self.replies: list[Any] | None = None

    def is_ready(self) -> bool:
        """Return whether all have answered, or one has died."""
        return self.replies is not None or all(pipe.poll() for pipe in self.pipes)

    def answers(self) -> list[Any]:
        if self.replies is None:
            self.replies = list(self._receive_all())
        errors = [answer for went_well, answer in self.replies if not went_well]
        if errors:
            self.lose()
            raise next((error for error in errors if isinstance(error, ProcessLostError)), errors[0])
        return [answer for _, answer in self.replies]

    def _receive_all(self) -> Iterator[tuple[bool, Any]]:
        for pipe, name in zip(self.pipes, self.names, strict=True):
            try:
                yield pipe.recv() if pipe.poll(TIMEOUT_S) else (False, TimeoutError(name))
            except (EOFError, OSError):
                yield False, ProcessLostError(f"{name} died")


def first_done(promises: Sequence[Awaited]) -> list[Awaited]:
    """Return the first completed replies, as `engines.ray.groups_of_processes.first_done` does."""
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        done = [promise for promise in promises if promise.is_ready()]
        if done:
            return done
        connection.wait([pipe for promise in promises for pipe in promise.pipes if not pipe.poll()], timeout=1.0)
    raise TimeoutError
