"""The rate of dense matrix products of this machine's device: published for GPUs, measured for the CPU."""

import os
import time
from dataclasses import dataclass
from functools import cache

from ppoctl.core.machine import nvml
from ppoctl.core.machine.device import visible

PUBLISHED = {
    "B200": {"bfloat16": 2250e12, "float32": 80e12},
    "H100": {"bfloat16": 989e12, "float32": 67e12},
    "H200": {"bfloat16": 989e12, "float32": 67e12},
    "GH200": {"bfloat16": 989e12, "float32": 67e12},
    "A100": {"bfloat16": 312e12, "float32": 19.5e12},
    "L40S": {"bfloat16": 362e12, "float32": 91.6e12},
}
"""Word of a GPU's name -> FLOP/s of dense products by dtype, from NVIDIA's data sheets (SXM). float32 is without
TF32, which ppoctl does not use."""
_SIZES, _REPEATS = (1024, 2048), 3
"""Sizes of the products that measure a CPU, and how often each runs: a quarter of a second in all."""


@dataclass(frozen=True)
class MatrixRate:
    """FLOP/s of matrix products."""

    flops_s: float
    is_of_all_ranks: bool
    """Whether the ranks of a role divide it: those of a CPU divide its threads."""


@cache
def matrix_rate(dtype: str) -> MatrixRate | None:
    """Return the rate of a GPU that this process sees, or of the CPU; None: the GPU is not in `PUBLISHED`."""
    gpus = visible(nvml.look(), os.environ)
    if not gpus:
        return MatrixRate(_measured(dtype), is_of_all_ranks=True)
    published = published_rate(gpus[0].name, dtype)
    return None if published is None else MatrixRate(published, is_of_all_ranks=False)


def published_rate(gpu: str, dtype: str) -> float | None:
    """Return the published FLOP/s of a GPU by its name; None: unknown."""
    words = gpu.replace("-", " ").split()
    return next((rates[dtype] for name, rates in PUBLISHED.items() if name in words), None)


def _measured(dtype: str) -> float:
    """Return the FLOP/s that products of this dtype reach with the threads of this process."""
    import torch

    rates = []
    for size in _SIZES:
        one = torch.ones(size, size, dtype=getattr(torch, dtype))
        for _ in range(_REPEATS):
            began = time.perf_counter()
            torch.mm(one, one)
            rates.append(2 * size**3 / (time.perf_counter() - began))
    return max(rates)
