"""The state machine of an episode, and many episodes on one stream, on hand-made turns."""

import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fakes.components import fake_recipe
from fakes.conversations import NumberDialogue
from ppoctl.algorithms.distribution import rollout_sampling
from ppoctl.algorithms.sizes import generator_window, longest_sequence
from ppoctl.algorithms.stages.episode_events import as_json, from_json
from ppoctl.algorithms.stages.episode_loop import EpisodeLoop
from ppoctl.algorithms.stages.episode_runner import EpisodeState, Event, Observed, Open, Opened, Step, replayed
from ppoctl.algorithms.stages.generation import RequestBatch, SampleGeneration
from ppoctl.algorithms.stages.rollout import assemble
from ppoctl.core.batch.episodes import (
    ControlTokensError,
    EnvironmentFailure,
    EpisodeLimits,
    EpisodeSettings,
    Observation,
    Outcome,
    Past,
    ToolCall,
    Turn,
)
from ppoctl.core.batch.prompts import Message, Prompt, Prompts
from ppoctl.core.batch.records import TERMINATED, TRUNCATED, Rollouts
from ppoctl.core.batch.seeds import derive_seed
from ppoctl.core.errors import PreemptedError
from ppoctl.core.ports import EpisodeEntry, Sample, SampleRequest, SampleSetKey, SamplingParams
from stages.test_rollout_to_evaluation import Some, unwatched

PROMPT = Prompt("a", (5, 6), "question", "even", messages=(Message("user", "question"),))
REQUEST = SampleRequest("a#0", PROMPT.token_ids, 77, PROMPT)
PARAMS = SamplingParams(1.0, 20)
LIMITS = EpisodeLimits(turns=3, tokens=30, tokens_per_turn=7)
CALL = ToolCall("calculator", {"expression": "1+2", "digits": [1, {"of": None}]})


def turn(number: int, *tokens: int, terminated: bool = True, **fields: Any) -> Sample:
    logprobs = tuple(-token / 8 for token in tokens)
    return Sample(f"a#0/{number}", tokens, logprobs, terminated, f"turn {number}", f"s{number}", **fields)


def says(text: str, reward: float = 0.0, *, done: bool = False, **metrics: float) -> Observation:
    return Observation((Message("tool", text),), reward, done, metrics)


OPENED = Opened(Observation())
FIRST = turn(1, 2, 3, 1, calls=(CALL,), sends=2)
SECOND = turn(2, 4, 9, malformed="no JSON")


def after(*events: Event, params: SamplingParams = PARAMS, limits: EpisodeLimits = LIMITS) -> EpisodeState:
    return replayed(REQUEST, params, limits, events)


def test_episode_alternates_between_requests_and_steps() -> None:
    past = Past("a#0", after().action.start.row, 77)  # type: ignore[union-attr]
    assert (past.row.id, past.row.prompt, past.row.truth) == ("a", "question", "even")
    assert after().action == Open(past)
    assert after(OPENED).action == SampleRequest("a#0/1", (5, 6), 77, max_new_tokens=7)
    first = Turn("turn 1", (2, 3, 1), (CALL,))
    assert after(OPENED, FIRST).action == Step(past, first)
    answer = says("8 9", 0.5)
    assert after(OPENED, FIRST, Observed(answer, (8, 9, 10))).action == SampleRequest(
        "a#0/2", (5, 6, 2, 3, 1, 8, 9, 10), derive_seed(77, "turn", 2), max_new_tokens=7, is_continued=True
    )
    assert after(OPENED, FIRST, Observed(answer, (8, 9, 10)), SECOND).action == Step(
        past.then(first, answer), Turn("turn 2", (4, 9), (), "no JSON")
    )


@dataclass
class BrokenDialogue(NumberDialogue):
    """A template that cannot continue a conversation."""

    def suffix(self, *_: Any) -> tuple[int, ...]:
        raise ControlTokensError("no role tool")


