"""The trainer's side of a transfer: ranks gather weights tensor by tensor, one of the ranks sends them, and the
driver merges the results.

    driver: RankSource                  each rank: SendingRank
    open_weights(senders, parts)   -->  begin to gather
    next_weights()                 -->  gather a bucket; copy it to shared memory or for the object store
        merged bucket              <--  checksums and locations of the bytes    (ranks that only gather: None)

    PipelineRankSender.plan        -->  planned_weights: specs of the tensors in each bucket
    PipelineRankSender.begin       -->  broadcast_weights: gather bucket after bucket into a `BroadcastSource`
                                   <--  SendReport

All tensor and expert ranks of a pipeline rank gather together: gathering is collective, so if one rank were not
called, the others would wait forever. Other data or context ranks hold the same weights. They are called only if
engines on their node can read from them.

Weights have two parts: tensors that never change (frozen parameters), and tensors that training changes. If engines
hold the constant part already, only the other part is gathered and sent.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from ppoctl.core.batch.records import State
from ppoctl.core.errors import WeightSyncError
from ppoctl.engines.weights.broadcast import BroadcastGroup, BroadcastSource, is_linked
from ppoctl.engines.weights.bucket import (
    Bucket,
    BucketLocation,
    TensorSpec,
    bucket_of,
    flatten,
    in_buckets,
    planned_buckets,
)
from ppoctl.engines.weights.engine_calls import Executor, Reply
from ppoctl.engines.weights.sharing import RetainedBuffers, Shared, SharedBuffers
from ppoctl.models.convert.checksum import TensorChecksum, checksum_of

Part = Literal["constant", "changing"]
"""Part of the weights. constant: tensors that never change. changing: all others; all tensors if everything
trains."""
PARTS: tuple[Part, ...] = ("constant", "changing")
"""Parts of a complete transfer, in order."""


@dataclass(frozen=True)
class SenderRanks:
    """The ranks that hand out buckets of one pipeline rank. Each of them is the first rank of a group that gathers
    together."""

    sharing: frozenset[int] = frozenset()
    """Ranks that copy buckets into memory that processes of their node can read (`weights.sharing`)."""
    storing: frozenset[int] = frozenset()
    """Ranks that store buckets where any process can read them, at the cost of one more copy on each side. Stored
    buckets last until the next transfer."""
    keeping: frozenset[int] = frozenset()
    """Ranks that keep all buckets in host memory that processes of their node can read (`weights.sharing`)."""

    def has(self, rank: int) -> bool:
        return rank in self.sharing or rank in self.storing or rank in self.keeping

    @classmethod
    def near(cls, groups: Sequence[Sequence[int]], nodes: Sequence[str], wanted: Collection[str]) -> "SenderRanks":
        """Return one sharing rank for each node of `wanted` that has a rank, and one rank whose copy lasts until the
        next transfer. If `wanted` is a single node with a rank, this rank keeps the copy. Otherwise a rank stores the
        copy, also for nodes without a rank.

        `groups`: the ranks that gather together; the first rank of each group has full tensors. `nodes`: the node of
        every rank.
        """
        first_on_node: dict[str, int] = {}
        for group in groups:
            first_on_node.setdefault(nodes[group[0]], group[0])
        sharing = frozenset(first_on_node[node] for node in wanted if node in first_on_node)
        if sharing and len(set(wanted)) == 1:
            return cls(sharing, keeping=sharing)
        return cls(sharing, storing=frozenset({min(sharing, default=groups[0][0])}))


@dataclass(frozen=True)
class SendReport:
    """A sender's result of broadcasting its shard of the weights."""

    checksums: Mapping[str, TensorChecksum]
    """Checksum of each tensor by the name of the tensor, computed from the trainer's tensor before any copy."""
    arrived: bool
    """Whether all tensors arrived. False: the process group broke."""


