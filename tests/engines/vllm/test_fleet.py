"""The queue that engines share, on engines that only count: who gets what, and what happens when one dies."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ppoctl.batch.records import State
from ppoctl.engines.turns import NoTurns, Turns
from ppoctl.engines.vllm.engine import Draw, Finished
from ppoctl.engines.vllm.fleet import Drawn, Fleet
from ppoctl.errors import HangError, PpoctlError, ProcessLostError, SenderLostError, WeightSyncError
from ppoctl.ports import SamplingParams
from ppoctl.weights.bucket import Bucket, bucket_of
from ppoctl.weights.canary import Canary
from ppoctl.weights.sending import NamedWeights
from ppoctl.weights.sync import EngineSide, Sync, TrainerSide

CANARY = Canary.of("float32", max_model_len=64, tolerance=None)
STATE = State("actor", 1, 1, "lineage")
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=8)


@dataclass
class Kept:
    host: "CountingHost"
    answer: Any

    def answers(self) -> list[Any]:
        if isinstance(self.answer, Exception):
            self.host.close()
            raise self.answer
        return [self.answer]


@dataclass
class CountingHost:
    """An engine that ends `speed` draws per call, in order."""

    speed: int
    dies_in: list[int] = field(default_factory=list)
    """Calls of `advance`, over its whole life, in which it dies."""
    dies_at: list[str] = field(default_factory=list)
    """Other methods at which it dies, once each."""
    error: PpoctlError | None = None
    """Raised by `advance` instead."""
    misses: PpoctlError | None = None
    """Raised when it is handed weights."""
    log: list[str] = field(default_factory=list)
    in_place: bool = True
    open: list[Draw] = field(default_factory=list)
    drew: list[str] = field(default_factory=list)
    calls: int = 0
    most_open: int = 0

    def begin(self, method: str, *arguments: Any) -> Kept:
        self.log.append(method)
        if method in self.dies_at:
            self.dies_at.remove(method)
            return Kept(self, ProcessLostError("an engine died"))
        return Kept(self, getattr(self, f"_{method}")(*arguments))

    def close(self) -> None:
        self.log.append("close")
        self.open = []

    def _advance(self, draws: Sequence[Draw], params: SamplingParams) -> list[Finished] | Exception:
        assert params == PARAMS
        self.calls += 1
        self.open += draws
        self.most_open = max(self.most_open, len(self.open))
        if self.error is not None:
            return self.error
        if self.calls in self.dies_in:
            return ProcessLostError("an engine died")
        ended, self.open = self.open[: self.speed], self.open[self.speed :]
        self.drew += [draw.id for draw in ended]
        return [Finished(draw.id, (draw.seed,), (-0.5,), "stop", ()) for draw in ended]

    def _abort(self) -> None:
        self.open = []

    def _vocab_size(self) -> int:
        return 100

    def _score(self, tokens: tuple[int, ...]) -> list[float]:
        return [0.0] * (len(tokens) - 1)

    def _takes_weights(self) -> bool:
        return self.in_place

    def _sleep(self) -> None:
        pass

    def _restart(self, folder: str) -> list[Any]:
        self.log.append(" ".join(path.name for path in Path(folder).iterdir()))
        return []

    def _begin_weights(self) -> None:
        pass

    def _take_weights(self, bucket: Bucket) -> Exception | None:
        return self.misses

    def _end_weights(self) -> list[Any]:
        return []


Made = Callable[..., tuple[Fleet, list[str]]]


@pytest.fixture
def fleet_of(tmp_path) -> Made:
    def fleet_of(
        *engines: CountingHost, seqs_together: int = 8, turns: Turns | None = None, actor: list[str] | None = None
    ) -> tuple[Fleet, list[str]]:
        said: list[str] = []
        turns = turns or NoTurns()
        side = EngineSide(engines, first_done=list, turns=turns)

        def score(state: State, tokens: tuple[int, ...]) -> list[float]:
            turns.take("actor", lambda: (actor or []).append("leave"))
            return [0.0] * (len(tokens) - 1)

        trainer = TrainerSide(
            weights=lambda state: NamedWeights(state=state, names=(), buckets=lambda: iter(()), senders=lambda: ()),
            score=score,
            export=lambda state, folder: (folder / state.stamp).touch(),
        )
        return Fleet(side, Sync(trainer, side, CANARY), seqs_together, said.append), said

    return fleet_of


def draws(count: int) -> list[Draw]:
    return [Draw(f"d{number}", (1, 2), number) for number in range(count)]


def drawn_of(fleet: Fleet, count: int) -> list[Drawn]:
    fleet.open(PARAMS)
    try:
        fleet.submit(draws(count))
        return [one for drawn in iter(fleet.finished, []) for one in drawn]
    finally:
        fleet.abort()


def run(fleet: Fleet, count: int) -> dict[str, int]:
    """Sends by draw; every draw once, with its own answer."""
    fleet.prepare(STATE)
    drawn = drawn_of(fleet, count)
    assert sorted(one.finished.tokens[0] for one in drawn) == list(range(count))
    return {one.finished.id: one.sends for one in drawn}


def test_draws_go_to_all_engines_alike(fleet_of: Made):
    engines = [CountingHost(speed=1), CountingHost(speed=1), CountingHost(speed=1)]
    fleet, _ = fleet_of(*engines)
    assert set(run(fleet, 9).values()) == {1}
    assert [len(engine.drew) for engine in engines] == [3, 3, 3]


def test_a_slow_engine_draws_less_and_none_is_given_more_than_it_can_hold(fleet_of: Made):
    slow, fast = CountingHost(speed=1), CountingHost(speed=4)
    fleet, _ = fleet_of(slow, fast)
    run(fleet, 200)
    assert len(fast.drew) > 3 * len(slow.drew)
    assert max(slow.most_open, fast.most_open) == 10  # a quarter more than the eight decoded together


def test_draws_of_an_engine_that_dies_are_sent_again_once_and_it_is_brought_to_the_state(fleet_of: Made):
    dying, other = CountingHost(speed=1, dies_in=[2]), CountingHost(speed=1)
    fleet, said = fleet_of(dying, other)
    sends = run(fleet, 8)
    # 4 draws each; one had ended when it died over the other three.
    assert sorted(sends.values()) == [1] * 5 + [2] * 3
    assert len(said) == 1
    assert "an engine died; started again, and its 3 samples are drawn again" in said[0]
    closed = dying.log.index("close")
    assert dying.log[closed + 1 :][:3] == ["takes_weights", "begin_weights", "end_weights"]
    assert other.log.count("begin_weights") == 1


def test_draws_that_two_engines_died_over_stop_the_run(fleet_of: Made):
    fleet, _ = fleet_of(CountingHost(speed=1, dies_in=[1, 2]))
    fleet.prepare(STATE)
    with pytest.raises(ProcessLostError):
        drawn_of(fleet, 4)


@pytest.mark.parametrize("method", ["begin_weights", "end_weights", "score"])
def test_an_engine_that_dies_while_it_gets_weights_is_started_again_once(fleet_of: Made, method: str):
    dying, other = CountingHost(speed=1, dies_at=[method]), CountingHost(speed=1)
    fleet, said = fleet_of(dying, other)
    assert len(run(fleet, 4)) == 4
    assert said == ["an engine died; started again"]
    one, two = CountingHost(speed=1, dies_at=[method]), CountingHost(speed=1, dies_at=[method])
    fleet, said = fleet_of(one, two)
    assert len(run(fleet, 4)) == 4  # each of them may die
    twice = CountingHost(speed=1, dies_at=[method, method])
    fleet, _ = fleet_of(twice)
    with pytest.raises(ProcessLostError):
        fleet.prepare(STATE)


def test_engines_that_died_meanwhile_are_noticed_together(fleet_of: Made):
    """One of them twice, the other once before: no more tries are needed than one engine's two deaths take."""
    one, two = CountingHost(speed=1, dies_at=["takes_weights"] * 2), CountingHost(speed=1, dies_at=["takes_weights"])
    fleet, said = fleet_of(one, two)
    assert len(run(fleet, 4)) == 4
    assert said == ["an engine died; an engine died; started again", "an engine died; started again"]


