"""Asynchronous calls from the driver to trainer ranks and engines. The driver starts a call, continues, and collects
the result later.

This module is independent of vLLM, Megatron and Ray: a process is any object that executes a method by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ppoctl.core.errors import ProcessLostError, SenderLostError


@runtime_checkable
class Reply(Protocol):
    """Pending results of a call to one or several processes."""

    def answers(self) -> list[Any]:
        """Wait for the results of all called processes, and return them in the order of the processes. If several
        calls fail, raises the error that explains the other errors."""
        ...


@dataclass(frozen=True)
class CompletedReply:
    """A reply with results that already exist."""

    found: list[Any]

    def answers(self) -> list[Any]:
        return self.found


@runtime_checkable
class EngineHandle(Protocol):
    """Processes of one engine, one per tensor rank."""

    def begin(self, method: str, *arguments: Any) -> Reply:
        """Call a method of each process without waiting for the results. Starts the engine if the engine is not
        running. If a call raises an error, the engine has ended."""
        ...

    def close(self) -> None:
        """End the engine."""
        ...


@runtime_checkable
class Executor(Protocol):
    """Processes of a trained role, one per rank."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all ranks and return their results in rank order."""
        ...

    def call_ranks(self, ranks: Sequence[int], method: str, *arguments: Any) -> list[Any]:
        """Call a method of these ranks and return their results in order."""
        ...

    def begin(self, method: str, *arguments: Any, ranks: Sequence[int]) -> Reply:
        """Call a method of these ranks without waiting for the results."""
        ...

    def nodes(self) -> Sequence[str]:
        """Return the node of each rank, once every rank has completed a call."""
        ...


class EngineLostError(ProcessLostError):
    """The error if an engine died. Engines can be restarted, unlike processes of the trainer."""


def call_engines(engines: Sequence[EngineHandle], method: str, *arguments: Any) -> list[Any]:
    """Call a method of each engine. Returns one result per engine, since all tensor ranks of an engine return the
    same result."""
    return wait([engine.begin(method, *arguments) for engine in engines])


def wait(replies: Sequence[Reply]) -> list[Any]:
    """Wait for all replies, and return one result per engine. If engines died, raises EngineLostError, which names
    them, after all replies have arrived. Raises SenderLostError if an engine could not read the weights."""
    answers, lost = [], []
    for reply in replies:
        try:
            answers.append(reply.answers()[0])
        except SenderLostError:
            raise
        except ProcessLostError as error:
            lost.append(error)
    if lost:
        raise EngineLostError("; ".join(error.message for error in lost), hint=lost[0].hint) from lost[0]
    return answers
