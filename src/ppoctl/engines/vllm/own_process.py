"""The engines of a job without Ray, each in a separate process. This module imports neither torch nor vLLM, so that
the processes can be started before the driver's slow imports."""

from dataclasses import replace
from typing import Any

from ppoctl.core.activity import preparing
from ppoctl.core.errors import PpoctlError
from ppoctl.engines.child.process import ChildFactory, ChildProcess, ChildReply, taken
from ppoctl.engines.vllm.vllm_settings import VllmSettings


def engine_process(settings: VllmSettings, threads: int, folder: str | None = None, number: int = 0) -> ChildProcess:
    """Return the process of an engine. The engines of a GPU divide the CPU threads. If `folder` is given, the engine
    loads the weights in this folder. Without a log folder, no engine needs its index (`number`)."""
    return _process("open_alone", settings, threads, folder, 0 if settings.logs is None else number)


def prepared_process(settings: VllmSettings, threads: int) -> ChildProcess:
    """Return the process of an engine that imports vLLM, and creates the engine when `PreparedEngine.start` is
    called."""
    return _process("PreparedEngine", replace(settings, logs=None), threads)


def _process(factory: str, settings: VllmSettings, threads: int, *arguments: Any) -> ChildProcess:
    entry, threads = f"ppoctl.engines.vllm.engine_factories:{factory}", threads // settings.table.engines_per_gpu
    return ChildProcess("vLLM", ChildFactory(entry, (settings, *arguments), max(1, threads)))


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
        """Return the process that was started before the run had a folder for its log, and start its engine if it has
        none. None: there is no such process, or it failed before this call."""
        if prepared := taken(prepared_process(self.settings, self._threads).target):
            with preparing(f"starting {prepared.name}"):
                if not _is_ready(prepared):
                    return None
                prepared.call("start", self.settings, self.folder, self._number)
                return prepared
        complete = taken(engine_process(replace(self.settings, logs=None), self._threads, self.folder).target)
        if complete is None or not _is_ready(complete):
            return None
        complete.call("write_log_into", self.settings.logs, self._number)
        return complete


def _is_ready(child: ChildProcess) -> bool:
    """Wait until this process has started. False: it failed. The caller then starts another process, whose error and
    log explain the reason."""
    try:
        child.wait_until_started()
    except PpoctlError:
        return False
    return True