def test_messages_that_no_turn_follows_are_not_rendered() -> None:
    ended, between = says("x", done=True), says("7")
    assert after(OPENED, FIRST).event_of(ended, BrokenDialogue()) == Observed(ended)
    one_turn = after(OPENED, FIRST, limits=replace(LIMITS, turns=1))
    assert one_turn.event_of(between, BrokenDialogue()) == Observed(between)
    assert after(OPENED, FIRST).event_of(between, BrokenDialogue()) == EnvironmentFailure(
        "control_tokens", "no role tool"
    )


def test_finished_episode_has_every_token_and_log_probs_of_turns_only() -> None:
    state = after(
        Opened(says("7"), (5, 6, 7, 10)),
        FIRST,
        Observed(says("8 9", 0.25, right=1.0), (8, 9, 10)),
        SECOND,
        Observed(says("unused", 2.0, done=True, right=3.0, wrong=4.0)),
    )
    sample = state.action
    assert isinstance(sample, Sample)
    assert sample.episode is not None
    assert (sample.key, sample.tokens) == ("a#0", (2, 3, 1, 8, 9, 10, 4, 9))
    assert sample.logprobs == (-0.25, -0.375, -0.125, 0.0, 0.0, 0.0, -0.5, -1.125)
    assert (sample.terminated, sample.text, sample.stamp, sample.sends) == (True, "turn 1\nturn 2", "s2", 2)
    assert sample.prompt_tokens == (5, 6, 7, 10)
    episode = sample.episode
    assert (episode.end, episode.reward, episode.metrics) == ("done", 2.25, {"right": 3.0, "wrong": 4.0})
    assert [(each.generated, each.observed) for each in episode.turns] == [(3, 3), (2, 0)]
    assert list(episode.spans()) == [(0, 3), (6, 8)]
    assert episode.first == (Message("tool", "7"),)
    assert [message.content for message in episode.conversation] == ["turn 1", "8 9", "turn 2"]


GOES_ON = Observed(says("8"), (8, 10))


@pytest.mark.parametrize(
    ("events", "end", "terminated", "tokens"),
    [
        ([OPENED, replace(FIRST, terminated=False)], "tokens", False, 3),
        ([OPENED, FIRST, EnvironmentFailure("timeout", "no answer")], "timeout", True, 3),
        ([OPENED, FIRST, GOES_ON, SECOND, GOES_ON, turn(3, 1), Observed(says("x", 4.0))], "turns", False, 8 + 2),
        ([OPENED, FIRST, GOES_ON, SECOND, GOES_ON, turn(3, 1), Observed(says("x", done=True))], "done", True, 10),
        ([OPENED, FIRST, Observed(says("long"), (8,) * 26)], None, None, None),
        ([OPENED, FIRST, Observed(says("long", 4.0), (8,) * 27)], "tokens", False, 3),
    ],
    ids=["cut turn", "failure", "limit of turns", "done in the last turn", "room for a token", "no room"],
)
def test_end_of_an_episode_has_a_reason(
    events: Sequence[Event], end: str | None, terminated: bool | None, tokens: int | None
) -> None:
    action = after(*events).action
    if end is None:
        assert isinstance(action, SampleRequest)
        assert action.max_new_tokens == 1
        return
    assert isinstance(action, Sample)
    assert action.episode is not None
    assert (action.episode.end, action.terminated, len(action.tokens)) == (end, terminated, tokens)
    assert action.episode.reward == (4.0 if any("4.0" in str(event) for event in events) else 0.0)