def test_a_trainer_that_dies_is_not_taken_for_an_engine(fleet_of: Made, monkeypatch: pytest.MonkeyPatch):
    engine = CountingHost(speed=1)
    fleet, said = fleet_of(engine)

    def dead(state: State, tokens: tuple[int, ...]) -> list[float]:
        raise ProcessLostError("process 1 of the actor's 2 died")

    trainer = fleet._sync.trainer
    monkeypatch.setattr(fleet._sync, "trainer", TrainerSide(trainer.weights, dead, trainer.export))
    with pytest.raises(ProcessLostError, match="of the actor's 2 died"):
        fleet.prepare(STATE)
    assert said == []
    assert "close" not in engine.log


@pytest.mark.parametrize(("buckets", "says"), [(3, "process 1 of the actor's 2 died"), (1, "weights were lost")])
def test_a_sender_that_dies_is_not_taken_for_an_engine(fleet_of: Made, monkeypatch, buckets: int, says: str):
    """An engine notices, and is not to blame. Ranks that are asked for more say which of them it was."""

    def sent() -> Iterator[Bucket]:
        yield from [bucket_of([])] * min(buckets, 2)
        if buckets > 2:
            raise ProcessLostError("process 1 of the actor's 2 died")

    engine, other = CountingHost(speed=1, misses=SenderLostError("weights were lost")), CountingHost(speed=1)
    fleet, said = fleet_of(engine, other)
    weights = NamedWeights(state=STATE, names=(), buckets=sent, senders=lambda: ())
    monkeypatch.setattr(fleet._sync, "trainer", replace(fleet._sync.trainer, weights=lambda state: weights))
    with pytest.raises(ProcessLostError, match=says):
        fleet.prepare(STATE)
    assert said == []
    assert [host.log.count("begin_weights") for host in (engine, other)] == [1, 1]
    assert engine.log[-1] == other.log[-1] == "close"  # both have half of them


