"""Child processes of the part `pair`: a trainer rank as in a run, and a tensor rank of an engine."""

import multiprocessing
import time
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ppoctl.core.machine.device import this_device
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.ranks import OpenRank
from ppoctl.engines.ray import shared_memory
from ppoctl.engines.vllm.engine_factories import OpenEngine
from ppoctl.engines.vllm.vllm_settings import VllmSettings
from ppoctl.engines.weights.sending import PARTS

START_DEADLINE_S = 60.0
KEY = b"pair"
"""Key with which the processes of the part open tensors that they send to each other."""


class PairRank:
    """A rank of the trainer (`MegatronRank`), and measurements in its process."""

    def __init__(self, settings: TrainerSettings, rank: int, size: int, address: str) -> None:
        multiprocessing.current_process().authkey = KEY
        began = time.perf_counter()
        self._rank = OpenRank(settings, START_DEADLINE_S)(rank, size, address)
        self._joined_s = time.perf_counter() - began

    def __getattr__(self, method: str) -> Any:
        return getattr(self._rank, method)

    def tensors(self) -> dict[str, Tensor]:
        """Return a copy of all full weights in host memory. Collective."""
        return {name: tensor.cpu().clone() for part in self._rank.weights(PARTS) for name, tensor in part}

    def outside_bytes(self) -> int | None:
        """Return the used memory of the GPU that is not torch's: CUDA, kernels, communicators; None without a GPU."""
        if this_device().type == "cpu":
            return None
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    def joined_s(self) -> float:
        """Return the seconds until all groups existed."""
        return self._joined_s

    def reduce_in_groups(self) -> dict[str, tuple[bool, float]]:
        """Sum a number over each group of several ranks. Return, for each group, whether the sum is right, and the
        seconds. Collective."""
        return {name: _reduced(group) for name, group in self._groups().items()}

    def _groups(self) -> dict[str, ProcessGroup]:
        world = torch.distributed.group.WORLD
        named = {"world": world, **vars(self._rank.groups)}
        # Sorted: Megatron-Core sets the attributes in the order of a set, which differs between processes.
        groups = ((name, named[name]) for name in sorted(named))
        return {name: group for name, group in groups if isinstance(group, ProcessGroup) and group.size() > 1}


def _reduced(group: ProcessGroup) -> tuple[bool, float]:
    began = time.perf_counter()
    number = torch.tensor([2.0 ** group.rank()], device=this_device())
    torch.distributed.all_reduce(number, group=group)
    return float(number) == 2.0 ** group.size() - 1, time.perf_counter() - began


class EngineRank:
    """A tensor rank of an engine (`Engine`) that has loaded the weights in a folder."""

    def __init__(self, settings: VllmSettings, folder: str, rank: int, size: int, address: str) -> None:
        before = shared_memory.mapped()
        self._engine = OpenEngine(settings, folder=folder)(rank, size, address)
        self._segments = [name for name in shared_memory.mapped() if name not in before]

    def __getattr__(self, method: str) -> Any:
        return getattr(self._engine, method)

    def segments(self) -> list[str]:
        """Return the shared memory that vLLM leaves behind if the process is killed."""
        return self._segments