@pytest.mark.parametrize(
    ("params", "limits", "expected"),
    [
        (SamplingParams(1.0, 9), LIMITS, 6),  # three of nine generated tokens are used
        (SamplingParams(1.0, 20), replace(LIMITS, tokens=9), 9 - 5),
        (SamplingParams(1.0, 20), replace(LIMITS, tokens=9, tokens_per_turn=3), 3),
        (SamplingParams(1.0, 20, max_window_tokens=12), replace(LIMITS, tokens_per_turn=None), 12 - 2 - 5),
        (SamplingParams(1.0, 20), replace(LIMITS, tokens_per_turn=None), 17),
    ],
    ids=["generated", "episode", "turn", "window", "no limit of a turn"],
)
def test_smallest_limit_applies_to_the_next_turn(
    params: SamplingParams, limits: EpisodeLimits, expected: int
) -> None:
    action = after(OPENED, FIRST, GOES_ON, params=params, limits=limits).action
    assert isinstance(action, SampleRequest)
    assert action.max_new_tokens == expected


def test_first_observation_counts_as_tokens_of_the_episode() -> None:
    """The sequence must fit into the window, which `plan` computes from the prompt of the row."""
    opened = Opened(says("7"), (5, 6, 7, 10))
    action = after(opened, limits=EpisodeLimits(3, 6)).action
    assert action == SampleRequest("a#0/1", (5, 6, 7, 10), 77, max_new_tokens=4)
    full = after(opened, limits=EpisodeLimits(3, 2)).action
    assert isinstance(full, Sample)
    assert full.episode is not None
    assert (full.episode.end, full.terminated, full.episode.turns) == ("tokens", False, ())


@pytest.mark.parametrize(("window", "longest"), [(None, 2 + 9), (8, 8)])
def test_first_observation_makes_no_sequence_longer_than_planned(window: int | None, longest: int) -> None:
    rollout = {"prompts_per_step": 4, "max_prompt_tokens": 2, "max_new_tokens": 9, "max_window_tokens": window}
    recipe = fake_recipe(rollout=rollout, environment={"kind": "python", "path": "env:Sum", "turns": 2, "tokens": 9})
    assert recipe.environment is not None
    assert longest_sequence(recipe) + 1 == generator_window(recipe) == longest
    params, limits = rollout_sampling(recipe), recipe.environment.limits
    opened = Opened(says("7 8 9"), (5, 6, 7, 8, 9))
    request = after(opened, params=params, limits=limits).action
    assert isinstance(request, SampleRequest)
    assert request.max_new_tokens == longest - 5
    cut = turn(1, *[3] * (longest - 5), terminated=False)
    sample = after(opened, cut, params=params, limits=limits).action
    assert isinstance(sample, Sample)
    assert sample.prompt_tokens is not None
    assert len(sample.prompt_tokens) + len(sample.tokens) == longest
    too_long = after(Opened(says("7"), (5, 6, *[7] * 20)), params=params, limits=limits).action
    assert isinstance(too_long, Sample)
    assert too_long.episode is not None
    assert (too_long.episode.end, too_long.prompt_tokens, too_long.tokens) == ("tokens", None, (6,))


def test_episode_without_a_turn_has_one_token_that_is_not_in_the_loss() -> None:
    failed = after(EnvironmentFailure("died", "killed by signal 9")).action
    assert isinstance(failed, Sample)
    whole = after(OPENED, FIRST, Observed(says("x", done=True))).action
    assert isinstance(whole, Sample)
    requests = [replace(REQUEST, key="a#0"), replace(REQUEST, key="a#1")]
    rollouts = assemble(
        Prompts(1, (PROMPT,)), requests, {"a#0": failed, "a#1": whole}, samples=2, stamp="actor@0:first"
    )
    assert rollouts.lengths.tolist() == [1, 3]
    assert rollouts.mask.tolist() == [[False, False, False], [True, True, True]]
    assert rollouts.finish.tolist() == [TERMINATED, TERMINATED]
    assert rollouts.stamps == ["actor@0:first", "s1"]
    assert rollouts.step == 1
    assert rollouts.texts == ["", "turn 1"]


