"""Functions that create an engine: `OpenEngine` in the processes of an executor, `open_alone` and `PreparedEngine` in
the engine process of a driver without Ray."""

from dataclasses import dataclass
from typing import Any

from ppoctl.engines.vllm import vllm_start
from ppoctl.engines.vllm.engine import Engine
from ppoctl.engines.vllm.log import keep_log, write_log, write_logs_alone
from ppoctl.engines.vllm.vllm_environment import join_tensor_ranks
from ppoctl.engines.vllm.vllm_settings import VllmSettings


@dataclass
class OpenEngine:
    """Factory of an engine, or of one tensor rank of an engine, in the calling process."""

    settings: VllmSettings
    number: int = 0
    """Index of the engine."""
    folder: str | None = None
    """Folder with the weights that the next process loads, if the folder still exists. None: the model's own
    folder."""

    def prepare(self) -> None:
        """Import vLLM in this process, so that a later call only creates the engine. Several tensor ranks import
        nothing yet: `import_vllm` makes CUDA read its visible GPUs, and `join_tensor_ranks` must set them before."""
        if self.settings.table.tensor == 1:
            write_log(self.settings, f"engine-{self.number}")
            vllm_start.import_vllm(self.settings)

    def __call__(self, rank: int, world_size: int, address: str) -> Engine:
        write_log(self.settings, f"engine-{self.number}" + (f"-rank-{rank}" if rank > 0 else ""))
        if world_size > 1:
            join_tensor_ranks(rank, world_size, address)
        return Engine(self.settings, folder=self.folder)


def open_alone(settings: VllmSettings, folder: str | None, number: int) -> Engine:
    """Create an engine of a job without Ray. If the settings have no log folder, the log is kept in memory until
    `Engine.write_log_into` is called."""
    if settings.logs is None:
        keep_log()
    else:
        write_logs_alone(settings, number)
    return Engine(settings, folder=folder)


class PreparedEngine:
    """An engine that does not exist before `start` is called, in a process that has imported vLLM. After `start`, it
    has the methods of the engine."""

    def __init__(self, settings: VllmSettings) -> None:
        """Import vLLM."""
        keep_log()
        vllm_start.import_vllm(settings)
        self._engine: Engine | None = None

    def start(self, settings: VllmSettings, folder: str | None, number: int) -> None:
        """Create the engine, as `open_alone` does. Its log contains the log of the import."""
        write_logs_alone(settings, number)
        self._engine = Engine(settings, folder=folder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
