"""What parts measure with. To import it is to import torch."""

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


notify(JOB.part, device=DEV.type)  # which verdicts depend on


def sync():
    """Wait until the GPU has done what it was given."""
    if CUDA:
        torch.cuda.synchronize()


def seconds(run, repeats=5, warm=2):
    """The median of so many runs, after some that are not counted."""
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
    """Record which code allocates memory of the GPU: what the snapshot at an OutOfMemoryError shows."""
    if CUDA:
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=200_000)


@contextmanager
def _without_history() -> Iterator[None]:
    """Context without that record, which takes time at each allocation."""
    if CUDA:
        torch.cuda.memory._record_memory_history(enabled=None)
    try:
        yield
    finally:
        record_history()


def free_gib():
    """Free memory of the GPU, whichever process has the rest; None without one."""
    return gib(torch.cuda.mem_get_info()[0]) if CUDA else None


def gap(found, expected):
    """Norm of the difference over the norm of what was expected."""
    return float((found.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())


def gib(number):
    """Bytes in GiB, two decimals."""
    return round(number / 2**30, 2)


def fix_varlen():
    """Give torch's variable-length attention the signature of torch 2.12, where it has an older one: its kernels take
    fewer key heads all the same. Returns what was done."""
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
    """Give torch the functions that read and set the allocator's settings, where an older one lacks them: a snapshot
    has the settings, and torch.cuda sets them. Returns what was done."""
    names = ("_accelerator_getAllocatorSettings", "_accelerator_setAllocatorSettings")
    absent = [name for name in names if not hasattr(torch._C, name)]
    if names[0] in absent:
        torch._C._accelerator_getAllocatorSettings = _settings_of_snapshot
    if names[1] in absent:
        torch._C._accelerator_setAllocatorSettings = torch.cuda.memory._set_allocator_settings
    return f"without {', '.join(absent)}" if absent else "as is"


def _settings_of_snapshot():
    return torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]
