"""The engine of a job without Ray, in a process of its own beside the driver's. Light: it can be started before the
driver has imported anything that takes long."""

from dataclasses import replace
from typing import Any

from ppoctl.engines.child.process import ChildFactory, ChildProcess, ChildReply, taken
from ppoctl.engines.vllm.settings import VllmSettings
from ppoctl.errors import PpoctlError


def engine_process(settings: VllmSettings, threads: int, folder: str | None = None) -> ChildProcess:
    """The process of an engine, which begins on the weights of `folder` where there is one."""
    return ChildProcess(
        "vLLM", ChildFactory("ppoctl.engines.vllm.engine_factories:open_alone", (settings, folder), threads)
    )


class OwnProcess:
    """Handle of an engine (`weights.calls.EngineHandle`). Nothing is started before it is first asked, but what was
    started ahead."""

    def __init__(self, settings: VllmSettings, threads: int) -> None:
        self.settings = settings
        self._threads = threads
        self._child: ChildProcess | None = None
        self.folder: str | None = None
        """Folder on whose weights the next process begins; absent: on the model's own."""

    def begin(self, method: str, *arguments: Any) -> ChildReply:
        """See `weights.calls.EngineHandle`."""
        if self._child is None or not self._child.is_running:
            self._child = self._started_ahead() or engine_process(self.settings, self._threads, self.folder)
        return self._child.begin(method, *arguments)

    def close(self) -> None:
        """End the engine."""
        if self._child is not None:
            self._child.close()

    def _started_ahead(self) -> ChildProcess | None:
        """The process that was started before the run had a folder for its log; None where there is none, or it
        failed: another one says why, and leaves a log."""
        child = taken(engine_process(replace(self.settings, logs=None), self._threads, self.folder).target)
        if child is None:
            return None
        try:
            child.wait_until_started()
        except PpoctlError:
            return None
        child.call("write_log_into", self.settings.logs)
        return child
