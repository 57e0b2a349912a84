"""Profile of the current process by torch's profiler: a trace in Chrome's format, and the slowest kernels.

driver, rank or engine:  begin_profile() -> work -> end_profile(folder, name) -> ProcessProfile
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ppoctl.core.machine.device import on_gpu

NUM_SLOWEST = 10


@dataclass(frozen=True)
class KernelTime:
    """All calls of a kernel in a process."""

    name: str
    calls: int
    ms: float
    """Milliseconds in the kernel itself, without kernels that it calls."""


@dataclass(frozen=True)
class ProcessProfile:
    """Profile of one process."""

    process: str
    device: str
    """`cuda`: kernels are those of the GPU; `cpu`: operations of torch on the CPU."""
    ms: float
    """Milliseconds in all kernels."""
    slowest: tuple[KernelTime, ...]
    trace: Path
    """File with every call, for https://ui.perfetto.dev or chrome://tracing."""


class ProfiledProcess:
    """Base class of an object that computes in this process, and can record a profile of the process."""

    _profile: profile | None = None

    def begin_profile(self) -> None:
        """Begin to record, unless the process records already."""
        if self._profile is None:
            self._profile = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu()])
            self._profile.start()

    def end_profile(self, folder: Path, name: str) -> ProcessProfile | None:
        """Stop, write the trace into a folder, and return the profile; None: the process did not record.

        `name` is the name of the process, or of its group, of which each process has a rank.
        """
        if self._profile is None:
            return None
        recorded, self._profile = self._profile, None
        if on_gpu():
            torch.cuda.synchronize()
        recorded.stop()
        ranks = torch.distributed
        if ranks.is_initialized() and ranks.get_world_size() > 1:
            name = f"{name}-{ranks.get_rank()}"
        trace = folder / f"trace-{name}.json.gz"
        recorded.export_chrome_trace(str(trace))
        device, kernels = _kernels(recorded)
        slowest = sorted(kernels, key=lambda kernel: -kernel.ms)[:NUM_SLOWEST]
        return ProcessProfile(name, device, sum(kernel.ms for kernel in kernels), tuple(slowest), trace)


def _kernels(recorded: profile) -> tuple[str, list[KernelTime]]:
    """Return the device of the kernels, and all kernels. Work of a GPU counts, if there is any: the time of an
    operation on the CPU is then mostly that of its launch."""
    averages = recorded.key_averages()
    on_device = [each for each in averages if each.device_type.name == "CUDA"]
    if on_device:
        return "cuda", [KernelTime(each.key, each.count, each.self_device_time_total / 1000) for each in on_device]
    return "cpu", [KernelTime(each.key, each.count, each.self_cpu_time_total / 1000) for each in averages]
