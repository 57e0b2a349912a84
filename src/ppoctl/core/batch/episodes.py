"""Episodes: responses of several turns, in which an environment answers each turn of the actor.

    prompt   turn 1   observation   turn 2   observation   turn 3          <- one row of the rollouts
             mask 1   mask 0        mask 1   mask 0        mask 1

A turn is what the actor generates until it ends its message; its tokens are in the loss. An observation is the answer
of the environment; its tokens are in the sequence but not in the loss. Processes of environments import this module,
so it imports only the standard library.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from ppoctl.core.batch.prompts import Json, Message, Prompt

FailureReason = Literal["timeout", "died", "error", "invalid", "too_large", "control_tokens", "changed"]
"""Why an environment failed: no answer before the deadline; its process ended; it raised an error; its answer is not
an observation, or not a valid text; the answer is too large; the observation contains control tokens that cannot be
written as text; after a restart, the environment answered the recorded turns differently."""
EndReason = Literal["done", "turns", "tokens"] | FailureReason
"""Why an episode ended: the environment ended it; the limit of turns; a limit of tokens; the environment failed."""
FAILURES: tuple[FailureReason, ...] = get_args(FailureReason)
LIMITS: tuple[EndReason, ...] = ("turns", "tokens")
"""Reasons that truncate a response."""
NO_ARGUMENTS: Mapping[str, Json] = MappingProxyType({})


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that a turn contains."""

    name: str
    arguments: Mapping[str, Json]


@dataclass(frozen=True)
class Turn:
    """One turn of the actor: the argument of an environment's `step`."""

    text: str
    """Decoded turn, without special tokens and without the token or text that ended it."""
    tokens: tuple[int, ...] = ()
    """Generated ids, including the id that ended the turn."""
    calls: tuple[ToolCall, ...] = ()
    malformed: str = ""
    """Why the turn contains a tool call that cannot be read; empty: it contains no such call. `calls` is then
    empty."""


@dataclass(frozen=True)
class Observation:
    """Answer of an environment to a turn; the first observation may add messages to the prompt."""

    messages: tuple[Message, ...] = ()
    """Messages before the next turn. They are not used if `done` is true."""
    reward: float = 0.0
    """Reward of the turn. The score of an episode is the sum over its turns."""
    done: bool = False
    """Whether the episode ends."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the episode so far by name; the last value of a name counts."""


@dataclass(frozen=True)
class EnvironmentFailure:
    """An environment failed. Its episode ends with this reason."""

    reason: FailureReason
    message: str


Outcome = Observation | EnvironmentFailure


@dataclass(frozen=True)
class EnvironmentRow:
    """All data about a prompt that an environment can read."""

    id: str
    prompt: str
    """Text of the prompt, chat template included."""
    messages: tuple[Message, ...]
    """Chat messages that the prompt was rendered from."""
    truth: str | None
    """Ground truth; None: the dataset has none."""
    fields: Mapping[str, Json] = field(default_factory=dict)
    """Additional columns of the row that the recipe names."""

    @classmethod
    def of(cls, prompt: Prompt) -> "EnvironmentRow":
        return cls(prompt.id, prompt.text, prompt.messages, prompt.answer, prompt.fields)


@dataclass(frozen=True)
class Past:
    """Everything that happened in an episode so far. An environment that was lost is opened again and receives the
    turns again; its observations must be the recorded ones."""

    key: str
    """Key of the episode, unique within its stage."""
    row: EnvironmentRow
    seed: int
    first: Observation = Observation()
    exchanges: tuple[tuple[Turn, Observation], ...] = ()

    def then(self, turn: Turn, observation: Observation) -> "Past":
        """Return the past with one more exchange."""
        return replace(self, exchanges=(*self.exchanges, (turn, observation)))


@runtime_checkable
class Environments(Protocol):
    """Environments of all open episodes, in child processes. Every call returns at once."""

    def open(self, start: Past) -> Future[Outcome]:
        """Open the environment of an episode, and return a future of its first observation. `start` has no
        exchanges."""
        ...

    def step(self, past: Past, turn: Turn) -> Future[Outcome]:
        """Return a future of the observation of a turn. An environment that was lost is first restored from its
        past.

        The result is an `EnvironmentFailure` if the environment fails; other episodes are not affected. The future
        raises an error only if no environment can be started.
        """
        ...

    def close(self, key: str) -> None:
        """Close the environment of an episode that has ended. An unknown key is ignored."""
        ...

    def shutdown(self) -> None:
        """Stop all processes. This method may be called again."""
        ...


class ObservationError(ValueError):
    """The messages of an observation cannot be added to the conversation."""

    reason: FailureReason


class ControlTokensError(ObservationError):
    """An observation contains control tokens that cannot be written as text."""

    reason: FailureReason = "control_tokens"


class RejectedMessagesError(ObservationError):
    """The chat template rejects the messages of an observation, for example because of their roles."""

    reason: FailureReason = "invalid"


