"""Measurement functions for parts. Importing this module imports torch."""

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpu_parts.lines import JOB, notify

TINY = JOB.tiny
CUDA = torch.cuda.is_available()
DEV = torch.device("cuda", 0) if CUDA else torch.device("cpu")
BF16 = torch.bfloat16
HOPPER_FLOPS = 989e12
"""FLOP/s of an H100 or H200 in bfloat16, dense (data sheet)."""


notify(JOB.part, device=DEV.type)  # the checks depend on it


def sync():
    """Wait until the GPU has finished its work."""
    if CUDA:
        torch.cuda.synchronize()


def seconds(run, repeats=5, warm=2):
    """Return the median of several runs, after some that are not counted."""
    for _ in range(warm):
        run()
    times = []
    with _without_history():
        for _ in range(repeats):
            sync()
            start = time.perf_counter()
            run()
            sync()
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def record_history():
    """Record which code allocates GPU memory, for the snapshot at an OutOfMemoryError."""
    if CUDA:
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=200_000)


@contextmanager
def _without_history() -> Iterator[None]:
    """Suspend that record, which takes time at each allocation."""
    if CUDA:
        torch.cuda.memory._record_memory_history(enabled=None)
    try:
        yield
    finally:
        record_history()


def free_gib():
    """Return the free memory of the GPU, including other processes' use; None without a GPU."""
    return gib(torch.cuda.mem_get_info()[0]) if CUDA else None


def gap(found, expected):
    """Return the norm of the difference divided by the norm of the expected tensor."""
    return float((found.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())


def gib(number):
    """Return bytes in GiB, with two decimals."""
    return round(number / 2**30, 2)


def fix_varlen():
    """Give torch's variable-length attention the signature of torch 2.12 if it has an older one: its kernels already
    accept fewer key heads. Return what was done."""
    import torch.nn.attention.varlen as varlen

    names, old = inspect.signature(varlen.varlen_attn).parameters, varlen.varlen_attn
    if "enable_gqa" in names:
        return "as is"
    if "window_size" in names:
        varlen.varlen_attn = lambda *a, enable_gqa=False, **k: old(*a, **k)  # noqa: ARG005 - the newer signature
        return "without enable_gqa"
    varlen.varlen_attn = lambda *a, **_: old(*a, is_causal=True)
    return "is_causal only"


def fix_allocator():
    """Add the functions that read and set the allocator's settings if torch lacks them: a snapshot contains the
    settings, and torch.cuda sets them. Return what was done."""
    names = ("_accelerator_getAllocatorSettings", "_accelerator_setAllocatorSettings")
    absent = [name for name in names if not hasattr(torch._C, name)]
    if names[0] in absent:
        torch._C._accelerator_getAllocatorSettings = _settings_of_snapshot
    if names[1] in absent:
        torch._C._accelerator_setAllocatorSettings = torch.cuda.memory._set_allocator_settings
    return f"without {', '.join(absent)}" if absent else "as is"


def _settings_of_snapshot():
    return torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]
