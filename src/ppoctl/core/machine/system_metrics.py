"""Resource use of the machine of a training process. The metrics have MLflow's own names, so that MLflow's tab of
system metrics shows them."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

MEGABYTE = 1e6
"""Bytes per megabyte, the unit of MLflow's memory metrics."""


class SystemMetrics:
    """Resource use of this machine, this process and its children. `gpus` returns GPU metrics by the last part of the
    metric name."""

    def __init__(self, folder: Path, gpus: Callable[[], Mapping[str, float]]) -> None:
        """Start to measure. Disk metrics are of the disk that contains `folder`."""
        self._folder = folder
        self._gpus = gpus
        with suppress(OSError):  # a container may hide the file that psutil reads
            psutil.cpu_percent()  # the next call reports the time since this one

    def measured(self) -> dict[str, float]:
        """Return averages since the last call and current values, by MLflow metric name."""
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
    """Return the resident bytes of this process and its children without shared memory. Shared memory would be
    counted once per process."""
    this_process, total = psutil.Process(), 0
    for process in (this_process, *this_process.children(recursive=True)):
        with suppress(psutil.Error):  # the process has ended
            used = process.memory_info()
            total += used.rss - getattr(used, "shared", 0)
    return total
