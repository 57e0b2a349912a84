"""Weights from real ranks to receiver processes, by a gloo process group and by shared memory: equal, verified, and
robust against deaths."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import megatron_lab as lab
import pytest
import torch
from layout_lab import LAYOUTS, settings, started_actor
from rank_pool import RankPool
from receivers import Defect, ReceiverHost, dies, first_done, flips_a_bit
from safetensors.torch import load_file
from torch import Tensor

from ppoctl.core.batch.records import State
from ppoctl.core.errors import ProcessLostError, WeightSyncError
from ppoctl.core.ports import SamplingParams
from ppoctl.engines.megatron.rank import MegatronRank
from ppoctl.engines.megatron.trainer import MegatronActor
from ppoctl.engines.vllm.fleet import Fleet
from ppoctl.engines.weights import broadcast
from ppoctl.engines.weights.broadcast_groups import BroadcastWay
from ppoctl.engines.weights.canary import Canary
from ppoctl.engines.weights.sending import PARTS, SenderRanks
from ppoctl.engines.weights.sync import EngineSide, Sync, TrainerSide
from ppoctl.models.convert.tensors import weight_names
from ppoctl.models.shape_reader import read_shape
from ppoctl.models.trainable import Trainable

STATE = State("actor", 1, 1, "lineage")
NAMES = ("TP2 sequence", "PP2", "TP2 PP2", "EP2", "DP2")
WAYS = ["broadcast", "shared"]
KINDS = {"EP2": "qwen3-moe"}
TIMEOUT_S = 100.0
SOON_S = 30.0
"""Detected errors take less time; undetected errors take `TIMEOUT_S`."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Some tests here leave calls of ranks unanswered: no other file uses these processes."""
    made = RankPool(4)
    yield made
    made.close()


@pytest.fixture
def engines() -> Iterator[list[ReceiverHost]]:
    made = [ReceiverHost("engine 0"), ReceiverHost("engine 1")]
    yield made
    for engine in made:
        engine.close()


def fleet_of(
    engines: list[ReceiverHost], actor: MegatronActor, way: str, host: Callable[[], str] = lambda: "127.0.0.1"
) -> tuple[Fleet, list[str]]:
    messages: list[str] = []
    broadcast = BroadcastWay(host, TIMEOUT_S, engine_ranks=1) if way == "broadcast" else None
    engine_side = EngineSide(engines, first_done, broadcast)

    def trainer_at(state: State) -> TrainerSide:
        return TrainerSide(lambda: actor.weights(state), lambda tokens: [0.0] * (len(tokens) - 1), actor.export)

    sync = Sync(trainer_at, engine_side, Canary.of("float32", max_model_len=64, tolerance=None))
    return Fleet(engine_side, sync, 8, messages.append), messages


def started(pool: RankPool, folder: Path, layout: str) -> MegatronActor:
    return started_actor(pool, settings(folder, "actor", LAYOUTS[layout]))


def held(engine: ReceiverHost) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in engine.begin("tensors").answers()[0].items()}


def assert_all_hold(engines: list[ReceiverHost], folder: Path) -> None:
    expected = load_file(folder / "model.safetensors")
    for engine in engines:
        found = held(engine)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("way", WAYS)
def test_engines_receive_exact_rank_weights(pool, model, engines, way: str, layout: str) -> None:
    folder = model(KINDS.get(layout, "qwen2"))
    actor = started(pool, folder, layout)
    fleet, messages = fleet_of(engines, actor, way)
    fleet.prepare(STATE)
    assert_all_hold(engines, folder)
    assert list(held(engines[0])) == list(weight_names(read_shape(folder)))
    assert messages == []
    fleet.prepare(State("actor", 2, 2, "next"))  # over the existing process groups
    assert_all_hold(engines, folder)
    fleet.close()


