"""How the driver calls the processes at both ends: ask, go on, and hear the answer later.

The room knows neither vLLM, Megatron nor Ray: processes are whoever answers a method by its name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ppoctl.errors import ProcessLostError, SenderLostError


@runtime_checkable
class Reply(Protocol):
    """The answers of processes to a call, on their way."""

    def answers(self) -> list[Any]:
        """Wait for the answer of each process that was called, in order. Raises the error that decides."""
        ...


@dataclass(frozen=True)
class CompletedReply:
    """Answers that are there already."""

    found: list[Any]

    def answers(self) -> list[Any]:
        return self.found


@runtime_checkable
class EngineHandle(Protocol):
    """The processes of one engine, one per tensor rank."""

    def begin(self, method: str, *arguments: Any) -> Reply:
        """Call a method of each, without waiting for the answers. Starts the engine where it is not; it is gone where
        the answer is an error."""
        ...

    def close(self) -> None:
        """End the engine."""
        ...


@runtime_checkable
class Executor(Protocol):
    """The processes of a trained role, one per rank."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all ranks; their answers, in order."""
        ...

    def call_ranks(self, ranks: Sequence[int], method: str, *arguments: Any) -> list[Any]:
        """Call a method of these ranks; their answers, in order."""
        ...

    def begin(self, method: str, *arguments: Any, ranks: Sequence[int]) -> Reply:
        """Call a method of these ranks, without waiting for the answers."""
        ...

    def nodes(self) -> Sequence[str]:
        """Node of each rank, once all of them have answered something."""
        ...


class EngineLostError(ProcessLostError):
    """An engine died, and not a process of the trainer, which could not be brought back."""


def call_engines(engines: Sequence[EngineHandle], method: str, *arguments: Any) -> list[Any]:
    """Call a method of each engine; one answer per engine, since its tensor ranks say the same."""
    return wait([engine.begin(method, *arguments) for engine in engines])


def wait(replies: Sequence[Reply]) -> list[Any]:
    """One answer per engine. Raises EngineLostError, once all have been heard, naming each that has died; or
    SenderLostError from an engine that could not read."""
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
