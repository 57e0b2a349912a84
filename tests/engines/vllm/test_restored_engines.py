"""A restarted engine is restored from the weights of the last transfer, because the trainer has moved on by then."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fleet_bench import EVERYONE, NEXT, PARAMS, STATE, CountingHost, FleetBench, bench_of, requests, run

from ppoctl.engines.device_sharing import DeviceSharing
from ppoctl.engines.vllm.fleet import Fleet
from ppoctl.errors import ProcessLostError, SenderLostError, WeightSyncError
from ppoctl.weights.bucket import Bucket

WAYS = pytest.mark.parametrize("in_place", [True, False], ids=["buckets", "export"])


Opened = Callable[..., FleetBench]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Return prepared engines with six requests in progress; from then on the trainer must not be called."""
    fleets: list[Fleet] = []

    def opened(*engines: CountingHost) -> FleetBench:
        bench = bench_of(*engines, exports=lambda: tmp_path)
        fleets.append(bench.fleet)
        bench.fleet.prepare(STATE)
        bench.fleet.open(PARAMS)
        bench.fleet.submit(requests(6))
        bench.trainer.has_moved_on = True
        return bench

    yield opened
    for fleet in fleets:
        fleet.close()


@WAYS
def test_restored_engine_generates_from_prepared_state(opened: Opened, in_place: bool) -> None:
    dying = CountingHost(speed=1, dies_in=[2], in_place=in_place)
    bench = opened(dying, CountingHost(speed=1, in_place=in_place))
    finished = [one for ended in iter(bench.fleet.finished, []) for one in ended]
    assert sorted(one.finished.id for one in finished) == [draw.id for draw in requests(6)]
    assert {one.finished.logprobs for one in finished} == {(1.0,)}  # the engine's only weight: one update
    assert {one.sends for one in finished} == {1, 2}
    assert "close" in dying.log


@WAYS
def test_engine_restored_with_wrong_bytes_raises_error(opened: Opened, in_place: bool) -> None:
    dying = CountingHost(speed=1, dies_in=[1], in_place=in_place)
    bench = opened(dying)
    dying.spoils = True
    with pytest.raises(WeightSyncError, match=r"weight `a` was sent as .* but the engine holds"):
        bench.fleet.finished()


def test_restored_engine_failing_canary_raises_error(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = CountingHost(speed=1, dies_in=[1])
    bench = opened(dying)
    monkeypatch.setattr(dying, "scores", 1.0)
    with pytest.raises(WeightSyncError, match="canary"):
        bench.fleet.finished()


def test_engine_may_die_once_more_during_restore(opened: Opened) -> None:
    dying = CountingHost(speed=1, dies_in=[1])
    bench = opened(dying, CountingHost(speed=1))
    dying.dies_at = ["end_weights"]
    assert sum(len(ended) for ended in iter(bench.fleet.finished, [])) == 6
    assert bench.messages[1:] == ["an engine died; restarting"]
    bench = opened(dying := CountingHost(speed=1, dies_in=[1]))
    dying.dies_at = ["end_weights", "end_weights"]
    with pytest.raises(ProcessLostError):
        bench.fleet.finished()


def test_lost_published_weights_end_the_run(opened: Opened) -> None:
    dying = CountingHost(speed=1, dies_in=[1], misses=None)
    bench = opened(dying)
    dying.misses = SenderLostError("weights were lost")
    with pytest.raises(SenderLostError):
        bench.fleet.finished()
    assert len(bench.messages) == 1  # it was started again once


def test_restoring_sleeping_engine_does_not_load_trainer() -> None:
    sharing, left = DeviceSharing(EVERYONE), ["born"]
    bench = bench_of(CountingHost(speed=1, dies_at=["sleep"]), CountingHost(speed=1), sharing=sharing)
    run(bench.fleet, 4)
    sharing.acquire("critic", lambda: left.append("critic"))
    bench.trainer.has_moved_on = True
    run(bench.fleet, 4)
    assert left == ["born", "critic"]
    assert bench.trainer.left == ["leave"]


def test_published_weights_are_kept_until_next_transfer(tmp_path: Path) -> None:
    fleet = bench_of(CountingHost(speed=1, in_place=False), exports=lambda: tmp_path).fleet
    fleet.prepare(STATE)
    [first] = tmp_path.iterdir()
    fleet.prepare(STATE)
    assert list(tmp_path.iterdir()) == [first]
    fleet.prepare(NEXT)
    [second] = tmp_path.iterdir()
    assert second != first
    fleet.close()
    assert list(tmp_path.iterdir()) == []


def test_failed_transfer_removes_its_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CountingHost(speed=1, in_place=False)
    fleet = bench_of(engine, exports=lambda: tmp_path).fleet
    monkeypatch.setattr(engine, "scores", 1.0)
    with pytest.raises(WeightSyncError, match="canary"):
        fleet.prepare(STATE)
    assert list(tmp_path.iterdir()) == []


def test_failed_transfer_invalidates_previous_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its memory has been overwritten."""
    engine = CountingHost(speed=1)
    fleet = bench_of(engine).fleet
    fleet.prepare(STATE)
    with monkeypatch.context() as planted:
        planted.setattr(engine, "scores", 1.0)
        with pytest.raises(WeightSyncError, match="canary"):
            fleet.prepare(NEXT)
    num_calls = engine.log.count("takes_weights")
    fleet.prepare(STATE)
    assert engine.log.count("takes_weights") == num_calls + 1  # a separate transfer


@WAYS
def test_single_process_keeps_no_weights_and_sends_again(in_place: bool) -> None:
    sharing = DeviceSharing(EVERYONE)
    bench = bench_of(CountingHost(speed=1, dies_at=["sleep"], in_place=in_place), sharing=sharing)
    bench.trainer.keeps = False
    run(bench.fleet, 2)
    published = bench.fleet._published
    assert published is not None
    assert not published.can_restore
    sharing.acquire("critic", lambda: None)
    run(bench.fleet, 2)
    assert bench.fleet._published is not published


def test_published_buckets_contain_only_lasting_content(opened: Opened) -> None:
    """Otherwise published weights would be read from memory that is overwritten."""
    dying = CountingHost(speed=1, dies_in=[1])
    bench = opened(dying)
    published = bench.fleet._published
    assert published is not None
    bucket: Bucket = published.buckets[0]
    assert replace(bucket, contents=()).lasting().contents == ()
    assert all(content.lasts for content in bucket.contents)
    assert len(bucket.contents) == 1
