"""A restarted engine is restored from the weights of the last transfer, because the trainer has moved on by then."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fleet_bench import EVERYONE, NEXT, PARAMS, STATE, CountingHost, FleetBench, bench_of, requests, run
from torch import Tensor

from ppoctl.core.batch.records import State
from ppoctl.core.errors import ProcessLostError, SenderLostError, WeightSyncError
from ppoctl.engines.vllm.fleet import Fleet
from ppoctl.engines.weights.bucket import Bucket
from ppoctl.engines.weights.device_sharing import DeviceSharing

WAYS = pytest.mark.parametrize("in_place", [True, False], ids=["buckets", "export"])


Opened = Callable[..., FleetBench]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Return prepared engines with six requests in progress; from then on the trainer must not be called."""
    fleets: list[Fleet] = []

    def opened(
        *engines: CountingHost, frozen: Mapping[str, Tensor] | None = None, states: Sequence[State] = (STATE,)
    ) -> FleetBench:
        bench = bench_of(*engines, exports=lambda: tmp_path)
        bench.trainer.frozen = dict(frozen or {})
        fleets.append(bench.fleet)
        for state in states:
            bench.fleet.prepare(state)
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


def test_engine_dying_after_a_partial_transfer_gets_all_weights(opened: Opened) -> None:
    dying, other = CountingHost(speed=1, dies_in=[1]), CountingHost(speed=1)
    bench = opened(dying, other, frozen={"f": torch.full((4,), 5.0)}, states=(STATE, NEXT))
    assert dying.log.count("take_weights") == 3  # both parts, then one
    assert sum(len(ended) for ended in iter(bench.fleet.finished, [])) == 6
    for host in (dying, other):
        assert {name: tensor.tolist() for name, tensor in host.held.items()} == {"f": [5.0] * 4, "a": [2.0] * 3}
    assert dying.log.count("take_weights") == 5


def test_all_engines_get_all_weights_if_one_lacks_them(opened: Opened) -> None:
    slept, other = CountingHost(speed=1), CountingHost(speed=1)
    bench = opened(slept, other, frozen={"f": torch.full((4,), 5.0)})
    bench.trainer.has_moved_on = False
    bench.fleet.abort()
    slept.close()
    bench.fleet.prepare(NEXT)
    assert [host.log.count("take_weights") for host in (slept, other)] == [4, 4]


@pytest.mark.parametrize("restores", [False, True])
def test_everything_is_sent_after_a_failed_verification(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, restores: bool
) -> None:
    engine = CountingHost(speed=1, dies_in=[1] if restores else [])
    bench = opened(engine, frozen={"f": torch.full((4,), 5.0)})
    with monkeypatch.context() as planted:
        planted.setattr(engine, "scores", 1.0)
        with pytest.raises(WeightSyncError, match="canary"):
            _ = bench.fleet.finished() if restores else bench.sync_again(NEXT)
    bench.fleet.abort()
    num_taken = engine.log.count("take_weights")
    bench.sync_again(State("actor", 3, 3, "third"))
    assert engine.log.count("take_weights") == num_taken + 2
    bench.sync_again(State("actor", 4, 4, "fourth"))
    assert engine.log.count("take_weights") == num_taken + 3


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
