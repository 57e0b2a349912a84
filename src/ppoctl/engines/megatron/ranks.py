"""How a trainer reaches the processes of its role: directly where there is one, through an executor where there are
more. Every rank is asked the same at the same time, because their answers meet in collectives."""

import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ppoctl.engines.device_sharing import DeviceSharing
from ppoctl.engines.megatron.process_group import GroupTimeouts, RankInfo, join
from ppoctl.engines.megatron.rank import MegatronRank, TrainerSettings
from ppoctl.machine.cuda_memory import use_expandable_segments
from ppoctl.machine.device import on_gpu
from ppoctl.recipe.schema import ParallelTable
from ppoctl.weights.engine_calls import CompletedReply, Executor, Reply
from ppoctl.weights.sending import RankSource


@runtime_checkable
class Ranks(Protocol):
    """The processes of one role."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of each rank; what they return, in the order of the ranks. An error of any rank is raised."""
        ...

    def weights(self) -> RankSource:
        """The weights of the role's model, to be used at once."""
        ...


class ThisProcess:
    """One rank, in this process; the engine is in another one of this machine."""

    def __init__(self, rank: MegatronRank, bucket_bytes: int = 64 * 2**20, *, shares: bool = True) -> None:
        """Size of buckets and `shares` are for `RankSource`."""
        self.rank = rank
        self.bucket_bytes = bucket_bytes
        self.shares = shares

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(self.rank, method)(*arguments)]

    def call_ranks(self, ranks: Sequence[int], method: str, *arguments: Any) -> list[Any]:  # noqa: ARG002 - there is one
        """See `weights.calls.Executor`."""
        return self.call(method, *arguments)

    def begin(self, method: str, *arguments: Any, ranks: Sequence[int]) -> Reply:
        """See `weights.calls.Executor`: it is answered before this returns."""
        return CompletedReply(self.call_ranks(ranks, method, *arguments))

    def nodes(self) -> Sequence[str]:
        """See `weights.calls.Executor`."""
        return ("here",)

    def weights(self) -> RankSource:
        return RankSource(self, [[range(1)]], self.bucket_bytes, self.nodes, self.shares)


class ManyProcesses:
    """Ranks in processes of their own."""

    def __init__(
        self,
        executor: Executor,
        parallel: ParallelTable,
        bucket_bytes: int,
        engine_nodes: Callable[[], Collection[str]] | None = None,
    ) -> None:
        """Size of buckets and nodes of engines are for `RankSource`."""
        self.executor = executor
        self.parallel = parallel
        self.bucket_bytes = bucket_bytes
        self.engine_nodes = engine_nodes

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self.executor.call(method, *arguments)

    def weights(self) -> RankSource:
        return RankSource(self.executor, gathering_groups(self.parallel), self.bucket_bytes, self.engine_nodes)


def gathering_groups(layout: ParallelTable) -> list[list[range]]:
    """For each pipeline rank, the groups of ranks that can gather its weights: whole groups of tensor ranks and whole
    groups of expert ranks. The first rank of a group then has whole tensors."""
    count = math.lcm(layout.tensor, layout.expert_ranks)
    # Megatron-Core counts ranks over tensor, then context, then data, then pipeline.
    firsts = [pipeline_rank * layout.stage_ranks for pipeline_rank in range(layout.pipeline)]
    return [
        [range(rank, rank + count) for rank in range(first, first + layout.stage_ranks, count)] for first in firsts
    ]


class DeviceSharingRanks:
    """Ranks of a role that shares its devices: it has the others leave before it works, and its own gradients and
    optimizer before it only reads its weights."""

    def __init__(self, ranks: Ranks, role: str, sharing: DeviceSharing) -> None:
        self.ranks = ranks
        self.role = role
        self.sharing = sharing
        self._is_whole = False
        """Whether gradients and optimizer are on the device."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        if method not in _WITHOUT_THE_DEVICE:
            self._take(whole=method in _WHOLE)
        return self.ranks.call(method, *arguments)

    def weights(self) -> RankSource:
        self._take(whole=False)
        return self.ranks.weights()

    def _take(self, *, whole: bool) -> None:
        self.sharing.acquire(self.role, self._leave)
        if self._is_whole and not whole and self.sharing.leaves(self.role):
            self._leave()  # the ranks bring back the weights alone
        self._is_whole = self._is_whole or whole

    def _leave(self) -> None:
        self._is_whole = False
        self.ranks.call("offload")


_WHOLE = frozenset({"start", "load", "update", "begin_save"})
"""Calls that have gradients and optimizer on the device, beside the weights."""
_WITHOUT_THE_DEVICE = frozenset({"is_saved", "finish_save"})
"""Calls that may come while another role has its turn."""


@dataclass(frozen=True)
class OpenRank:
    """Makes a rank in the process it is called in."""

    settings: TrainerSettings
    start_deadline_s: float
    """Seconds in which all ranks must have come."""

    def __call__(self, rank: int, world_size: int, address: str) -> MegatronRank:
        if self.settings.parallel.tensor > 1:
            # CUDA reads it when it starts. Messages of tensor ranks then begin before the product that hides them.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        if on_gpu():
            use_expandable_segments()
        if world_size > 1:
            patience = GroupTimeouts(self.start_deadline_s, self.settings.collective_s)
            join(RankInfo(rank, world_size, address), patience)
        return MegatronRank(self.settings)
