"""What a scorer is asked about one response, and what it says. Imported in its processes: standard library only."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args, runtime_checkable

from ppoctl.batch.prompts import Json, Message, Prompt

Finish = Literal["terminated", "truncated"]
"""Whether the model ended the response itself, or the length limit did."""
Outcome = Literal["ok", "timeout", "error", "unreachable", "refused"]
"""What came of a request: a score; the deadline passed; the scorer failed; the service that scores did not answer; it
would not score this."""

FINISH_REASONS: tuple[Finish, ...] = get_args(Finish)
"""What the numbers in a record of rollouts stand for."""
REWARD_OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""What the numbers in a record of rewards stand for."""


@dataclass(frozen=True)
class ScoreRequest:
    """All that a scorer may know of one response."""

    prompt_id: str
    prompt: str
    """Text that the response continues, chat template included."""
    messages: tuple[Message, ...]
    """Chat messages that the prompt was rendered from."""
    response: str
    """Decoded, special tokens skipped."""
    truth: str | None
    """Ground truth; None: the dataset has none."""
    fields: Mapping[str, Json]
    """Further columns of the row that the recipe names."""
    finish: Finish
    """How the response ended."""
    token_ids: tuple[int, ...] = ()
    """Ids of the response, its end token included."""

    @classmethod
    def about(cls, prompt: Prompt, response: str, finish: Finish, token_ids: tuple[int, ...] = ()) -> "ScoreRequest":
        """Request to score this response to the prompt."""
        return cls(prompt.id, prompt.text, prompt.messages, response, prompt.answer, prompt.fields, finish, token_ids)

    def required_truth(self) -> str:
        """The ground truth. Raises ValueError where there is none."""
        if self.truth is None:
            raise ValueError("the row has no ground truth")
        return self.truth


@dataclass(frozen=True)
class Score:
    """What came of a request. `value` is None unless `outcome` is "ok": an error is never a score of 0."""

    value: float | None
    outcome: Outcome
    message: str = ""
    """Why there is no value."""
    extras: Mapping[str, float] = field(default_factory=dict)
    """Further figures of the scorer by name."""
    token_values: tuple[float, ...] | None = None
    """One figure for each token of the response, whose sum is `value`; None: the response has one score."""
    answer: str | None = None
    """What the scorer read out of the response as its answer, spelt the same for equal answers; None: nothing."""
    seconds: float = field(default=0.0, compare=False)
    """How long it took, where somebody measured it."""


@runtime_checkable
class BatchScorer(Protocol):
    """A scorer that gathers what is submitted, to score it together."""

    def flush(self) -> None:
        """Score what was submitted: whoever waits for it submits nothing before it is there."""
        ...


@runtime_checkable
class RewardModel(Protocol):
    """A model that scores texts, in this process or spread over others. It never changes."""

    def tokens(self, request: ScoreRequest) -> tuple[int, ...]:
        """Ids of the text that the model reads of a prompt with its response. Raises ValueError where there is none,
        or it is too long."""
        ...

    def scores(self, texts: Sequence[tuple[int, ...]]) -> list[float]:
        """Score of each text, at its last token. The first call loads the model."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """Whoever scores responses: a function in child processes, a service, a model."""

    def submit(self, request: ScoreRequest) -> Future[Score]:
        """The score, once it is there; requests may be submitted while others are being scored. A scorer that hangs,
        raises or dies costs its own request only: the score then has no value. What makes all scores worthless is
        raised by the future."""
        ...

    def close(self) -> None:
        """End whatever scores. May be called twice."""
        ...
