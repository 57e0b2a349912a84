"""What processes make engines with: those of an executor (`OpenEngine`), and the one beside a driver without Ray
(`open_alone`)."""

from dataclasses import dataclass

from ppoctl.engines.vllm.engine import Engine
from ppoctl.engines.vllm.environment import join_tensor_ranks
from ppoctl.engines.vllm.log import keep_log, write_log, write_logs_alone
from ppoctl.engines.vllm.settings import VllmSettings


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
        return Engine(self.settings, folder=self.folder)


def open_alone(settings: VllmSettings, folder: str | None) -> Engine:
    """The only engine of a job. Where the settings do not say where its log goes, that is kept until
    `Engine.write_log_into` does."""
    if settings.logs is None:
        keep_log()
    else:
        write_logs_alone(settings)
    return Engine(settings, folder=folder)
