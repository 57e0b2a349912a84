"""The engines of a job without Ray, each in a separate process. This module imports neither torch nor vLLM, so that
the processes can be started before the driver's slow imports."""

from dataclasses import replace
from typing import Any

from ppoctl.core.errors import PpoctlError
from ppoctl.engines.child.process import ChildFactory, ChildProcess, ChildReply, taken
from ppoctl.engines.vllm.vllm_settings import VllmSettings


def engine_process(settings: VllmSettings, threads: int, folder: str | None = None, number: int = 0) -> ChildProcess:
    """Return the process of an engine. The engines of a GPU divide the CPU threads. If `folder` is given, the engine
    loads the weights in this folder. Without a log folder, no engine needs its index (`number`)."""
    target = "ppoctl.engines.vllm.engine_factories:open_alone"
    arguments = settings, folder, 0 if settings.logs is None else number
    return ChildProcess("vLLM", ChildFactory(target, arguments, max(1, threads // settings.table.engines_per_gpu)))


class OwnProcess:
    """Handle of an engine (`weights.engine_calls.EngineHandle`). The first call starts the process, unless it was
    prestarted."""

    def __init__(self, settings: VllmSettings, threads: int, number: int = 0) -> None:
        self.settings = settings
        self._threads = threads
        self._number = number
        self._child: ChildProcess | None = None
        self.folder: str | None = None
        """Folder with the weights that the next process loads. None: the model's own folder."""

    def begin(self, method: str, *arguments: Any) -> ChildReply:
        """See `weights.engine_calls.EngineHandle`."""
        if self._child is None or not self._child.is_running:
            self._child = self._prestarted() or engine_process(
                self.settings, self._threads, self.folder, self._number
            )
        return self._child.begin(method, *arguments)

    def close(self) -> None:
        """End the engine."""
        if self._child is not None:
            self._child.close()

    def _prestarted(self) -> ChildProcess | None:
        """Return the process that was started before the run had a folder for its log. None: there is no such
        process, or it failed. After a failure the caller starts another process, whose error and log explain the
        reason."""
        child = taken(engine_process(replace(self.settings, logs=None), self._threads, self.folder).target)
        if child is None:
            return None
        try:
            child.wait_until_started()
        except PpoctlError:
            return None
        child.call("write_log_into", self.settings.logs, self._number)
        return child
