"""What a scorer is asked about one response, and what it says. Imported in its processes: standard library only."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from ppoctl.batch.prompts import Json, Message, Prompt

Finish = Literal["terminated", "truncated"]
"""Whether the model ended the response itself, or the length limit did."""
Outcome = Literal["ok", "timeout", "error"]


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

    @classmethod
    def about(cls, prompt: Prompt, response: str, finish: Finish) -> "ScoreRequest":
        """Request to score this response to the prompt."""
        return cls(prompt.id, prompt.text, prompt.messages, response, prompt.answer, prompt.fields, finish)

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
