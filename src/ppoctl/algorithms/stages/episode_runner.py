"""One episode as a state machine: events in, the next action out. It calls neither an engine nor an environment, so
an episode continues after a kill by taking its recorded events again.

    event            Opened     Sample     Observed     Sample     ...   EnvironmentFailure
    next action   Open    request    Step        request    Step         the finished sample
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ppoctl.core.batch.episodes import (
    Dialogue,
    EndReason,
    EnvironmentFailure,
    EnvironmentRow,
    Episode,
    EpisodeLimits,
    EpisodeTurn,
    Observation,
    ObservationError,
    Outcome,
    Past,
    Turn,
)
from ppoctl.core.batch.seeds import derive_seed
from ppoctl.core.ports import Sample, SampleRequest, SamplingParams


@dataclass(frozen=True)
class Opened:
    """The environment was opened."""

    observation: Observation
    prompt_tokens: tuple[int, ...] | None = None
    """Ids of the prompt with the messages of the observation; None: there are no such messages."""


@dataclass(frozen=True)
class Observed:
    """The environment answered a turn."""

    observation: Observation
    suffix: tuple[int, ...] = ()
    """Ids between the turn and the next turn; empty if no turn can follow."""


Event = Opened | Sample | Observed | EnvironmentFailure
"""Change of an episode; a sample is a turn, and its `key` is that of the turn's request."""


@dataclass(frozen=True)
class Open:
    """Open the environment."""

    start: Past


@dataclass(frozen=True)
class Step:
    """Send a turn to the environment."""

    past: Past
    turn: Turn


Action = Open | Step | SampleRequest | Sample
"""Next step of an episode; a sample is the finished response."""


class EpisodeState:
    """An episode after the events that it took."""

    def __init__(self, request: SampleRequest, params: SamplingParams, limits: EpisodeLimits) -> None:
        assert request.prompt is not None, "an environment reads the prompt"
        self.request = request
        self.num_events = 0
        self._prompt = request.prompt
        self._params = params
        self._limits = limits
        self._past = Past(request.key, EnvironmentRow.of(request.prompt), request.seed)
        self._is_open = False
        self._prompt_tokens = request.prompt_tokens
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._samples: list[Sample] = []
        self._turns: list[EpisodeTurn] = []
        self._end: EndReason | None = None
        self._message = ""

    @property
    def action(self) -> Action:
        """The next action."""
        if self._end is not None:
            return self._finished(self._end)
        if not self._is_open:
            return Open(self._past)
        if self._awaits_observation:
            return Step(self._past, _turn(self._samples[-1]))
        return self._next_request()

    def event_of(self, outcome: Outcome, dialogue: Dialogue) -> Event:
        """Return the event of the answer to the last `Open` or `Step`."""
        if isinstance(outcome, EnvironmentFailure):
            return outcome
        messages = outcome.messages
        try:
            if not self._is_open:
                return Opened(outcome, dialogue.prompt(self._prompt, messages) if messages else None)
            is_last = outcome.done or len(self._turns) == self._limits.turns
            if is_last:
                return Observed(outcome)
            return Observed(outcome, dialogue.suffix(self._samples[-1].tokens, messages, self._prompt.template_args))
        except ObservationError as error:
            return EnvironmentFailure(error.reason, str(error))

    def take(self, event: Event) -> None:
        """Change the state by an event, which must be the result of `action`."""
        self.num_events += 1
        match event:
            case EnvironmentFailure(reason, message):
                self._end, self._message = reason, message
            case Opened(observation, prompt_tokens):
                self._is_open = True
                self._past = replace(self._past, first=observation)
                self._prompt_tokens = self.request.prompt_tokens if prompt_tokens is None else prompt_tokens
                self._end = "done" if observation.done else None if self._room() >= 1 else "tokens"
            case Observed(observation, suffix):
                self._take_observation(observation, suffix)
            case Sample():
                self._samples.append(event)
                self._extend(event.tokens, event.logprobs)
                self._turns.append(EpisodeTurn(len(event.tokens), event.text, event.calls, event.malformed))
                self._end = None if event.terminated else "tokens"

    @property
    def _awaits_observation(self) -> bool:
        return len(self._samples) > len(self._past.exchanges)

    def _take_observation(self, observation: Observation, suffix: Sequence[int]) -> None:
        self._past = self._past.then(_turn(self._samples[-1]), observation)
        answered = replace(
            self._turns[-1],
            messages=observation.messages,
            reward=observation.reward,
            metrics=observation.metrics,
        )
        if observation.done:
            self._end = "done"
        elif len(self._turns) == self._limits.turns:
            self._end = "turns"
        elif self._room(len(suffix)) < 1:
            self._end = "tokens"
        else:
            answered = replace(answered, observed=len(suffix))
            self._extend(suffix, [0.0] * len(suffix))
        self._turns[-1] = answered

    def _extend(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self._tokens += tokens
        self._logprobs += logprobs

    def _room(self, observed: int = 0) -> int:
        """Return the number of tokens that can be generated after `observed` further tokens.

        Messages that the environment added to the prompt count as tokens of the episode, so that the sequence fits
        into the window.
        """
        present, params = len(self._tokens) + observed, self._params
        generated = sum(turn.generated for turn in self._turns)
        added = len(self._prompt_tokens) - len(self.request.prompt_tokens)
        window = replace(params, max_new_tokens=self._limits.tokens - added).new_tokens(len(self._prompt_tokens))
        return min(params.max_new_tokens - generated, window - present)

    def _next_request(self) -> SampleRequest:
        number = len(self._turns) + 1
        seed, per_turn = self.request.seed, self._limits.tokens_per_turn
        room = self._room()
        return SampleRequest(
            key=f"{self.request.key}/{number}",
            prompt_tokens=(*self._prompt_tokens, *self._tokens),
            seed=seed if number == 1 else derive_seed(seed, "turn", number),
            max_new_tokens=room if per_turn is None else min(room, per_turn),
            is_continued=number > 1,
        )

    def _finished(self, end: EndReason) -> Sample:
        episode = Episode(tuple(self._turns), end, self._message, self._past.first.messages)
        has_turn = bool(self._turns)
        # Without a turn, the first messages may be longer than the window, and no model must read them.
        prompt_tokens = self._prompt_tokens if has_turn else self.request.prompt_tokens
        return Sample(
            key=self.request.key,
            # A response has at least one token. Without a turn it is not in the loss, so any id will do.
            tokens=tuple(self._tokens) if has_turn else prompt_tokens[-1:],
            logprobs=tuple(self._logprobs) if has_turn else (0.0,),
            terminated=not episode.is_truncated,
            text=episode.text,
            stamp=self._samples[-1].stamp if has_turn else "",
            sends=max((sample.sends for sample in self._samples), default=1),
            episode=episode,
            prompt_tokens=None if prompt_tokens == self.request.prompt_tokens else prompt_tokens,
        )


def _turn(sample: Sample) -> Turn:
    return Turn(sample.text, sample.tokens, sample.calls, sample.malformed)


def replayed(
    request: SampleRequest, params: SamplingParams, limits: EpisodeLimits, events: Iterable[Event]
) -> EpisodeState:
    """Return an episode after its recorded events."""
    state = EpisodeState(request, params, limits)
    for event in events:
        state.take(event)
    return state