@pytest.mark.parametrize("way", WAYS)
def test_frozen_weights_are_sent_once_and_restored(pool, model, engines, way: str) -> None:
    """The first pipeline rank has nothing that changes. A restarted engine gets all weights: from memory of the ranks
    if it died after the second transfer, otherwise by a complete transfer."""
    folder = model("qwen2")
    chosen = replace(settings(folder, "actor", LAYOUTS["PP2"]), trainable=Trainable(top_layers=1))
    actor = started_actor(pool, chosen)
    fleet, messages = fleet_of(engines, actor, way)
    names = list(weight_names(read_shape(folder)))
    trained = [name for name in names if name.startswith(("model.layers.1.", "model.norm", "lm_head"))]

    def received() -> list[list[str]]:
        return [engine.begin("last_received").answers()[0] for engine in engines]

    fleet.prepare(STATE)
    assert [sorted(each) for each in received()] == [sorted(names)] * 2
    fleet.prepare(State("actor", 2, 2, "next"))
    assert received() == [trained] * 2
    assert_all_hold(engines, folder)
    engines[0].close()
    fleet._slots[0].is_verified = False  # as after a death during generation
    fleet.open(SamplingParams(temperature=1.0, max_new_tokens=2))
    assert sorted(received()[0]) == sorted(names)
    assert_all_hold(engines, folder)
    fleet.prepare(State("actor", 3, 3, "after"))
    assert received() == [trained] * 2
    engines[1].close()
    fleet.prepare(State("actor", 4, 4, "last"))
    assert [sorted(each) for each in received()] == [sorted(names)] * 2
    assert_all_hold(engines, folder)
    assert messages == []
    fleet.close()


def test_broadcast_group_is_reused_until_engine_restarts(pool, model, engines) -> None:
    folder, made = model("qwen2"), list[str]()
    actor = started(pool, folder, "PP2")

    def counted() -> str:
        made.append("meeting")
        return "127.0.0.1"

    fleet, messages = fleet_of(engines, actor, "broadcast", counted)
    for step in (1, 2, 3):
        fleet.prepare(State("actor", step, step, f"state {step}"))
    assert len(made) == 2  # one for each pipeline rank
    engines[0].close()  # as if it had died while generating
    fleet.prepare(State("actor", 4, 4, "state 4"))
    assert len(made) == 4
    assert_all_hold(engines, folder)
    assert messages == []
    fleet.close()


