"""The request queue that engines share, with counting engines: distribution of requests, and deaths of engines."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fleet_bench import EVERYONE, NEXT, PARAMS, STATE, CountingHost, bench_of, fleet_of, generate_all, requests, run

from ppoctl.core.batch.records import State
from ppoctl.core.errors import HangError, ProcessLostError, SenderLostError, WeightSyncError
from ppoctl.core.measured import MEASUREMENTS
from ppoctl.engines.weights.bucket import Bucket, bucket_of
from ppoctl.engines.weights.device_sharing import DeviceSharing
from ppoctl.engines.weights.engine_calls import EngineHandle
from ppoctl.engines.weights.sending import NamedWeights, Part
from ppoctl.models.convert.checksum import SentChecksums


def test_requests_are_split_evenly_between_engines():
    engines = [CountingHost(speed=1), CountingHost(speed=1), CountingHost(speed=1)]
    fleet, _ = fleet_of(*engines)
    assert set(run(fleet, 9).values()) == {1}
    assert [len(engine.drew) for engine in engines] == [3, 3, 3]


def test_slow_engine_gets_fewer_requests_within_queue_limit():
    slow, fast = CountingHost(speed=1), CountingHost(speed=4)
    fleet, _ = fleet_of(slow, fast)
    run(fleet, 200)
    assert len(fast.drew) > 3 * len(slow.drew)
    assert max(slow.most_open, fast.most_open) == 10  # a quarter more than the eight decoded together


def test_dead_engine_is_restored_and_its_requests_are_resent():
    dying, other = CountingHost(speed=1, dies_in=[2]), CountingHost(speed=1)
    fleet, messages = fleet_of(dying, other)
    sends = run(fleet, 8)
    # 4 requests each; one had finished when the engine died with the other three.
    assert sorted(sends.values()) == [1] * 5 + [2] * 3
    assert len(messages) == 1
    assert "an engine died; restarting, and its 3 samples are generated again" in messages[0]
    closed = dying.log.index("close")
    assert dying.log[closed + 1 :][:4] == ["begin_weights", "take_weights", "end_weights", "score"]
    assert other.log.count("begin_weights") == 1


def test_requests_that_kill_two_engines_stop_the_run():
    fleet, _ = fleet_of(CountingHost(speed=1, dies_in=[1, 2]))
    fleet.prepare(STATE)
    with pytest.raises(ProcessLostError):
        generate_all(fleet, 4)


@pytest.mark.parametrize("state", [STATE, NEXT], ids=["the first state", "another state"])
def test_trainer_reaches_state_before_engines_get_device(monkeypatch, state: State):
    """A trainer that is created, loaded or updated takes memory that the engines use: they start, or wake, after it
    is offloaded."""
    sharing, engine = DeviceSharing(EVERYONE), CountingHost(speed=1)
    bench = bench_of(engine, sharing=sharing)
    if state is NEXT:
        run(bench.fleet, 4)

    def reach(_: State) -> None:
        sharing.acquire("actor", lambda: engine.log.append("the actor leaves"))
        engine.log.append("the actor is at its state")

    monkeypatch.setattr(bench.trainer, "reach", reach)
    before = len(engine.log)
    bench.fleet.prepare(state)
    slept = ["sleep"] if state is NEXT else []
    order = [*slept, "the actor is at its state", "the actor leaves", "takes_weights", "begin_weights"]
    assert engine.log[before:][: len(order)] == order


def test_trainer_is_not_moved_to_state_that_engines_hold(monkeypatch):
    bench = bench_of(CountingHost(speed=1))
    run(bench.fleet, 4)
    bench.trainer.has_moved_on = True
    run(bench.fleet, 4)


@pytest.mark.parametrize("method", ["begin_weights", "end_weights", "score"])
def test_engine_dying_in_weight_sync_is_restarted_once(method: str):
    dying, other = CountingHost(speed=1, dies_at=[method]), CountingHost(speed=1)
    fleet, messages = fleet_of(dying, other)
    assert len(run(fleet, 4)) == 4
    assert messages == ["an engine died; restarting"]
    one, two = CountingHost(speed=1, dies_at=[method]), CountingHost(speed=1, dies_at=[method])
    fleet, messages = fleet_of(one, two)
    assert len(run(fleet, 4)) == 4  # each of them may die
    twice = CountingHost(speed=1, dies_at=[method, method])
    fleet, _ = fleet_of(twice)
    with pytest.raises(ProcessLostError):
        fleet.prepare(STATE)


def test_engines_that_died_before_sync_are_restarted_together():
    """One engine dies twice, the other once before: the attempts for one engine's two deaths suffice."""
    one, two = CountingHost(speed=1, dies_at=["takes_weights"] * 2), CountingHost(speed=1, dies_at=["takes_weights"])
    fleet, messages = fleet_of(one, two)
    assert len(run(fleet, 4)) == 4
    assert messages == ["an engine died; an engine died; restarting", "an engine died; restarting"]