def hand_made() -> Rollouts:
    """Return two episodes of prompt `a`: the first got more messages in its prompt, the second was truncated."""
    first = after(
        Opened(says("7"), (5, 6, 7, 10)), FIRST, GOES_ON, SECOND, Observed(says("x", 0.5, done=True, n=2.0))
    )
    second = after(OPENED, SECOND, Observed(says("8", 0.25, n=8.0), (1, 8, 10)), turn(2, 4, terminated=False))
    samples = {f"a#{number}": state.action for number, state in enumerate((first, second))}
    requests = [replace(REQUEST, key=key) for key in samples]
    return assemble(Prompts(1, (PROMPT,)), requests, samples, samples=2)  # type: ignore[arg-type]


def test_observations_are_in_the_sequence_but_masked_out() -> None:
    rollouts = hand_made()
    assert rollouts.prompt_lengths.tolist() == [4, 2]
    assert rollouts.prompt_tokens.tolist() == [5, 6, 7, 10, 5, 6]
    assert rollouts.tokens.tolist() == [[2, 3, 1, 8, 10, 4, 9], [4, 9, 1, 8, 10, 4, 0]]
    assert rollouts.mask.int().tolist() == [[1, 1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 0, 1, 0]]
    assert rollouts.sampler_logprobs[1].tolist() == [-0.5, -1.125, 0.0, 0.0, 0.0, -0.5, 0.0]
    assert rollouts.finish.tolist() == [TERMINATED, TRUNCATED]
    assert rollouts.texts == ["turn 1\nturn 2", "turn 2\nturn 2"]


def test_rollout_of_episodes_reports_their_metrics() -> None:
    reported = replace(hand_made(), drawing=(11, 4.0), idle_s=1.0)
    metrics = {name: value for name, value in reported.metrics().items() if name.startswith("environment/")}
    assert metrics == {
        "environment/turns_mean": 2.0,
        "environment/observed_tokens_mean": 2.5,
        "environment/calls_mean": 0.5,
        "environment/malformed_frac": 1.0,
        "environment/turn_limit_frac": 0.0,
        "environment/failed_frac": 0.0,
        "environment/n_mean": 5.0,
    }
    assert reported.timing_metrics() == {
        "throughput/generated_tokens_per_s": 2.75,
        "throughput/engine_idle_frac": 0.25,
        "time/generation_s": 4.0,
    }


@pytest.mark.parametrize(
    "event",
    [
        Opened(says("\ud800 is not text", 1 / 3, m=-0.1), None),
        Opened(Observation(), (1, 2)),
        FIRST,
        SECOND,
        GOES_ON,
        EnvironmentFailure("too_large", "2 MB"),
    ],
)
def test_event_survives_its_log_unchanged(event: Event) -> None:
    assert from_json(json.loads(json.dumps(as_json(event)))) == event


@dataclass
class ByHand:
    """Environments whose answers the test gives, and a stream whose turns it gives."""

    turns: dict[str, Sample] = field(default_factory=dict)
    """Key of a request -> its turn; requests without a turn stay open."""
    calls: list[str] = field(default_factory=list)
    answers: dict[str, Future[Outcome]] = field(default_factory=dict)
    requests: list[SampleRequest] = field(default_factory=list)

    def open(self, start: Past) -> Future[Outcome]:
        return self._called(f"open {start.key}", start.key)

    def step(self, past: Past, turn: Turn) -> Future[Outcome]:
        return self._called(f"step {past.key} {len(past.exchanges)}", past.key)

    def _called(self, call: str, key: str) -> Future[Outcome]:
        self.calls.append(call)
        self.answers[key] = Future()
        return self.answers[key]

    def close(self, key: str) -> None:
        self.calls.append(f"close {key}")

    def shutdown(self) -> None: ...

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        self.requests += requests

    def poll(self) -> Sequence[Sample]:
        self.calls.append("poll")
        done = [request for request in self.requests if request.key in self.turns]
        self.requests = [request for request in self.requests if request not in done]
        return [self.turns[request.key] for request in done]

    finished = poll


