"""Where engines live: this process (`this_process`), or others in which an executor makes them (`OpenEngine`)."""

from dataclasses import dataclass
from typing import Any

from ppoctl.doing import preparing
from ppoctl.engines.turns import Turns
from ppoctl.engines.vllm.engine import Engine
from ppoctl.engines.vllm.environment import join_tensor_ranks
from ppoctl.engines.vllm.log import close_log, write_log
from ppoctl.engines.vllm.settings import VllmSettings
from ppoctl.weights.calls import Reply
from ppoctl.weights.sync import EngineSide


class ThisProcess:
    """Handle of an engine in this process: a call is answered before it returns."""

    def __init__(self, settings: VllmSettings) -> None:
        self.settings = settings
        self.engine: Engine | None = None

    def begin(self, method: str, *arguments: Any) -> Reply:
        if self.engine is None:
            write_log(self.settings, "engine-0")
            with preparing("starting vLLM"):
                self.engine = Engine(self.settings)
        return _Answered(getattr(self.engine, method)(*arguments))

    def close(self) -> None:
        if self.engine is not None:
            engine, self.engine = self.engine, None
            engine.close()
            close_log()


@dataclass(frozen=True)
class _Answered:
    answer: Any

    def answers(self) -> list[Any]:
        return [self.answer]


def this_process(settings: VllmSettings, turns: Turns | None = None) -> EngineSide:
    """One engine, in this process."""
    return EngineSide([ThisProcess(settings)], first_done=list, turns=turns or Turns())


@dataclass
class OpenEngine:
    """Makes an engine, or one tensor rank of it, in the process it is called in."""

    settings: VllmSettings
    number: int = 0
    """Number of the engine."""
    folder: str | None = None
    """Folder on whose weights the next process begins, if it is still there; absent: on the model's own."""

    def __call__(self, rank: int, world_size: int, address: str) -> Engine:
        write_log(self.settings, f"engine-{self.number}" + (f"-rank-{rank}" if rank > 0 else ""))
        if world_size > 1:
            join_tensor_ranks(rank, world_size, address)
        return Engine(self.settings, is_alone=True, folder=self.folder)