def test_trainer_death_is_not_treated_as_engine_death(monkeypatch: pytest.MonkeyPatch):
    engine = CountingHost(speed=1)
    bench = bench_of(engine)

    def dead(state: State, tokens: tuple[int, ...]) -> list[float]:
        raise ProcessLostError("process 1 of the actor's 2 died")

    monkeypatch.setattr(bench.trainer, "score", dead)
    with pytest.raises(ProcessLostError, match="of the actor's 2 died"):
        bench.fleet.prepare(STATE)
    assert bench.messages == []
    assert "close" not in engine.log


@pytest.mark.parametrize(("buckets", "says"), [(3, "process 1 of the actor's 2 died"), (1, "weights were lost")])
def test_sender_death_is_not_treated_as_engine_death(monkeypatch, buckets: int, says: str):
    """The engine reports an error but is not the cause. The call to the ranks shows which of them died."""

    def sent(parts: Sequence[Part]) -> Iterator[Bucket]:
        yield from [bucket_of([])] * min(buckets, 2)
        if buckets > 2:
            raise ProcessLostError("process 1 of the actor's 2 died")

    engine, other = CountingHost(speed=1, misses=SenderLostError("weights were lost")), CountingHost(speed=1)
    bench = bench_of(engine, other)
    weights = NamedWeights(STATE, (), sent, lambda: (), lambda parts: iter(()))
    monkeypatch.setattr(bench.trainer, "weights", lambda state: weights)
    with pytest.raises(ProcessLostError, match=says):
        bench.fleet.prepare(STATE)
    assert bench.messages == []
    assert [host.log.count("begin_weights") for host in (engine, other)] == [1, 1]
    assert engine.log[-1] == other.log[-1] == "close"  # both have half of them


def test_engine_restarts_on_export_after_trainer_offloads(monkeypatch, tmp_path):
    sharing, engine = DeviceSharing(EVERYONE), CountingHost(speed=1, in_place=False)
    bench = bench_of(engine, sharing=sharing, exports=lambda: tmp_path)
    fleet, inner = bench.fleet, bench.trainer.export

    def export(state: State, folder: Path) -> SentChecksums:
        assert folder.parent == tmp_path
        sharing.acquire("actor", lambda: engine.log.append("the actor leaves"))
        return inner(state, folder)

    monkeypatch.setattr(bench.trainer, "export", export)
    fleet.prepare(STATE)
    assert engine.log[:4] == ["takes_weights", "the actor leaves", "restart", STATE.stamp]
    fleet.close()


def test_dead_engine_restarts_after_trainer_offloads(monkeypatch):
    sharing, dying = DeviceSharing(EVERYONE), CountingHost(speed=1, dies_at=["end_weights"])
    bench = bench_of(dying, sharing=sharing)
    inner = bench.trainer.weights

    def weights(state: State) -> NamedWeights:
        sharing.acquire("actor", lambda: dying.log.append("the actor leaves"))
        return inner(state)

    monkeypatch.setattr(bench.trainer, "weights", weights)
    bench.fleet.prepare(STATE)
    again = dying.log.index("takes_weights", 1)
    assert "the actor leaves" in dying.log[:again]


def test_engines_sleep_for_other_roles_but_not_during_weight_sync():
    sharing, critic = DeviceSharing(EVERYONE), list[int]()
    engines = [CountingHost(speed=1), CountingHost(speed=1)]
    bench = bench_of(*engines, sharing=sharing)
    fleet, actor = bench.fleet, bench.trainer.left
    sharing.acquire("critic", lambda: critic.append(len(engines[0].log)))
    fleet.prepare(STATE)
    assert critic == [0]  # it was offloaded before the engines start, because they measure free memory
    assert actor == ["leave"]  # after it has sent its weights and answered the canary
    run(fleet, 4)
    assert "sleep" not in engines[0].log
    sharing.acquire("critic", lambda: critic.append(-1))
    assert [engine.log[-1] for engine in engines] == ["sleep", "sleep"]
    log = list(engines[0].log)
    bench.trainer.has_moved_on = True
    run(fleet, 4)  # at the same state: they are restored to it from the published weights
    assert critic == [0, -1]
    assert engines[0].log[len(log) :][:5] == ["begin_weights", "take_weights", "end_weights", "score", "advance"]
    assert engines[1].log.count("end_weights") == 2
    fleet.close()
    sharing.acquire("critic", lambda: None)
    assert engines[0].log[-1] == "close"  # and is not started only to be put to sleep


