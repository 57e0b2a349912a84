"""Broadcast of weights to engines of one and of several tensor ranks: each rank is one member of the group, and gets
every bucket in order. The driver's calls are on fakes; the group itself is of gloo, in forked processes."""

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from ppoctl.core.batch.records import State
from ppoctl.core.errors import WeightSyncError
from ppoctl.engines.weights.broadcast import BroadcastGroup, BroadcastSource, meeting
from ppoctl.engines.weights.broadcast_groups import BroadcastWay
from ppoctl.engines.weights.bucket import NamedTensors, TensorSpec
from ppoctl.engines.weights.canary import Canary, CanaryScores
from ppoctl.engines.weights.engine_calls import CompletedReply, Reply
from ppoctl.engines.weights.receiving import ReceivingEngine
from ppoctl.engines.weights.sending import NamedWeights, PipelineRankSender, SendReport
from ppoctl.engines.weights.sync import EngineSide, Sync, TrainerSide
from ppoctl.models.convert.checksum import LoadedWeight, SentChecksums, checksum_of

STATE = State("actor", 1, 1, "lineage")
STAGES: tuple[dict[str, Tensor], ...] = (
    {"a": torch.arange(4.0), "b": torch.arange(6.0)},
    {"c": torch.ones(3)},
)
"""Weights of each pipeline rank; each tensor is a bucket."""
RANKS = ((0, 1), (2, 3))
"""Ranks of the trainer of each pipeline rank."""