def test_an_engine_starts_anew_on_an_export_that_it_sees_when_the_trainer_has_left(fleet_of: Made, tmp_path):
    turns, engine = Turns(), CountingHost(speed=1, in_place=False)
    fleet, _ = fleet_of(engine, turns=turns)
    sync, seen = fleet._sync, tmp_path / "seen by all"
    seen.mkdir()

    def export(state: State, folder: Path) -> None:
        assert folder.parent == seen
        turns.take("actor", lambda: engine.log.append("the actor leaves"))

    sync.trainer, sync.side = replace(sync.trainer, export=export), replace(sync.side, exports=seen)
    fleet.prepare(STATE)
    assert engine.log[:3] == ["takes_weights", "the actor leaves", "restart"]
    assert list(seen.iterdir()) == []


def test_an_engine_that_died_starts_anew_when_the_trainer_has_left(fleet_of: Made, monkeypatch):
    turns, dying = Turns(), CountingHost(speed=1, dies_at=["end_weights"])
    fleet, _ = fleet_of(dying, turns=turns)
    trainer = fleet._sync.trainer

    def weights(state: State) -> NamedWeights:
        turns.take("actor", lambda: dying.log.append("the actor leaves"))
        return trainer.weights(state)

    monkeypatch.setattr(fleet._sync, "trainer", replace(trainer, weights=weights))
    fleet.prepare(STATE)
    again = dying.log.index("takes_weights", 1)
    assert "the actor leaves" in dying.log[:again]