@runtime_checkable
class Dialogue(Protocol):
    """Token ids of a conversation in the format of the model's chat template."""

    def prompt(self, prompt: Prompt, first: Sequence[Message]) -> tuple[int, ...]:
        """Return the ids of a prompt with further messages, up to the start of the first turn. Nothing has been
        generated yet, so this is the only method that renders a prompt again.

        The text of the further messages never becomes a control token. Raises ObservationError.
        """
        ...

    def suffix(
        self, turn: Sequence[int], messages: Sequence[Message], arguments: Mapping[str, Json] = NO_ARGUMENTS
    ) -> tuple[int, ...]:
        """Return the ids between a turn and the next turn: the rest of the turn's message (its end token, if the turn
        ended without it), the messages, and the start of the next turn. `arguments` are the `template_args` of the
        prompt.

        The text of the messages never becomes a control token. Raises ObservationError.
        """
        ...


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode, in addition to the limits of its `SamplingParams`."""

    turns: int
    tokens: int
    """Maximum number of tokens after the prompt, generated and observed."""
    tokens_per_turn: int | None = None
    """Maximum number of generated tokens per turn; None: no separate limit."""


@dataclass(frozen=True)
class EpisodeSettings:
    """Settings of the episodes of a stage."""

    limits: EpisodeLimits
    environments: Environments
    dialogue: Dialogue


@dataclass(frozen=True)
class EpisodeTurn:
    """One turn of a finished episode, and the observation that answered it."""

    generated: int
    """Number of tokens that the actor generated."""
    text: str
    calls: tuple[ToolCall, ...] = ()
    malformed: str = ""
    observed: int = 0
    """Number of observation tokens after the turn; 0 for the last turn."""
    messages: tuple[Message, ...] = ()
    """Messages of the observation; those of the last turn are not in the sequence."""
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Episode:
    """A finished episode without its token ids, which are in the response."""

    turns: tuple[EpisodeTurn, ...]
    end: EndReason
    message: str = ""
    """Why the environment failed; empty: it did not fail."""
    first: tuple[Message, ...] = ()
    """Messages that the environment added to the prompt."""

    @property
    def is_failed(self) -> bool:
        """Whether the environment failed."""
        return self.end in FAILURES

    @property
    def is_truncated(self) -> bool:
        """Whether a limit ended the episode."""
        return self.end in LIMITS

    @property
    def reward(self) -> float:
        """Sum of the rewards of the turns."""
        return math.fsum(turn.reward for turn in self.turns)

    @property
    def text(self) -> str:
        """Text of the actor's turns, one after the other on separate lines, without the observations."""
        return "\n".join(turn.text for turn in self.turns)

    @property
    def metrics(self) -> dict[str, float]:
        """The environment's metrics of the episode: the last value of each name."""
        return {name: value for turn in self.turns for name, value in turn.metrics.items()}

    @property
    def conversation(self) -> tuple[Message, ...]:
        """Messages after the prompt: the turns, and the observations in the sequence."""
        return tuple(
            message
            for turn in self.turns
            for message in (Message("assistant", turn.text), *(turn.messages if turn.observed else ()))
        )

    @property
    def columns(self) -> dict[str, Any]:
        """Columns of the episode in a table of samples, for people."""
        messages = [message.as_json() for message in (*self.first, *self.conversation)]
        return {"conversation": messages, "turns": len(self.turns), "end": self.end}

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield the first position of each turn in the response, and the position after its last token."""
        start = 0
        for turn in self.turns:
            yield start, start + turn.generated
            start += turn.generated + turn.observed

    def as_json(self) -> dict[str, Any]:
        """Return the episode as a JSON value."""
        return {
            "turns": [_turn_as_json(turn) for turn in self.turns],
            "end": self.end,
            "message": self.message,
            "first": [message.as_json() for message in self.first],
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "Episode":
        """Return the episode that `as_json` returned."""
        turns = tuple(
            EpisodeTurn(
                **{
                    **turn,
                    "calls": tuple(ToolCall(**call) for call in turn["calls"]),
                    "messages": messages_from(turn["messages"]),
                }
            )
            for turn in value["turns"]
        )
        return Episode(turns, value["end"], value["message"], messages_from(value["first"]))


def messages_from(values: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Return messages from JSON."""
    return tuple(map(Message.from_json, values))


def as_plain(value: "EnvironmentRow | Observation") -> dict[str, Any]:
    """Return a row or an observation as JSON, for the process of an environment."""
    return {**asdict(value), "messages": tuple(message.as_json() for message in value.messages)}


def _turn_as_json(turn: EpisodeTurn) -> dict[str, Any]:
    return {
        **vars(turn),
        "calls": [vars(call) | {"arguments": dict(call.arguments)} for call in turn.calls],
        "messages": [message.as_json() for message in turn.messages],
        "metrics": dict(turn.metrics),
    }