def loop_of(hand: ByHand, log: list[list[EpisodeEntry]]) -> EpisodeLoop:
    settings = EpisodeSettings(LIMITS, hand, NumberDialogue())
    return EpisodeLoop(hand, settings, lambda entries: log.append(list(entries)))  # type: ignore[arg-type]


def two_episodes() -> list[EpisodeState]:
    return [EpisodeState(replace(REQUEST, key=key), PARAMS, LIMITS) for key in ("a#0", "b#0")]


def test_engine_generates_while_another_episode_waits_for_its_environment() -> None:
    hand, log = ByHand(), []  # type: ignore[var-annotated]
    loop = loop_of(hand, log)
    groups = loop.run(two_episodes())
    assert next(groups) == []
    assert hand.calls == ["open a#0", "open b#0"]
    hand.answers["a#0"].set_result(Observation())
    next(groups)
    hand.turns["a#0/1"] = FIRST
    hand.calls.clear()
    next(groups)  # b is not open yet, and the turn of a is generated
    assert hand.calls == ["poll", "step a#0 0"]
    hand.answers["b#0"].set_result(Observation())
    next(groups)
    hand.answers["a#0"].set_result(Observation(done=True))
    hand.calls.clear()
    [sample] = next(groups)  # the answer of a is used although the request of b is open
    assert (sample.key, hand.calls) == ("a#0", ["close a#0"])
    assert loop.idle_s < 0.1
    groups.close()
    assert hand.calls[-1] == "close b#0"


def test_seconds_without_an_open_request_are_idle() -> None:
    hand = ByHand()
    loop = loop_of(hand, [])
    groups = loop.run(two_episodes()[:1])
    next(groups)
    assert next(groups) == []  # the environment does not answer: the caller can check whether the job must stop
    assert 0.15 < loop.idle_s < 2.0
    hand.answers["a#0"].set_result(Observation())
    hand.turns["a#0/1"] = replace(FIRST, terminated=False)
    before = loop.idle_s
    next(groups)
    [sample] = next(groups)
    assert loop.idle_s - before < 0.1
    assert (loop.generated, sample.tokens) == (3, FIRST.tokens)


def test_events_that_arrive_together_are_recorded_together_before_they_are_used() -> None:
    hand, log = ByHand(), []  # type: ignore[var-annotated]
    loop = loop_of(hand, log)
    groups = loop.run(two_episodes())
    next(groups)
    for key in ("a#0", "b#0"):
        hand.answers[key].set_result(Observation())

    def fails(entries: Sequence[EpisodeEntry]) -> None:
        assert [(entry.key, entry.number) for entry in entries] == [("a#0", 0), ("b#0", 0)]
        raise PreemptedError("no room")

    loop.record = fails
    with pytest.raises(PreemptedError):
        next(groups)
    assert hand.requests == []
    assert hand.calls[2:] == ["close a#0", "close b#0"]


@dataclass
class Log:
    """The episode log port, with these events."""

    events: dict[str, list[dict[str, Any]]]

    def load(self, key: SampleSetKey) -> Any:
        return self.events

    def append(self, key: SampleSetKey, entries: Sequence[EpisodeEntry]) -> None: ...


def test_episodes_that_the_log_finishes_are_not_run_again() -> None:
    events = [as_json(event) for event in (OPENED, replace(FIRST, terminated=False))]
    generation = SampleGeneration(None, Some(()), None, unwatched, Log({"a#0": events}))  # type: ignore[arg-type]
    settings = EpisodeSettings(LIMITS, ByHand(), NumberDialogue())
    seen: list[str] = []

    def at() -> Any:
        raise AssertionError("the actor was loaded for nothing")

    batches = [RequestBatch(PARAMS, [REQUEST], episodes=settings)]
    with generation.run(batches, SampleSetKey(1, "rollout", ""), at, lambda s: seen.append(s.key)) as generated:
        assert generated.samples["a#0"].tokens == FIRST.tokens
        assert (generated.tokens, seen) == (0, ["a#0"])