class SendingRank(ABC):
    """One process of the trainer. It gathers the weights of its pipeline rank and hands them out. The driver calls
    the four methods `*_weights` on all ranks of a group: gathering is collective, and would hang otherwise."""

    device: torch.device

    def __init__(self) -> None:
        self._gathered: Iterator[tuple[Part, list[tuple[str, Tensor]]]] = iter(())
        self._shared: SharedBuffers | None = None
        """Buffers into which this rank copies buckets for other processes."""
        self._kept: dict[Part, RetainedBuffers] = {}
        """Copy of each part that lasts until the part is sent again."""
        self._keeps = self._stores = False

    @abstractmethod
    def weights(self, parts: Sequence[Part]) -> Sequence[Iterator[tuple[str, Tensor]]]:
        """Return, for each of these parts, an iterator over full tensors under Hugging Face names, which are gathered
        one at a time. The iterators must be used in order. Collective."""

    @abstractmethod
    def weight_specs(self, parts: Sequence[Part] = PARTS) -> list[TensorSpec]:
        """Return name, dtype and shape of each tensor that `weights` will yield."""

    def open_weights(self, max_bytes: int, senders: SenderRanks, parts: Sequence[Part] = PARTS) -> None:
        """Begin to hand out these parts of the weights in buckets of at most `max_bytes`. A bucket has tensors of
        only one part."""
        rank = torch.distributed.get_rank()
        gathered = zip(parts, self.weights(parts), strict=True)
        self._gathered = ((part, bucket) for part, tensors in gathered for bucket in in_buckets(tensors, max_bytes))
        self._keeps, self._stores = rank in senders.keeping, rank in senders.storing
        # On a CPU, retained buffers are already shared memory, and engines read them.
        is_shared = rank in senders.sharing and not (self._keeps and self.device.type == "cpu")
        self._shared = SharedBuffers(self.device) if is_shared else None
        for part in parts if self._keeps else ():
            self._kept.setdefault(part, RetainedBuffers()).begin()

    def next_weights(self) -> Bucket | None:
        """Return the next bucket, copied to the locations from which it is read. None: there are no more buckets, or
        this rank only gathers."""
        part, tensors = next(self._gathered, ("changing", []))
        if not tensors:
            return None  # the buffers stay: engines still read the last two buckets
        contents: list[BucketLocation] = [] if self._shared is None else [self._shared.put(tensors)]
        contents += [self._kept[part].put(tensors)] if self._keeps else []
        contents += [flatten(tensors)] if self._stores else []
        return bucket_of(tensors, *contents) if contents else None

    def planned_weights(self, max_bytes: int, parts: Sequence[Part]) -> list[list[TensorSpec]]:
        """Return the specs of the tensors in each bucket that `broadcast_weights` will send."""
        return planned_buckets(self.weight_specs(parts), max_bytes)

    def is_linked(self, group: BroadcastGroup) -> bool:
        """Whether this rank is still in this process group of an earlier broadcast."""
        return is_linked(group)

    def broadcast_weights(
        self, group: BroadcastGroup, max_bytes: int, sender: int, parts: Sequence[Part]
    ) -> SendReport | None:
        """Gather these parts of the weights in buckets. Rank `sender` broadcasts the buckets: one bucket is in
        transit while the next is gathered. Returns None on ranks that only gather. Gathering continues if the group
        breaks."""
        source = BroadcastSource(group, self.device) if torch.distributed.get_rank() == sender else None
        checksums: dict[str, TensorChecksum] = {}
        for tensors in in_buckets(chain.from_iterable(self.weights(parts)), max_bytes):
            if source is not None:
                checksums |= {name: checksum_of(tensor) for name, tensor in tensors}
                source.send(tensors)
        return None if source is None else SendReport(checksums, arrived=source.finish())

    def stop_sharing(self) -> None:
        """Free the memory from which engines could read until now, except for retained buffers."""
        self._shared = None