def test_engines_sleep_when_another_role_has_its_turn_and_not_while_it_sends_weights(fleet_of: Made):
    turns, actor, critic = Turns(), ["born"], ["born"]
    engines = [CountingHost(speed=1), CountingHost(speed=1)]
    fleet, _ = fleet_of(*engines, turns=turns, actor=actor)
    turns.take("critic", lambda: critic.append("leave"))
    run(fleet, 4)
    assert critic == ["born", "leave"]  # before the engines start, which ask how much memory is free
    assert actor == ["born", "leave"]  # once it has sent its weights and answered the canary
    assert "sleep" not in engines[0].log
    turns.take("critic", lambda: critic.append("leave"))
    assert [engine.log[-1] for engine in engines] == ["sleep", "sleep"]
    log = list(engines[0].log)
    run(fleet, 4)  # at the same state: they wake, and get no weights
    assert critic == ["born", "leave", "leave"]
    assert set(engines[0].log[len(log) :]) == {"advance"}


def test_engines_at_work_do_not_sleep_while_another_is_brought_to_the_state(fleet_of: Made):
    turns = Turns()
    dying, other = CountingHost(speed=1, dies_in=[2]), CountingHost(speed=1)
    fleet, _ = fleet_of(dying, other, turns=turns)
    run(fleet, 8)
    assert dying.log.count("begin_weights") == 2
    assert "sleep" not in other.log


def test_an_engine_that_dies_when_it_is_to_sleep_is_started_again_when_it_is_needed(fleet_of: Made):
    turns = Turns()
    dying, other = CountingHost(speed=1, dies_at=["sleep"]), CountingHost(speed=1)
    fleet, said = fleet_of(dying, other, turns=turns)
    run(fleet, 4)
    turns.take("critic", lambda: None)
    assert said == ["an engine died"]
    run(fleet, 4)
    assert dying.log.count("begin_weights") == 2
    assert other.log.count("begin_weights") == 1


def test_equal_states_cost_nothing_and_a_replayed_one_is_another(fleet_of: Made):
    engine = CountingHost(speed=1)
    fleet, _ = fleet_of(engine)
    for replay in (0, 0, 1, 1):
        fleet.prepare(State("actor", 1, 1, "lineage", replay=replay))
    assert engine.log.count("begin_weights") == 2


def test_a_hang_names_the_samples(fleet_of: Made):
    engine = CountingHost(speed=1, error=HangError("the engine has not finished", hint="look"))
    fleet, _ = fleet_of(engine)
    fleet.prepare(STATE)
    with pytest.raises(HangError, match=r"not finished\n  2 samples: d0, d1") as caught:
        drawn_of(fleet, 2)
    assert caught.value.hint == "look"
    assert engine.log[-1] == "close"  # and it was not started again to be told to forget


def test_a_stream_that_is_left_leaves_nothing_behind(fleet_of: Made):
    engine = CountingHost(speed=1)
    fleet, _ = fleet_of(engine)
    fleet.prepare(STATE)
    fleet.open(PARAMS)
    fleet.submit(draws(6))
    assert len(fleet.finished()) == 1
    fleet.abort()
    assert engine.log[-1] == "abort"
    assert len(run(fleet, 6)) == 6


def test_an_error_of_the_proof_leaves_the_engines_at_no_state(fleet_of: Made, monkeypatch: pytest.MonkeyPatch):
    engine = CountingHost(speed=1)
    fleet, _ = fleet_of(engine)
    with monkeypatch.context() as planted:
        planted.setattr(engine, "_score", lambda tokens: [1.0] * (len(tokens) - 1))
        with pytest.raises(WeightSyncError, match="canary"):
            fleet.prepare(STATE)
    fleet.prepare(STATE)
    assert engine.log.count("begin_weights") == 2


def test_an_engine_that_cannot_take_weights_is_restarted_on_an_export_and_asked(fleet_of: Made, monkeypatch):
    engine = CountingHost(speed=1, in_place=False)
    fleet, _ = fleet_of(engine)
    fleet.prepare(STATE)
    assert engine.log == ["takes_weights", "restart", STATE.stamp, "vocab_size", "score"]
    monkeypatch.setattr(engine, "_score", lambda tokens: [1.0] * (len(tokens) - 1))
    with pytest.raises(WeightSyncError, match="canary"):
        fleet.prepare(State("actor", 2, 2, "next"))
