"""The trainer's side: ranks gather weights tensor by tensor, one of them sends, and the driver puts together.

    driver: RankSource                  each rank: SendingRank
    open_weights(who sends)        -->  begin to gather
    next_weights()                 -->  gather a bucket; copy it to shared memory, or to be stored
        merged bucket              <--  checksums, and where the bytes are      (ranks that only take part: nothing)

    PipelineRankSender.plan        -->  planned_weights: what each bucket will hold
    PipelineRankSender.begin       -->  broadcast_weights: gather bucket after bucket into a `BroadcastSource`
                                   <--  SendReport

All tensor and expert ranks of a pipeline rank take part in gathering; ranks of other data or context ranks hold the
same weights, and are asked only where engines of their node can read from them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppoctl.batch.records import State
from ppoctl.errors import WeightSyncError
from ppoctl.weights.broadcast import BroadcastGroup, BroadcastSource, is_linked
from ppoctl.weights.bucket import Bucket, BucketLocation, TensorSpec, bucket_of, flatten, in_buckets, planned_buckets
from ppoctl.weights.checksum import TensorChecksum, checksum_of
from ppoctl.weights.engine_calls import Executor, Reply
from ppoctl.weights.sharing import RetainedBuffers, Shared, SharedBuffers


@dataclass(frozen=True)
class SenderRanks:
    """The ranks that hand out buckets of one pipeline rank; the first of each group that gathers together."""

    sharing: frozenset[int] = frozenset()
    """Ranks that put them into memory that processes of their node read (`weights.sharing`)."""
    storing: frozenset[int] = frozenset()
    """Ranks that put them where any process finds them, for one copy more on each side. What is stored lasts."""
    keeping: frozenset[int] = frozenset()
    """Ranks that keep them all in host memory, which processes of their node read (`weights.sharing`)."""

    def has(self, rank: int) -> bool:
        return rank in self.sharing or rank in self.storing or rank in self.keeping

    @classmethod
    def near(cls, groups: Sequence[Sequence[int]], nodes: Sequence[str], wanted: Collection[str]) -> "SenderRanks":
        """One rank that shares for each node of `wanted`, as far as there is one, and one whose copy lasts: it keeps
        it for the only node, or else stores it, for nodes without a rank too.

        `groups` are ranks that gather together, the first of which has whole tensors; `nodes` has the node of every
        rank.
        """
        first_there: dict[str, int] = {}
        for group in groups:
            first_there.setdefault(nodes[group[0]], group[0])
        sharing = frozenset(first_there[node] for node in wanted if node in first_there)
        if sharing and len(set(wanted)) == 1:
            return cls(sharing, keeping=sharing)
        return cls(sharing, storing=frozenset({min(sharing, default=groups[0][0])}))


@dataclass(frozen=True)
class SendReport:
    """A sender's answer when it has broadcast its part of the weights."""

    checksums: Mapping[str, TensorChecksum]
    """Checksum of each tensor by name, taken from the trainer's own before it was copied."""
    arrived: bool
    """False: the process group broke."""