@dataclass(frozen=True)
class RankSource:
    """All weights of a trainer, as the driver receives them from the ranks. Valid until the next update."""

    executor: Executor
    pipeline_ranks: Sequence[Sequence[Sequence[int]]]
    """For each pipeline rank, the groups of ranks that can gather its weights."""
    bucket_bytes: int
    engine_nodes: Callable[[], Collection[str]] | None = None
    """Returns the nodes with engines. Ranks on these nodes share buckets. None: all engines get buckets from one
    rank."""
    shares: bool = True
    """Whether engines may read a rank's device memory. If not, engines read the copy in host memory."""

    def buckets(self) -> Iterator[Bucket]:
        """Yield buckets that the driver can read, by pipeline rank. The first tensor rank of each pipeline rank
        stores them."""
        for groups in self.pipeline_ranks:
            yield from self._handed_out(groups, SenderRanks(storing=frozenset(groups[0][:1])))

    def buckets_for_engines(self, parts: Sequence[Part] = PARTS) -> Iterator[Bucket]:
        """Yield buckets of these parts that engines read directly, by pipeline rank. The driver may be unable to read
        them. Each bucket is on every node that has engines and ranks that can gather. A bucket is valid until two
        more buckets are requested. The last two buckets are valid until the role is called again. Each bucket has a
        location that lasts until its part is sent again."""
        for groups in self.pipeline_ranks:
            yield from self._handed_out(groups, self._near_engines(groups), parts)

    def buckets_to_keep(self, parts: Sequence[Part] = PARTS) -> Iterator[Bucket]:
        """Yield buckets of these parts with only a location that lasts, by pipeline rank, from one rank of each
        pipeline rank. After a broadcast, engines that die are restored from these buckets."""
        for groups in self.pipeline_ranks:
            yield from self._handed_out(groups, replace(self._near_engines(groups), sharing=frozenset()), parts)

    def _near_engines(self, groups: Sequence[Sequence[int]]) -> SenderRanks:
        if self.engine_nodes is None:
            return SenderRanks(storing=frozenset(groups[0][:1]))
        near = SenderRanks.near(groups, self.executor.nodes(), self.engine_nodes())
        return near if self.shares else replace(near, sharing=frozenset())

    def _handed_out(
        self, groups: Sequence[Sequence[int]], senders: SenderRanks, parts: Sequence[Part] = PARTS
    ) -> Iterator[Bucket]:
        ranks = [rank for group in groups if senders.has(group[0]) for rank in group]
        self.executor.call_ranks(ranks, "open_weights", self.bucket_bytes, senders, parts)
        while buckets := [bucket for bucket in self.executor.call_ranks(ranks, "next_weights") if bucket is not None]:
            yield _merged(buckets)

    def senders(self) -> Sequence["PipelineRankSender"]:
        """Return the senders that can broadcast the weights instead, one sender per pipeline rank. Each sender has a
        separate process group: in a common group, every sender would receive the tensors of the other senders."""
        return [PipelineRankSender(self.executor, groups[0], self.bucket_bytes) for groups in self.pipeline_ranks]


@dataclass(frozen=True)
class PipelineRankSender:
    """Sender of the weights of one pipeline rank, by broadcast."""

    executor: Executor
    ranks: Sequence[int]
    """The ranks that gather. The first rank sends."""
    bucket_bytes: int

    def plan(self, parts: Sequence[Part]) -> list[list[TensorSpec]]:
        """Return the specs of the tensors that will be sent, bucket by bucket."""
        [planned] = self.executor.call_ranks(self.ranks[:1], "planned_weights", self.bucket_bytes, parts)
        buckets: list[list[TensorSpec]] = planned
        return buckets

    def is_linked(self, group: BroadcastGroup) -> bool:
        """Whether the sending rank is in the group."""
        [answer] = self.executor.call_ranks(self.ranks[:1], "is_linked", group)
        return bool(answer)

    def begin(self, group: BroadcastGroup, parts: Sequence[Part]) -> Reply:
        """Begin to send. The first result of the reply is a `SendReport`."""
        arguments = (group, self.bucket_bytes, self.ranks[0], parts)
        return self.executor.begin("broadcast_weights", *arguments, ranks=self.ranks)


@dataclass(frozen=True)
class NamedWeights:
    """The weights of one actor state, before they are sent."""

    state: State
    names: tuple[str, ...]
    """Hugging Face names of all weights. The engines must hold all of them."""
    buckets: Callable[[Sequence[Part]], Iterator[Bucket]]
    """Returns a new iterator over these parts (`RankSource.buckets_for_engines`)."""
    senders: Callable[[], Sequence[PipelineRankSender]]
    """`RankSource.senders`."""
    to_keep: Callable[[Sequence[Part]], Iterator[Bucket]]
    """`RankSource.buckets_to_keep`."""
    constant: frozenset[str] = frozenset()
    """Names of the weights of the constant part. All states of the run have the same."""


def _merged(copies: Sequence[Bucket]) -> Bucket:
    """Merge the copies of a bucket from several ranks into one bucket. Raises WeightSyncError if the copies
    differ."""
    first, *others = copies
    for name, checksum in first.checksums.items():
        for other in others:
            if other.checksums.get(name) != checksum:
                raise WeightSyncError(
                    f"data ranks of the actor hold different weights: `{name}` is {checksum} on one rank and "
                    f"{other.checksums.get(name)} on another",
                    hint="`ppoctl resume RUN` loads one state into all ranks; if it happens again, report it with "
                    "the layout",
                )
    contents = [content for bucket in copies for content in bucket.contents]
    # A reader takes the first location that it can read. Any process can read a stored copy, so it must be last.
    contents.sort(key=lambda content: not isinstance(content, Shared))
    return Bucket(first.checksums, tuple(contents))
