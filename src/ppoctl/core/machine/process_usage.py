"""Memory peak of this process, and the seconds in which it moved tensors, for the stage that reads them.

On a GPU, memory is what torch allocated, as in `ppoctl plan`. On a CPU, it is the resident memory of the process.
"""

import re
from contextlib import suppress
from pathlib import Path

import torch

from ppoctl.core.measured import MEASUREMENTS, ProcessUsage

_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


class MeasuredProcess:
    """Base class of an object that computes in this process, and reports what it used."""

    def take_usage(self) -> ProcessUsage:
        """Return the usage since the last call. If the system does not allow a reset of the peak of a CPU process,
        the peak is that of the process so far."""
        usage = ProcessUsage(_peak_bytes(), MEASUREMENTS.take_moved_s())
        reset_peak()
        return usage


def reset_peak() -> None:
    """Begin a new peak."""
    if _is_on_gpu():
        torch.cuda.reset_peak_memory_stats()
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_bytes() -> int:
    """Return the peak; 0: the system does not report it."""
    if _is_on_gpu():
        return torch.cuda.max_memory_allocated()
    with suppress(OSError):
        if (found := _PEAK.search(Path("/proc/self/status").read_text("ascii", "replace"))) is not None:
            return int(found[1]) * 1024
    return 0


def _is_on_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
