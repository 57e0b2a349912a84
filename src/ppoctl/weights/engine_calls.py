"""Asynchronous calls from the driver to trainer ranks and engines: start a call, continue, collect the result later.

Independent of vLLM, Megatron and Ray: a process is anything that executes a method by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ppoctl.errors import ProcessLostError, SenderLostError


@runtime_checkable
class Reply(Protocol):
    """Pending results of a call to one or several processes."""

    def answers(self) -> list[Any]:
        """Wait for the result of each called process; returns them in the order of the processes. If several calls
        fail, raises the error that explains the others."""
        ...


@dataclass(frozen=True)
class CompletedReply:
    """Results that already exist."""

    found: list[Any]

    def answers(self) -> list[Any]:
        return self.found


@runtime_checkable
class EngineHandle(Protocol):
    """Processes of one engine, one per tensor rank."""

    def begin(self, method: str, *arguments: Any) -> Reply:
        """Call a method of each process without waiting for the results. Starts the engine if it is not running. If a
        call raises, the engine has ended."""
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
    """An engine died. Engines can be restarted, unlike processes of the trainer."""


def call_engines(engines: Sequence[EngineHandle], method: str, *arguments: Any) -> list[Any]:
    """Call a method of each engine. Returns one result per engine, since all its tensor ranks return the same."""
    return wait([engine.begin(method, *arguments) for engine in engines])


def wait(replies: Sequence[Reply]) -> list[Any]:
    """Return one result per engine. Raises EngineLostError, which names each engine that died, after all replies have
    arrived, or SenderLostError if an engine could not read the weights."""
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