@dataclass
class Trainer:
    """An `Executor` whose pipeline ranks have the weights of `STAGES`."""

    calls: list[tuple[Any, ...]]
    linked: set[BroadcastGroup] = field(default_factory=set)

    def call_ranks(self, ranks: Sequence[int], method: str, *arguments: Any) -> list[Any]:
        if method == "is_linked":
            return [arguments[0] in self.linked for _ in ranks]
        assert method == "planned_weights"
        return [[[spec] for spec in self.specs(rank)] for rank in ranks]

    def begin(self, method: str, group: BroadcastGroup, *_: Any, ranks: Sequence[int]) -> Reply:
        self.calls.append((method, group, tuple(ranks)))
        self.linked.add(group)
        checksums = {name: checksum_of(tensor) for name, tensor in STAGES[ranks[0] // 2].items()}
        return CompletedReply([SendReport(checksums, arrived=True), *[None] * (len(ranks) - 1)])

    def specs(self, rank: int) -> list[TensorSpec]:
        return [TensorSpec(name, each.dtype, tuple(each.shape)) for name, each in STAGES[rank // 2].items()]


@dataclass
class Engine:
    """An engine of several tensor ranks, each of which has the weights that it was sent."""

    number: int
    ranks: int
    calls: list[tuple[Any, ...]]
    has_left: bool = False
    flips: bool = False
    """Whether one bit of a weight differs when the weights are read back."""
    closed: int = 0
    linked: set[BroadcastGroup] = field(default_factory=set)
    names: list[str] = field(default_factory=list)

    def begin(self, method: str, *arguments: Any) -> Reply:
        self.calls.append((method, self.number, *arguments))
        return CompletedReply([getattr(self, f"_{method}")(*arguments)] * self.ranks)

    def close(self) -> None:
        self.closed += 1

    def _takes_weights(self) -> bool:
        return True

    def _vocab_size(self) -> int:
        return 50

    def _begin_weights(self) -> None:
        self.names = []

    def _is_linked(self, group: BroadcastGroup) -> bool:
        return group in self.linked and not self.has_left

    def _receive_weights(self, group: BroadcastGroup, _: int, plan: list[list[TensorSpec]]) -> None:
        self.linked.add(group)
        self.names += [spec.name for bucket in plan for spec in bucket]

    def _end_weights(self) -> list[LoadedWeight]:
        every = {name: tensor + (name == "c" and self.flips) for stage in STAGES for name, tensor in stage.items()}
        return [LoadedWeight(name, checksum_of(every[name]), None) for name in self.names]

    def _score(self, tokens: Sequence[int], count: int) -> CanaryScores:
        return CanaryScores((0.0,) * (len(tokens) - 1), (0,) * count, (0.0,) * count)


@dataclass
class Bench:
    """A driver with these engines."""

    sync: Sync
    engines: list[Engine]
    trainer: Trainer
    calls: list[tuple[Any, ...]]

    def transfer(self, count: int | None = None) -> list[BroadcastGroup]:
        """Transfer the weights to the first engines, and return the groups in the order of the senders."""
        self.calls.clear()
        senders = [PipelineRankSender(self.trainer, ranks, 1) for ranks in RANKS]
        names = tuple(name for stage in STAGES for name in stage)
        weights = NamedWeights(STATE, names, lambda _: iter(()), lambda: senders, lambda _: iter(()))
        side = TrainerSide(lambda: weights, lambda tokens: [0.0] * (len(tokens) - 1), lambda _: SentChecksums())
        self.sync.prepare(self.engines[:count], side, STATE)
        return [call[1] for call in self.calls if call[0] == "broadcast_weights"]


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    number, ranks = request.param
    calls: list[tuple[Any, ...]] = []
    engines = [Engine(each, ranks, calls) for each in range(number)]
    way = BroadcastWay(lambda: "127.0.0.1", 60.0, engine_ranks=ranks)
    side = EngineSide(engines, lambda replies: list(replies), way)
    made = Bench(Sync(lambda _: None, side, Canary.of("float32", 64, None)), engines, Trainer(calls), calls)  # type: ignore[arg-type,return-value]
    yield made
    made.sync.close()


SIZES = [(1, 1), (2, 1), (1, 3), (3, 2)]


@pytest.mark.parametrize("bench", SIZES, indirect=True, ids=lambda size: f"{size[0]} engines of {size[1]} ranks")
def test_each_rank_of_each_engine_is_one_member_of_each_group(bench: Bench) -> None:
    groups = bench.transfer()
    assert [group.sender for group in groups] == [ranks[0] for ranks in RANKS]
    count, ranks = len(bench.engines), bench.engines[0].ranks
    for number, group in enumerate(groups):
        first = {call[1]: call[3] for call in bench.calls if call[0] == "receive_weights" and call[2] == group}
        members = [first[engine] + rank for engine in range(count) for rank in range(ranks)]
        assert sorted(members) == list(range(1, group.size))
        plan = [[spec] for spec in bench.trainer.specs(RANKS[number][0])]
        assert all(call[4] == plan for call in bench.calls if call[0] == "receive_weights" and call[2] == group)
    assert [call[2] for call in bench.calls if call[0] == "broadcast_weights"] == list(RANKS)


@pytest.mark.parametrize("bench", [(2, 2)], indirect=True)
def test_all_engines_begin_before_the_first_sender_and_end_after_the_last(bench: Bench) -> None:
    bench.transfer()
    order = [(name, rest[0]) for name, *rest in bench.calls if name.endswith("_weights") and name != "takes_weights"]
    senders = [("broadcast_weights", group) for group in (bench.calls[i][1] for i, call in enumerate(bench.calls)
               if call[0] == "broadcast_weights")]  # fmt: skip
    receives = [("receive_weights", number) for number in (0, 1)]
    assert order == [
        *(("begin_weights", number) for number in (0, 1)),
        senders[0], *receives, senders[1], *receives,
        *(("end_weights", number) for number in (0, 1)),
    ]  # fmt: skip
    assert [call[1] for call in bench.calls if call[0] == "score"] == [0, 1]


@pytest.mark.parametrize("bench", [(3, 2)], indirect=True)
def test_group_is_reused_while_all_of_its_members_are_in_it(bench: Bench) -> None:
    first = bench.transfer()
    assert bench.transfer() == first
    bench.engines[1].has_left = True
    second = bench.transfer()
    assert not {*second} & {*first}
    bench.engines[1].has_left = False
    assert bench.transfer() == second
    assert [group.size for group in bench.transfer(2)] == [1 + 2 * 2] * 2
    bench.trainer.linked.clear()
    assert not {*bench.transfer()} & {*first, *second}


@pytest.mark.parametrize("bench", [(3, 2)], indirect=True)
@pytest.mark.parametrize("broken", [0, 1, 2])
def test_wrong_weight_of_any_engine_is_found_and_all_engines_are_sent_everything_again(
    bench: Bench, broken: int
) -> None:
    bench.engines[broken].flips = True
    with pytest.raises(WeightSyncError, match="`c`"):
        bench.transfer()
    bench.engines[broken].flips = False
    bench.transfer()
    assert [engine.names for engine in bench.engines] == [["a", "b", "c"]] * 3


class Rank(ReceivingEngine):
    """One tensor rank of an engine, which notes what it loads."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.loaded: list[tuple[str, list[float]]] = []

    def load(self, tensors: NamedTensors) -> None:
        self.loaded += [(name, tensor.tolist()) for name, tensor in tensors]

    def tensor_rank(self) -> int:
        return self.rank

    takes_weights = holds_weights = begin_weights = end_weights = restart = None  # type: ignore[assignment]


PLAN = [[TensorSpec("a", torch.float32, (2,)), TensorSpec("b", torch.float32, (1,))],
        [TensorSpec("c", torch.float32, (3,))], [TensorSpec("d", torch.float32, (1,))]]  # fmt: skip


def receive(pipe: Connection, group: BroadcastGroup, first_rank: int, tensor_rank: int) -> None:
    torch.set_num_threads(1)
    engine = Rank(tensor_rank)
    engine.receive_weights(group, first_rank, PLAN)
    pipe.send(engine.loaded)


def test_every_tensor_rank_receives_every_bucket_in_order() -> None:
    """Two engines of two tensor ranks. The sender is this process."""
    context = multiprocessing.get_context("fork")
    with meeting("127.0.0.1", 60.0) as address:
        group = BroadcastGroup(0, address, 1 + 2 * 2, 60.0)
        children = []
        for engine in (0, 1):
            for tensor_rank in (0, 1):
                ours, theirs = context.Pipe()
                arguments = (theirs, group, 1 + 2 * engine, tensor_rank)
                child = context.Process(target=receive, args=arguments, daemon=True)
                child.start()
                children.append((ours, child))
        source, number = BroadcastSource(group, torch.device("cpu")), 0
        for specs in PLAN:
            tensors = []
            for spec in specs:
                number += 1
                tensors.append((spec.name, torch.full(spec.shape, float(number))))
            source.send(tensors)
        assert source.finish()
        expected = [("a", [1.0, 1.0]), ("b", [2.0]), ("c", [3.0, 3.0, 3.0]), ("d", [4.0])]
        for pipe, child in children:
            assert pipe.poll(60)
            assert pipe.recv() == expected
            child.join(60)
