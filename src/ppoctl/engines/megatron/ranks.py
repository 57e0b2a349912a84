"""Calls of a trainer to the processes of its role: directly if there is one process, through an executor otherwise.
Every rank receives the same call at the same time, because the ranks communicate by collectives."""

import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ppoctl.core.machine.cuda_memory import use_expandable_segments
from ppoctl.core.machine.device import on_gpu
from ppoctl.core.measured import MEASUREMENTS
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron.process_group import GroupTimeouts, RankInfo, join
from ppoctl.engines.megatron.rank import MegatronRank
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.weights.device_sharing import DeviceSharing
from ppoctl.engines.weights.engine_calls import CompletedReply, Executor, Reply
from ppoctl.engines.weights.sending import RankSource


@runtime_checkable
class Ranks(Protocol):
    """The processes of one role."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of each rank and return the results in rank order. If ranks fail, raises the error of one of
        them."""
        ...

    def weights(self) -> RankSource:
        """Return the weights of the role's model. They must be used before the next call."""
        ...


class ThisProcess:
    """A role whose only rank is in this process. The engine is in another process of this machine."""

    def __init__(self, rank: MegatronRank, bucket_bytes: int = 64 * 2**20, *, shares: bool = True) -> None:
        """`bucket_bytes` and `shares` are passed to `RankSource`."""
        self.rank = rank
        self.bucket_bytes = bucket_bytes
        self.shares = shares

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(self.rank, method)(*arguments)]

    def call_ranks(self, ranks: Sequence[int], method: str, *arguments: Any) -> list[Any]:  # noqa: ARG002 - only one
        """See `weights.engine_calls.Executor`."""
        return self.call(method, *arguments)

    def begin(self, method: str, *arguments: Any, ranks: Sequence[int]) -> Reply:
        """See `weights.engine_calls.Executor`. The call is complete before this returns."""
        return CompletedReply(self.call_ranks(ranks, method, *arguments))

    def nodes(self) -> Sequence[str]:
        """See `weights.engine_calls.Executor`."""
        return ("here",)

    def weights(self) -> RankSource:
        return RankSource(self, [[range(1)]], self.bucket_bytes, self.nodes, self.shares)


class ManyProcesses:
    """A role whose ranks are in separate processes."""

    def __init__(
        self,
        executor: Executor,
        parallel: ParallelTable,
        bucket_bytes: int,
        engine_nodes: Callable[[], Collection[str]] | None = None,
    ) -> None:
        """`bucket_bytes` and `engine_nodes` are passed to `RankSource`."""
        self.executor = executor
        self.parallel = parallel
        self.bucket_bytes = bucket_bytes
        self.engine_nodes = engine_nodes

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self.executor.call(method, *arguments)

    def weights(self) -> RankSource:
        return RankSource(self.executor, gathering_groups(self.parallel), self.bucket_bytes, self.engine_nodes)


def gathering_groups(layout: ParallelTable) -> list[list[range]]:
    """Return, for each pipeline rank, the groups of ranks that can gather the weights of this pipeline rank. A group
    contains all tensor ranks and all expert ranks. After gathering, the first rank of a group has full tensors."""
    count = math.lcm(layout.tensor, layout.expert_ranks)
    # Megatron-Core numbers ranks over tensor, then context, then data, then pipeline.
    firsts = [pipeline_rank * layout.stage_ranks for pipeline_rank in range(layout.pipeline)]
    return [
        [range(rank, rank + count) for rank in range(first, first + layout.stage_ranks, count)] for first in firsts
    ]


class DeviceSharingRanks:
    """Ranks of a role that shares its devices. Before the role computes, the other roles are offloaded. Before a call
    that only reads the role's weights, its gradients and optimizer are offloaded."""

    def __init__(self, ranks: Ranks, role: str, sharing: DeviceSharing) -> None:
        self.ranks = ranks
        self.role = role
        self.sharing = sharing
        self._has_optimizer = False
        """Whether gradients and optimizer are on the device."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        if method not in _WITHOUT_DEVICE:
            self._acquire(with_optimizer=method in _WITH_OPTIMIZER)
        return self.ranks.call(method, *arguments)

    def weights(self) -> RankSource:
        self._acquire(with_optimizer=False)
        return self.ranks.weights()

    def _acquire(self, *, with_optimizer: bool) -> None:
        self.sharing.acquire(self.role, self._offload)
        if self._has_optimizer and not with_optimizer and self.sharing.leaves(self.role):
            with MEASUREMENTS.moving():
                self._offload()  # the next call reloads only the weights
        self._has_optimizer = self._has_optimizer or with_optimizer

    def _offload(self) -> None:
        self._has_optimizer = False
        self.ranks.call("offload")


_WITH_OPTIMIZER = frozenset({"start", "load", "update", "begin_save"})
"""Calls that need gradients and optimizer on the device in addition to the weights."""
_WITHOUT_DEVICE = frozenset({"is_saved", "finish_save", "take_usage", "take_experts"})
"""Calls that do not need the device. They are possible while another role uses the device."""


@dataclass(frozen=True)
class OpenRank:
    """Factory of a rank in the calling process."""

    settings: TrainerSettings
    start_deadline_s: float
    """Seconds in which all ranks must start."""

    def __call__(self, rank: int, world_size: int, address: str) -> MegatronRank:
        if self.settings.parallel.tensor > 1:
            # CUDA reads this variable at startup. With one connection, messages between tensor ranks start before the
            # matrix product with which they overlap.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        if on_gpu():
            use_expandable_segments()
        if world_size > 1:
            patience = GroupTimeouts(self.start_deadline_s, self.settings.collective_s)
            join(RankInfo(rank, world_size, address), patience)
        return MegatronRank(self.settings)