def test_engines_sleep_before_trainer_that_stays_on_device():
    sharing, engine = DeviceSharing(["generator"]), CountingHost(speed=1)
    bench = bench_of(engine, sharing=sharing)
    sharing.acquire("critic", lambda: engine.log.append("the critic leaves"))
    run(bench.fleet, 4)
    assert engine.log[-1] == "advance"
    sharing.acquire("critic", lambda: engine.log.append("the critic leaves"))
    assert engine.log[-1] == "sleep"
    run(bench.fleet, 4)
    assert bench.trainer.left == []
    assert "the critic leaves" not in engine.log


def test_running_engines_stay_awake_while_another_is_restored():
    sharing = DeviceSharing(EVERYONE)
    dying, other = CountingHost(speed=1, dies_in=[2]), CountingHost(speed=1)
    fleet, _ = fleet_of(dying, other, sharing=sharing)
    run(fleet, 8)
    assert dying.log.count("begin_weights") == 2
    assert "sleep" not in other.log


def test_engine_dying_in_sleep_is_restarted_on_next_use():
    sharing = DeviceSharing(EVERYONE)
    dying, other = CountingHost(speed=1, dies_at=["sleep"]), CountingHost(speed=1)
    bench = bench_of(dying, other, sharing=sharing)
    run(bench.fleet, 4)
    sharing.acquire("critic", lambda: None)
    assert bench.messages == ["an engine died"]
    bench.trainer.has_moved_on = True
    run(bench.fleet, 4)
    assert dying.log.count("begin_weights") == other.log.count("begin_weights") == 2


def test_engines_get_weights_from_trainer_if_none_are_kept():
    sharing, engine = DeviceSharing(EVERYONE), CountingHost(speed=1)
    bench = bench_of(engine, sharing=sharing)
    bench.trainer.keeps = False
    for _ in range(2):
        run(bench.fleet, 4)
        sharing.acquire("critic", lambda: None)
    assert engine.log.count("end_weights") == 2
    run(bench.fleet, 4)
    run(bench.fleet, 4)  # evaluated, then generated, without another role in between
    assert engine.log.count("end_weights") == 3


def test_equal_state_is_not_resent_but_replayed_state_is():
    engine = CountingHost(speed=1)
    fleet, _ = fleet_of(engine)
    for replay in (0, 0, 1, 1):
        fleet.prepare(State("actor", 1, 1, "lineage", replay=replay))
    assert engine.log.count("begin_weights") == 2


def test_hang_error_names_pending_samples():
    engine = CountingHost(speed=1, error=HangError("the engine has not finished", hint="look"))
    fleet, _ = fleet_of(engine)
    fleet.prepare(STATE)
    with pytest.raises(HangError, match=r"not finished\n  2 samples: d0, d1") as caught:
        generate_all(fleet, 2)
    assert caught.value.hint == "look"
    assert engine.log[-1] == "close"  # and it was not started again only to release memory


def test_late_requests_go_to_idle_engines_first():
    engines = [CountingHost(speed=1), CountingHost(speed=1)]
    fleet, _ = fleet_of(*engines)
    fleet.prepare(STATE)
    fleet.open(PARAMS)
    fleet.submit(requests(1))
    assert [engine.log[-1] for engine in engines] == ["advance", "score"]
    fleet.submit(requests(6)[1:])
    assert engines[1].log[-1] == "advance"
    ended = list(fleet.finished())
    assert fleet.open_requests == 6 - len(ended)
    fleet.submit(requests(8)[6:])
    ended += [one for finished in iter(fleet.finished, []) for one in finished]
    assert sorted(one.finished.id for one in ended) == [draw.id for draw in requests(8)]
    assert fleet.finished() == []


def test_finished_samples_are_returned_before_error_is_raised():
    fleet, _ = fleet_of(CountingHost(speed=1), CountingHost(speed=1, error=HangError("hung", hint="")))
    fleet.prepare(STATE)
    fleet.open(PARAMS)
    fleet.submit(requests(4))
    assert len(fleet.finished()) == 1
    with pytest.raises(HangError):
        fleet.finished()


