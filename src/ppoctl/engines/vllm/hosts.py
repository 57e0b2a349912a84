"""Where engines live: this process, or others that an executor runs. The fleet asks both the same way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ppoctl.clock import WORK
from ppoctl.engines.turns import NoTurns, Turns
from ppoctl.engines.vllm.engine import Engine
from ppoctl.engines.vllm.environment import join_tensor_ranks
from ppoctl.engines.vllm.settings import VllmSettings
from ppoctl.ports import Promise

ROLE = "generator"
"""What engines are called where roles share devices."""


@runtime_checkable
class Host(Protocol):
    """The processes of one engine: one per tensor rank."""

    def begin(self, method: str, *arguments: Any) -> Promise:
        """Ask, without waiting for the answer. Starts the engine where it is not; it is gone where the answer is an
        error."""
        ...

    def close(self) -> None:
        """End the engine."""
        ...


@dataclass(frozen=True)
class Broadcasts:
    """How processes of the trainer reach those of engines."""

    host: Callable[[], str]
    """Where they find this process, in which they meet."""
    timeout_s: float


@dataclass(frozen=True)
class Hosts:
    """All engines of the generator."""

    engines: Sequence[Host]
    first_done: Callable[[Sequence[Any]], Sequence[Promise]]
    """Waits until at least one of these promises is kept or broken."""
    broadcasts: Broadcasts | None = None
    """Absent: engines are handed weights bucket by bucket."""
    turns: Turns = field(default_factory=NoTurns)
    """Taken with the roles whose devices these engines share."""
    exports: Path | None = None
    """An existing folder that all of them see; absent: they are on this machine, and any will do."""


class ThisProcess:
    """An engine here: what is asked is done at once."""

    def __init__(self, settings: VllmSettings) -> None:
        self.settings = settings
        self.engine: Engine | None = None

    def begin(self, method: str, *arguments: Any) -> Promise:
        if self.engine is None:
            with WORK.stopped():
                self.engine = Engine(self.settings)
        return _Kept(getattr(self.engine, method)(*arguments))

    def close(self) -> None:
        if self.engine is not None:
            engine, self.engine = self.engine, None
            engine.close()


@dataclass(frozen=True)
class _Kept:
    answer: Any

    def answers(self) -> list[Any]:
        return [self.answer]


def this_process(settings: VllmSettings, turns: Turns | None = None) -> Hosts:
    """One engine, in this process."""
    return Hosts([ThisProcess(settings)], first_done=list, turns=turns or NoTurns())


@dataclass(frozen=True)
class OpenEngine:
    """Makes an engine, or one tensor rank of it, in the process it is called in."""

    settings: VllmSettings

    def __call__(self, rank: int, world_size: int, address: str) -> Engine:
        if world_size > 1:
            join_tensor_ranks(rank, world_size, address)
        return Engine(self.settings)