class SendingRank(ABC):
    """One process of the trainer: gathers its pipeline rank's weights and hands them out. The driver calls the four
    methods `*_weights` on all ranks of a group alike, because gathering is collective."""

    device: torch.device

    def __init__(self) -> None:
        self._gathered: Iterator[list[tuple[str, Tensor]]] = iter(())
        self._places: list[SharedBuffers | RetainedBuffers] = []
        """Where this rank puts buckets for others to read."""
        self._kept: RetainedBuffers | None = None
        self._stores = False

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors under Hugging Face names, one at a time; collective."""

    @abstractmethod
    def weight_specs(self) -> list[TensorSpec]:
        """Name, dtype and shape of each tensor that `weights` will give."""

    def open_weights(self, max_bytes: int, senders: SenderRanks) -> None:
        """Begin to hand out weights in buckets of at most `max_bytes`."""
        rank = torch.distributed.get_rank()
        self._gathered = in_buckets(self.weights(), max_bytes)
        self._places, self._stores = [], rank in senders.storing
        # On a CPU engines read what is kept.
        if rank in senders.sharing and not (rank in senders.keeping and self.device.type == "cpu"):
            self._places.append(SharedBuffers(self.device))
        if rank in senders.keeping:
            self._kept = self._kept or RetainedBuffers()
            self._kept.begin()
            self._places.append(self._kept)

    def next_weights(self) -> Bucket | None:
        """The next bucket, copied to where it is read. None: there are no more, or this rank only takes part."""
        tensors = next(self._gathered, [])
        if not tensors:
            return None  # and keep the memory: engines still read the last two buckets
        contents: list[BucketLocation] = [place.put(tensors) for place in self._places]
        contents += [flatten(tensors)] if self._stores else []
        return bucket_of(tensors, *contents) if contents else None

    def planned_weights(self, max_bytes: int) -> list[list[TensorSpec]]:
        """The buckets of `broadcast_weights`, before they are sent."""
        return planned_buckets(self.weight_specs(), max_bytes)

    def is_linked(self, group: BroadcastGroup) -> bool:
        """Whether this rank is in the process group of an earlier broadcast."""
        return is_linked(group)

    def broadcast_weights(self, group: BroadcastGroup, max_bytes: int, sender: int) -> SendReport | None:
        """Rank `sender` sends all weights to a process group, in buckets; one is on its way while the next is
        gathered. None: this rank only took part. A group that breaks does not end the gathering."""
        source = BroadcastSource(group, self.device) if torch.distributed.get_rank() == sender else None
        checksums: dict[str, TensorChecksum] = {}
        for tensors in in_buckets(self.weights(), max_bytes):
            if source is not None:
                checksums |= {name: checksum_of(tensor) for name, tensor in tensors}
                source.send(tensors)
        return None if source is None else SendReport(checksums, arrived=source.finish())

    def stop_sharing(self) -> None:
        """Free the memory that engines could read until now, but for what is kept."""
        self._places = []


@dataclass(frozen=True)
class RankSource:
    """All weights of a trainer, as the driver gets them from its ranks; valid until the next update."""

    executor: Executor
    pipeline_ranks: Sequence[Sequence[Sequence[int]]]
    """For each pipeline rank, the groups of ranks that can gather its weights."""
    bucket_bytes: int
    engine_nodes: Callable[[], Collection[str]] | None = None
    """Nodes of engines: ranks share with those there. None: all engines get buckets from one rank."""
    shares: bool = True
    """Whether engines may read the memory of a rank's device; if not, they read what it keeps in host memory."""

    def buckets(self) -> Iterator[Bucket]:
        """Buckets that the driver can read, pipeline rank by pipeline rank; the first tensor rank of each stores."""
        for groups in self.pipeline_ranks:
            yield from self._handed_out(groups, SenderRanks(storing=frozenset(groups[0][:1])))

    def buckets_for_engines(self) -> Iterator[Bucket]:
        """Buckets that engines read directly, which the driver may not be able to: pipeline rank by pipeline rank,
        from each node that has engines and ranks that can gather. Each stays valid until two more have been asked
        for; the last two until the role is next called. Each has a content that lasts."""
        for groups in self.pipeline_ranks:
            yield from self._handed_out(groups, self._near_engines(groups))

    def buckets_to_keep(self) -> Iterator[Bucket]:
        """Buckets with nothing but a content that lasts, pipeline rank by pipeline rank, from one rank of each: what
        a broadcast leaves for engines that die."""
        for groups in self.pipeline_ranks:
            yield from self._handed_out(groups, replace(self._near_engines(groups), sharing=frozenset()))

    def _near_engines(self, groups: Sequence[Sequence[int]]) -> SenderRanks:
        if self.engine_nodes is None:
            return SenderRanks(storing=frozenset(groups[0][:1]))
        near = SenderRanks.near(groups, self.executor.nodes(), self.engine_nodes())
        return near if self.shares else replace(near, sharing=frozenset())

    def _handed_out(self, groups: Sequence[Sequence[int]], senders: SenderRanks) -> Iterator[Bucket]:
        ranks = [rank for group in groups if senders.has(group[0]) for rank in group]
        self.executor.call_ranks(ranks, "open_weights", self.bucket_bytes, senders)
        while found := [bucket for bucket in self.executor.call_ranks(ranks, "next_weights") if bucket is not None]:
            yield _merged(found)

    def senders(self) -> Sequence["PipelineRankSender"]:
        """Who can broadcast the weights instead, one per pipeline rank, each for a process group of its own: in one
        for all, a sender would receive what the others send."""
        return [PipelineRankSender(self.executor, groups[0], self.bucket_bytes) for groups in self.pipeline_ranks]


@dataclass(frozen=True)
class PipelineRankSender:
    """Broadcasts the weights of one pipeline rank."""

    executor: Executor
    ranks: Sequence[int]
    """The ranks that gather; the first one sends."""
    bucket_bytes: int

    def plan(self) -> list[list[TensorSpec]]:
        """The tensors that will be sent, bucket by bucket."""
        [planned] = self.executor.call_ranks(self.ranks[:1], "planned_weights", self.bucket_bytes)
        buckets: list[list[TensorSpec]] = planned
        return buckets

    def is_linked(self, group: BroadcastGroup) -> bool:
        """Whether the rank that sends is in the group."""
        [answer] = self.executor.call_ranks(self.ranks[:1], "is_linked", group)
        return bool(answer)

    def begin(self, group: BroadcastGroup) -> Reply:
        """Begin to send. The first of the answers is a `SendReport`."""
        return self.executor.begin("broadcast_weights", group, self.bucket_bytes, self.ranks[0], ranks=self.ranks)


@dataclass(frozen=True)
class NamedWeights:
    """The weights of one actor state, before they are sent."""

    state: State
    names: tuple[str, ...]
    """All Hugging Face names, which the engines must be sent."""
    buckets: Callable[[], Iterator[Bucket]]
    """A fresh iterator (`RankSource.buckets_for_engines`)."""
    senders: Callable[[], Sequence[PipelineRankSender]]
    """`RankSource.senders`."""
    to_keep: Callable[[], Iterator[Bucket]]
    """`RankSource.buckets_to_keep`."""


def _merged(found: Sequence[Bucket]) -> Bucket:
    """A bucket that several ranks have made. Raises WeightSyncError where they hold different weights."""
    first, *others = found
    for name, checksum in first.checksums.items():
        for other in others:
            if other.checksums.get(name) != checksum:
                raise WeightSyncError(
                    f"data ranks of the actor hold different weights: `{name}` is {checksum} on one of them, and "
                    f"{other.checksums.get(name)} on another",
                    hint="`ppoctl resume RUN` loads one state into all; if they part again, report it with the "
                    "layout",
                )
    contents = [content for bucket in found for content in bucket.contents]
    # A reader takes the first that is near, which a stored one always is.
    contents.sort(key=lambda content: not isinstance(content, Shared))
    return Bucket(first.checksums, tuple(contents))