def test_aborted_stream_leaves_no_requests():
    engine = CountingHost(speed=1)
    fleet, _ = fleet_of(engine)
    fleet.prepare(STATE)
    fleet.open(PARAMS)
    fleet.submit(requests(6))
    assert len(fleet.finished()) == 1
    fleet.abort()
    assert engine.log[-1] == "abort"
    assert len(run(fleet, 6)) == 6


def test_tokens_of_aborted_requests_and_of_replies_under_way_are_reported():
    """Each engine has finished one of three requests. The second one's reply has not been read: it has one token, and
    each of the four open requests has two."""
    fleet, _ = fleet_of(CountingHost(speed=1), CountingHost(speed=1))
    fleet.prepare(STATE)
    fleet.open(PARAMS)
    fleet.submit(requests(6))
    assert len(fleet.poll()) == 1
    MEASUREMENTS.take()
    fleet.abort()
    assert MEASUREMENTS.take().aborted_tokens == 4 * 2 + 1


def test_engine_without_in_place_update_restarts_and_is_verified(monkeypatch):
    engine = CountingHost(speed=1, in_place=False)
    fleet, _ = fleet_of(engine)
    fleet.prepare(STATE)
    assert engine.log == ["takes_weights", "restart", STATE.stamp, "vocab_size", "score"]
    monkeypatch.setattr(engine, "scores", 1.0)
    with pytest.raises(WeightSyncError, match="canary"):
        fleet.prepare(NEXT)


def test_canary_catches_wrong_decoding_before_generation():
    engines = CountingHost(speed=1), CountingHost(speed=1, decodes=-0.5)
    fleet, _ = fleet_of(*engines)
    with pytest.raises(WeightSyncError, match=r"differ by 0\.5 nats \(max over 8 generated tokens;"):
        fleet.prepare(STATE)
    assert "advance" not in engines[0].log + engines[1].log


def test_engines_with_different_canary_tokens_are_each_checked(monkeypatch):
    other = CountingHost(speed=1, first_token=7)
    bench = bench_of(CountingHost(speed=1), other, CountingHost(speed=1))
    scored: list[tuple[int, ...]] = []
    inner = bench.trainer.score

    def score(state: State, tokens: tuple[int, ...]) -> list[float]:
        scored.append(tokens[-8:])
        return inner(state, tokens)

    monkeypatch.setattr(bench.trainer, "score", score)
    assert len(run(bench.fleet, 4)) == 4
    assert scored == [(0, *range(1, 8)), (7, *range(1, 8))]
    other.decodes = -0.5
    with pytest.raises(WeightSyncError, match="generated tokens"):
        bench.fleet.prepare(NEXT)


def test_used_up_engine_process_is_replaced_on_restart(tmp_path):
    """On a GPU vLLM's memory for sleeping works for one start only."""
    dying, other = CountingHost(speed=1, in_place=False, dies_in=[2]), CountingHost(speed=1, in_place=False)
    bench = bench_of(dying, other, exports=lambda: tmp_path)
    begun: list[str] = []

    def begin_on(engine: EngineHandle, folder: str) -> None:
        engine.close()
        begun.append(folder)

    sync = bench.fleet._sync
    sync.side = replace(sync.side, begin_on=begin_on)
    assert len(run(bench.fleet, 8)) == 8
    for host, starts in ((dying, 2), (other, 1)):
        places = [place for place, messages in enumerate(host.log) if messages == "restart"]
        assert len(places) == starts
        assert all(host.log[place - 1] == "close" for place in places)
    assert len(begun) == 3
    assert {Path(folder).parent for folder in begun} == {tmp_path}
    bench.fleet.close()


def test_memory_of_engines_is_reported_when_all_requests_have_finished() -> None:
    """An engine that dies meanwhile is left out, and restarted by the next rollout."""
    engines = [CountingHost(speed=1, peak_bytes=peak) for peak in (50, 90, 70)]
    engines[1].dies_at = ["take_usage"]
    fleet, messages = fleet_of(*engines)
    MEASUREMENTS.take()
    run(fleet, 6)
    assert MEASUREMENTS.take().engine_peak_bytes == 70
    assert messages == ["an engine died"]
    fleet.submit(requests(1))
    fleet.abort()
    assert MEASUREMENTS.take().engine_peak_bytes == 0, "the rollout was stopped"
    run(fleet, 6)
    assert MEASUREMENTS.take().engine_peak_bytes == 90
