"""Request to score one response, and the result. Scorer processes import this module, so it imports only the standard
library."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from ppoctl.core.batch.episodes import Episode, messages_from
from ppoctl.core.batch.prompts import Json, Message, Prompt

Finish = Literal["terminated", "truncated"]
"""Whether the model or the length limit ended the response."""
Outcome = Literal["ok", "timeout", "error", "unreachable", "refused"]
"""Result of a request: a score; the deadline passed; the scorer failed; the scoring service did not answer; the
scorer refused."""

FINISH_REASONS: tuple[Finish, ...] = get_args(Finish)
"""Meaning of the numbers in `Rollouts.finish`."""
REWARD_OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""Meaning of the numbers in `Rewards.outcomes`."""
_MESSAGES = ("messages", "conversation")
_OF_TURNS = ("conversation", "turn_spans", "turn_rewards")


@dataclass(frozen=True)
class ScoreRequest:
    """All data about one response that a scorer can read."""

    prompt_id: str
    prompt: str
    """Text before the response, chat template included."""
    messages: tuple[Message, ...]
    """Chat messages that the prompt was rendered from, including those that an environment added."""
    response: str
    """Decoded response without special tokens. A response of several turns is the text of the actor's turns on
    separate lines, so that a tool cannot write an answer."""
    truth: str | None
    """Ground truth; None: the dataset has none."""
    fields: Mapping[str, Json]
    """Additional columns of the row that the recipe names."""
    finish: Finish
    """How the response ended."""
    token_ids: tuple[int, ...] = ()
    """Ids of the response, including its end token, and including the observations of an environment."""
    conversation: tuple[Message, ...] = ()
    """Messages after the prompt: turns and observations, in order. Empty: no environment answered."""
    turn_spans: tuple[tuple[int, int], ...] = ()
    """First position of each turn in `token_ids`, and the position after its last token. The other positions are
    observations, which are not in the loss. Empty: no environment answered."""
    turn_rewards: tuple[float, ...] = ()
    """Reward that the environment returned for each turn. Empty: no environment answered."""

    @classmethod
    def about(
        cls,
        prompt: Prompt,
        response: str,
        finish: Finish,
        token_ids: tuple[int, ...] = (),
        episode: Episode | None = None,
    ) -> "ScoreRequest":
        """Return the request to score this response to the prompt. `episode` has the turns of a response that an
        environment answered."""
        request = cls(
            prompt.id, prompt.text, prompt.messages, response, prompt.answer, prompt.fields, finish, token_ids
        )
        if episode is None:
            return request
        return replace(
            request,
            messages=(*prompt.messages, *episode.first),
            conversation=episode.conversation,
            turn_spans=tuple(episode.spans()),
            turn_rewards=tuple(turn.reward for turn in episode.turns),
        )

    @property
    def generated_tokens(self) -> int:
        """Number of tokens that the actor generated."""
        return sum(end - start for start, end in self.turn_spans) if self.turn_spans else len(self.token_ids)

    def as_json(self) -> dict[str, Any]:
        """Return the request as a JSON object. The fields about turns are left out if no environment answered."""
        fields = {name: value for name, value in vars(self).items() if value or name not in _OF_TURNS}
        return {
            **fields,
            **{name: [message.as_json() for message in fields[name]] for name in _MESSAGES if name in fields},
        }

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "ScoreRequest":
        """Return the request that `as_json` returned."""
        lists = {name: tuple(fields[name]) for name in ("token_ids", "turn_rewards") if name in fields}
        messages = {name: messages_from(fields[name]) for name in _MESSAGES if name in fields}
        spans = tuple((start, end) for start, end in fields.get("turn_spans", ()))
        return ScoreRequest(**{**fields, **lists, **messages, "turn_spans": spans})

    def required_truth(self) -> str:
        """Return the ground truth. Raises ValueError if there is none."""
        if self.truth is None:
            raise ValueError("the row has no ground truth")
        return self.truth


@dataclass(frozen=True)
class Score:
    """Result of a request. `value` is None unless `outcome` is "ok": an error never becomes a score of 0."""

    value: float | None
    outcome: Outcome
    message: str = ""
    """Reason why there is no value."""
    extras: Mapping[str, float] = field(default_factory=dict)
    """Additional metrics of the scorer by name."""
    token_values: tuple[float, ...] | None = None
    """One value for each token of the response, which add up to `value`; None: the response has one score. Values at
    observations are not used."""
    answer: str | None = None
    """Answer that the scorer extracted from the response, normalized so that equal answers are equal strings; None:
    no answer."""
    seconds: float = field(default=0.0, compare=False)
    """Seconds that scoring took; 0 if not measured."""


@runtime_checkable
class BatchScorer(Protocol):
    """Scorer that collects submitted requests and scores them together."""

    def flush(self) -> None:
        """Score the requests submitted so far. The caller submits no further request before these scores are
        available."""
        ...


@runtime_checkable
class RewardModel(Protocol):
    """Model that scores texts, in this process or distributed over others. Its weights never change."""

    def tokens(self, request: ScoreRequest) -> tuple[int, ...]:
        """Return the ids of prompt and response as the model reads them. Raises ValueError if there is no text or the
        text is too long."""
        ...

    def scores(self, texts: Sequence[tuple[int, ...]]) -> list[float]:
        """Return the score of each text, at its last token. The first call loads the model."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """Scores responses: a function in child processes, a service, or a model."""

    def submit(self, request: ScoreRequest) -> Future[Score]:
        """Start to score a response and return a future of the score. Requests may be submitted while others are
        scored.

        If the scorer hangs, raises or dies, only this request is affected, and its score has no value. The future
        raises an error only if no score can be trusted.
        """
        ...

    def close(self) -> None:
        """Stop all processes of the scorer. This method may be called again."""
        ...
