"""How a trainer reaches the processes of its role: directly where there is one, through an executor where there are
more. Every rank is asked the same at the same time, because their answers meet in collectives."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ppoctl.batch.bucket import Bucket, TensorSpec, bucket_of, in_buckets
from ppoctl.engines.megatron.process_group import Patience, Place, join
from ppoctl.engines.megatron.rank import MegatronRank, TrainerSettings
from ppoctl.engines.megatron.sending import Senders, in_all_places
from ppoctl.engines.turns import Turns
from ppoctl.ports import Link, Promise, Sender
from ppoctl.recipe.schema import ParallelTable

VIEWS_BYTES = 64 * 2**20
"""Weights that an engine of this process is handed at one time: views, which nobody copies."""


@runtime_checkable
class Ranks(Protocol):
    """The processes of one role."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What the method of each rank returns, in the order of the ranks. An error of any rank is raised."""
        ...

    def weights(self) -> Iterator[Bucket]:
        """All weights of the role's model; tensors are valid until the next update."""
        ...

    def weights_for_engines(self) -> Iterator[Bucket]:
        """The same where engines can read them soonest, which this process perhaps cannot. A bucket is valid until
        the second one after it is asked for, the last two until the role is asked for something else."""
        ...

    def senders(self) -> Sequence[Sender]:
        """The same weights, to be broadcast to other processes."""
        ...


class ThisProcess:
    """One rank, here."""

    def __init__(self, rank: MegatronRank) -> None:
        self.rank = rank

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(self.rank, method)(*arguments)]

    def weights(self) -> Iterator[Bucket]:
        """Views of the parameters, except where Megatron's fused layout interleaves them."""
        return map(bucket_of, in_buckets(self.rank.weights(), VIEWS_BYTES))

    def weights_for_engines(self) -> Iterator[Bucket]:
        return self.weights()

    def senders(self) -> Sequence[Sender]:
        """None: there is no other process."""
        return ()


@runtime_checkable
class Executor(Protocol):
    """Runs the ranks, and carries questions and answers."""

    def call(self, method: str, *arguments: Any) -> list[Any]: ...

    def ask(self, ranks: Sequence[int], method: str, *arguments: Any) -> list[Any]: ...

    def begin(self, method: str, *arguments: Any, ranks: Sequence[int]) -> Promise: ...

    def nodes(self) -> Sequence[str]:
        """On which each rank runs, once all have been asked something."""
        ...


class ManyProcesses:
    """Ranks in processes of their own."""

    def __init__(
        self,
        executor: Executor,
        parallel: ParallelTable,
        bucket_bytes: int,
        engine_nodes: Callable[[], Collection[str]] | None = None,
    ) -> None:
        """With the nodes of engines, weights are shared with those there (`Senders`); otherwise all get them from
        one place. One bucket is loaded while the next is filled."""
        self.executor = executor
        self.parallel = parallel
        self.bucket_bytes = bucket_bytes
        self.engine_nodes = engine_nodes

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self.executor.call(method, *arguments)

    def weights(self) -> Iterator[Bucket]:
        """Pipeline rank by pipeline rank; the first tensor rank of each sends."""
        for groups in self._stages():
            yield from self._sent(groups[0], Senders(storing=frozenset(groups[0][:1])))

    def weights_for_engines(self) -> Iterator[Bucket]:
        """From each node that has engines, where it has ranks that can gather them."""
        if self.engine_nodes is None:
            yield from self.weights()
            return
        nodes, wanted = self.executor.nodes(), self.engine_nodes()
        for groups in self._stages():
            senders = Senders.near(groups, nodes, wanted)
            ranks = [rank for group in groups if senders.has(group[0]) for rank in group]
            yield from self._sent(ranks, senders)

    def _sent(self, ranks: Sequence[int], senders: Senders) -> Iterator[Bucket]:
        self.executor.ask(ranks, "open_weights", self.bucket_bytes, senders)
        while found := [bucket for bucket in self.executor.ask(ranks, "next_weights") if bucket is not None]:
            yield in_all_places(found)

    def senders(self) -> Sequence[Sender]:
        """Each pipeline rank's part has a link of its own: in one for all, a sender would receive what the others
        send."""
        return [StageSender(self.executor, groups[0], self.bucket_bytes) for groups in self._stages()]

    def _stages(self) -> Iterator[list[range]]:
        """Of each pipeline rank, the groups of ranks that can gather its weights; the first rank of a group sends."""
        layout = self.parallel
        # Whole groups of tensor ranks and whole groups of expert ranks.
        count = math.lcm(layout.tensor, layout.expert_ranks)
        for pipeline_rank in range(layout.pipeline):
            # Megatron-Core counts ranks over tensor, then context, then data, then pipeline.
            first = pipeline_rank * layout.stage_ranks
            yield [range(start, start + count) for start in range(first, first + layout.stage_ranks, count)]


@dataclass(frozen=True)
class StageSender:
    """A `ports.Sender`: ranks that gather the weights of a pipeline rank."""

    executor: Executor
    ranks: Sequence[int]
    bucket_bytes: int

    def plan(self) -> list[tuple[TensorSpec, ...]]:
        [found] = self.executor.ask(self.ranks[:1], "planned_weights", self.bucket_bytes)
        planned: list[tuple[TensorSpec, ...]] = found
        return planned

    def begin(self, link: Link) -> Promise:
        return self.executor.begin("broadcast_weights", link, self.bucket_bytes, ranks=self.ranks)


class TakingTurns:
    """Ranks of a role that shares its devices: it has the others leave before it works."""

    def __init__(self, ranks: Ranks, role: str, turns: Turns) -> None:
        self.ranks = ranks
        self.role = role
        self.turns = turns

    def call(self, method: str, *arguments: Any) -> list[Any]:
        if method not in _WITHOUT_THE_DEVICE:
            self._take()
        return self.ranks.call(method, *arguments)

    def weights(self) -> Iterator[Bucket]:
        self._take()
        return self.ranks.weights()

    def weights_for_engines(self) -> Iterator[Bucket]:
        self._take()
        return self.ranks.weights_for_engines()

    def senders(self) -> Sequence[Sender]:
        self._take()
        return self.ranks.senders()

    def _take(self) -> None:
        self.turns.take(self.role, self._leave)

    def _leave(self) -> None:
        self.ranks.call("leave")


_WITHOUT_THE_DEVICE = frozenset({"is_saved", "finish_save"})
"""Calls that may come while another role has its turn."""


@dataclass(frozen=True)
class OpenRank:
    """Makes a rank in the process it is called in."""

    settings: TrainerSettings
    start_deadline_s: float
    """By when all ranks must have come."""

    def __call__(self, rank: int, world_size: int, address: str) -> MegatronRank:
        if world_size > 1:
            patience = Patience(self.start_deadline_s, self.settings.collective_s)
            join(Place(rank, world_size, address), patience)
        return MegatronRank(self.settings)