def test_unconnected_receiver_is_detected_before_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL connects with the first message, which would block until the deadline of a transfer."""

    class Deaf:
        def broadcast(self, *_: object) -> "Deaf":
            return self

        def wait(self) -> None:
            time.sleep(TIMEOUT_S)

    monkeypatch.setattr(torch.distributed, "ProcessGroupGloo", lambda *_: Deaf())
    begun = time.monotonic()
    with broadcast.meeting("127.0.0.1", TIMEOUT_S) as address:
        group = broadcast.BroadcastGroup(0, address, 1, TIMEOUT_S, connect_s=1.0)
        assert not broadcast.BroadcastSource(group, torch.device("cpu")).finish()
    assert time.monotonic() - begun < SOON_S
    assert not broadcast.is_linked(group)


def test_send_plan_matches_buckets(pool, model) -> None:
    actor = started(pool, model("qwen2"), "PP2")
    buckets = [list(bucket.checksums) for bucket in pool.weights().buckets()]
    planned = [[spec.name for spec in bucket] for sender in pool.weights().senders() for bucket in sender.plan(PARTS)]
    assert planned == buckets
    assert len(buckets) > 6
    assert actor.weights(STATE).names == tuple(name for bucket in buckets for name in bucket)


@pytest.mark.parametrize("way", WAYS)
def test_bit_flip_in_transfer_raises_error_naming_weight(pool, model, engines, way: str) -> None:
    actor = started(pool, model("qwen2"), "TP2 sequence")
    engines[1].defect = Defect(3, flips_a_bit)
    fleet, _ = fleet_of(engines, actor, way)
    name = pool.weights().senders()[0].plan(PARTS)[2][-1].name
    with pytest.raises(WeightSyncError, match=f"weight `{name}` was sent as"):
        fleet.prepare(STATE)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("layout", "bucket"), [("TP2 sequence", 0), ("PP2", 1), ("TP2 sequence", 4)])
@pytest.mark.parametrize("way", WAYS)
def test_engine_killed_during_transfer_is_restarted(pool, model, engines, way: str, layout: str, bucket: int) -> None:
    """Killed before it has joined; when the first bucket has arrived; in the middle."""
    actor = started(pool, model("qwen2"), layout)
    engines[1].defect = Defect(bucket, dies)
    fleet, messages = fleet_of(engines, actor, way)
    begun = time.monotonic()
    fleet.prepare(STATE)
    assert time.monotonic() - begun < SOON_S
    assert len(messages) == 1
    assert messages[0].endswith("; restarting")
    # In a broadcast all engines lose the buckets in flight; in shared memory each reads for itself.
    assert [engine.starts for engine in engines] == [2, 2]
    assert_all_hold(engines, model("qwen2"))


def test_repeatedly_dying_engines_end_the_run(pool, model, engines, monkeypatch) -> None:
    actor = started(pool, model("qwen2"), "TP2 sequence")
    begin = ReceiverHost.begin

    def always(self: ReceiverHost, method: str, *arguments: object) -> object:
        self.defect = Defect(2, dies)
        return begin(self, method, *arguments)

    monkeypatch.setattr(ReceiverHost, "begin", always)
    fleet, messages = fleet_of(engines, actor, "broadcast")
    with pytest.raises(ProcessLostError):
        fleet.prepare(STATE)
    assert len(messages) == 2  # as many attempts as there are engines, and one more


def kill_at_bucket(rank: MegatronRank, number: int, victim: int) -> None:
    """Plant a defect: this rank dies when this many buckets have been gathered."""
    from ppoctl.engines.weights import sending as module

    cut, count = module.in_buckets, iter(range(1000))

    def counting(*arguments: object) -> Iterator[object]:
        for bucket in cut(*arguments):
            if next(count) == number and torch.distributed.get_rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            yield bucket

    module.in_buckets = counting


@pytest.mark.sampled(2)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_rank_death_during_transfer_is_a_trainer_loss(
    model: Callable[[str], Path], engines: list[ReceiverHost], way: str, victim: int
) -> None:
    """The rank that sends, and one that only takes part in the gather."""
    own = RankPool(2)
    actor = started(own, model("qwen2"), "TP2 sequence")
    own.examine(kill_at_bucket, 3, victim)
    fleet, messages = fleet_of(engines, actor, way)
    begun = time.monotonic()
    with pytest.raises(ProcessLostError, match=f"rank {victim} died"):
        fleet.prepare(STATE)
    assert time.monotonic() - begun < SOON_S
    assert messages == []
    own.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layout", "ranks", "engines_on", "places"),
    [
        ("DP2", "ab", "a", 1),  # only the first rank sends
        ("DP2", "ab", "b", 1),  # only the second rank sends
        # Each shares on its node, and one stores the lasting copy.
        pytest.param("DP2", "ab", "ab", 3, marks=pytest.mark.pinned),
        ("DP2", "aa", "a", 1),
        ("DP2", "aa", "ab", 2),  # shared on a, in the store for b
        ("DP2", "aa", "b", 1),  # in the store alone
        ("TP2 sequence", "ab", "ab", 2),  # the tensor ranks have one complete copy, on the first rank's node
        ("TP2 PP2", "aabb", "ab", 2),  # each stage is on one node, and stored for the other
    ],
)
def test_each_node_reads_from_its_local_ranks_if_any(
    pool, model, monkeypatch, layout: str, ranks: str, engines_on: str, places: int
) -> None:
    folder = model("qwen2")
    started(pool, folder, layout)
    monkeypatch.setattr(pool, "places", list(ranks))
    monkeypatch.setattr(pool, "engine_nodes", list(engines_on))
    expected, found = load_file(folder / "model.safetensors"), list[str]()
    for bucket in pool.weights().buckets_for_engines():
        assert len(bucket.contents) == places
        for content in bucket.contents:
            assert all(torch.equal(tensor, expected[name]) for name, tensor in content.tensors())
        found += bucket.checksums
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(
    ("groups", "ranks_on", "engines_on", "senders"),
    [
        ([[0], [1]], "ab", "a", {"sharing": {0}, "keeping": {0}}),
        ([[0], [1]], "ab", "b", {"sharing": {1}, "keeping": {1}}),
        ([[0], [1]], "ab", "ab", {"sharing": {0, 1}, "storing": {0}}),
        ([[0], [1]], "aa", "ab", {"sharing": {0}, "storing": {0}}),  # for b
        ([[0], [1]], "aa", "b", {"storing": {0}}),
        (
            [[0, 2], [1, 3]],
            "abab",
            "b",
            {"sharing": {1}, "keeping": {1}},
        ),  # the first rank of a group has the gathered weights
        ([[0, 1], [2, 3]], "abba", "bc", {"sharing": {2}, "storing": {2}}),  # a rank that already shares also stores
        ([[0], [1]], "ab", "", {"storing": {0}}),  # no known engine
    ],
)
def test_one_rank_per_engine_node_shares_and_one_keeps_copy(
    groups: list[list[int]], ranks_on: str, engines_on: str, senders: dict[str, set[int]]
) -> None:
    expected = SenderRanks(**{what: frozenset(ranks) for what, ranks in senders.items()})
    assert SenderRanks.near(groups, ranks_on, engines_on) == expected


def test_last_buckets_stay_readable_until_next_role_call(pool, model, monkeypatch) -> None:
    """Engines are still reading when the driver receives the end of the buckets."""
    folder = model("qwen2")
    actor = started(pool, folder, "PP2")
    monkeypatch.setattr(pool, "engine_nodes", ["here", "there"])
    expected = load_file(folder / "model.safetensors")
    *_, before, last = pool.weights().buckets_for_engines()
    for name, tensor in [*before.tensors(), *last.tensors()]:
        assert torch.equal(tensor, expected[name])
    lab.scores(actor, lab.make_rollouts())
    with pytest.raises(ProcessLostError):
        last.tensors()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in last.lasting().tensors())


def change(rank: MegatronRank) -> None:
    """Change the weights, as an update does."""
    for model in rank.models:
        for weight in model.parameters():
            weight.data.add_(1.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["TP2 sequence", "PP2", "DP2"])
@pytest.mark.parametrize("way", WAYS)
def test_engine_is_restored_without_calling_ranks(pool, model, engines, monkeypatch, way: str, layout: str) -> None:
    folder = model("qwen2")
    actor = started(pool, folder, layout)
    fleet, _ = fleet_of(engines, actor, way)
    fleet.prepare(STATE)
    published = fleet._published
    assert published is not None
    pool.examine(change)
    engines[1].close()
    with monkeypatch.context() as moved_on:
        for method in ("call", "call_ranks", "begin"):
            moved_on.delattr(RankPool, method)
        fleet._sync.restore([engines[1]], published)
    assert_all_hold(engines, folder)
    lab.scores(actor, lab.make_rollouts())
    engines[1].close()
    fleet._sync.restore([engines[1]], published)
    assert_all_hold(engines, folder)
    fleet.prepare(State("actor", 2, 2, "next"))  # into the existing memory
    assert not torch.equal(
        held(engines[1])["model.norm.weight"], load_file(folder / "model.safetensors")["model.norm.weight"]
    )


def drift(rank: MegatronRank, victim: int) -> None:
    """Plant a defect: one weight of this rank differs in the last bit."""
    if torch.distributed.get_rank() == victim:
        weight = dict(rank.models[0].named_parameters())["decoder.final_layernorm.weight"]
        weight.data.view(torch.int32)[0] ^= 1


def test_diverged_data_ranks_raise_error_naming_weight(pool, model, monkeypatch) -> None:
    """For example after a failed collective on one of them: training would continue, each rank with a different
    model."""
    started(pool, model("qwen2"), "DP2")
    monkeypatch.setattr(pool, "places", ["a", "b"])
    monkeypatch.setattr(pool, "engine_nodes", ["a", "b"])
    pool.examine(drift, 1)
    with pytest.raises(
        WeightSyncError, match=r"data ranks of the actor hold different weights: `model\.norm\.weight`"
    ):
        list(pool.weights().buckets_for_engines())


def test_closing_rendezvous_releases_waiting_receiver() -> None:
    with broadcast.meeting("127.0.0.1", TIMEOUT_S) as address:
        engine = ReceiverHost("engine")
        engine.begin("begin_weights").answers()  # it is up
        waiting = engine.begin("receive_weights", broadcast.BroadcastGroup(0, address, 3, TIMEOUT_S), 1, [])
        assert not waiting.pipes[0].poll(2.0)
    begun = time.monotonic()
    with pytest.raises(ProcessLostError, match="the process group that broadcasts weights broke"):
        waiting.answers()
    assert time.monotonic() - begun < SOON_S


def test_late_sender_fails_soon_after_rendezvous_closed() -> None:
    with broadcast.meeting("127.0.0.1", TIMEOUT_S) as address:
        pass
    group = broadcast.BroadcastGroup(0, address, 2, TIMEOUT_S, connect_s=1.0)
    sending = broadcast.BroadcastSource(group, torch.device("cpu"))
    sending.send([("a", torch.ones(3))])  # to no receiver
    assert not sending.finish()
