"""What the machine of a training process uses, under MLflow's own names: its tab of system metrics shows them."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

MEGABYTE = 1e6
"""MLflow's."""


class SystemMetrics:
    """This machine, this process and its children; `gpus` gives figures of GPUs by the end of their name."""

    def __init__(self, folder: Path, gpus: Callable[[], Mapping[str, float]]) -> None:
        """Count from now on; the disk is that of `folder`."""
        self._folder = folder
        self._gpus = gpus
        with suppress(OSError):  # a container may hide it
            psutil.cpu_percent()  # what it says next is of the time since now

    def measured(self) -> dict[str, float]:
        """Figures since the last call, and of this moment, by their names in MLflow."""
        memory = psutil.virtual_memory()
        found = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / MEGABYTE,
            "system_memory_usage_percentage": 100 * memory.used / memory.total,
            "disk_usage_percentage": psutil.disk_usage(str(self._folder)).percent,
            "process_memory_usage_megabytes": _own_bytes() / MEGABYTE,
            **self._gpus(),
        }
        return {f"system/{name}": round(value, 1) for name, value in found.items()}


def _own_bytes() -> int:
    """Resident memory of this process and its children without what they share with others, which would count
    several times."""
    here, total = psutil.Process(), 0
    for process in (here, *here.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended meanwhile
            used = process.memory_info()
            total += used.rss - getattr(used, "shared", 0)
    return total
