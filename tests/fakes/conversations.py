"""Environments and a dialogue for the bigram model. The texts of messages are numbers of tokens, as "3 7"."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from fakes.bigram import END, VOCABULARY
from ppoctl.core.batch.episodes import (
    NO_ARGUMENTS,
    ControlTokensError,
    EnvironmentFailure,
    Observation,
    Outcome,
    Past,
    Turn,
)
from ppoctl.core.batch.prompts import Json, Message, Prompt

NEXT = 10
"""Id that the template puts before each turn."""


def ids_of(messages: Sequence[Message]) -> tuple[int, ...]:
    """Return the ids of the messages. A word that is not a number is a control token."""
    words = [word for message in messages for word in message.content.split()]
    if not all(word.isdecimal() for word in words):
        raise ControlTokensError(f"`{' '.join(words)}` contains a control token")
    return tuple(int(word) % VOCABULARY for word in words)


class NumberDialogue:
    """Messages follow each other without separators; each turn begins after the id `NEXT`."""

    def prompt(self, prompt: Prompt, first: Sequence[Message]) -> tuple[int, ...]:
        return (*prompt.token_ids, *ids_of(first), NEXT)

    def suffix(
        self, turn: Sequence[int], messages: Sequence[Message], arguments: Mapping[str, Json] = NO_ARGUMENTS
    ) -> tuple[int, ...]:
        return (*(() if turn[-1] == END else (END,)), *ids_of(messages), NEXT)


class SumEnvironment:
    """Adds up the ids of the turns of one episode. The sum decides each answer."""

    def __init__(self, start: Past, offset: int) -> None:
        self.sum = offset + len(start.row.prompt)
        self.cannot_open = start.seed % 16 == 5
        self.adds_message = start.seed % 2 == 0

    def first(self) -> Outcome:
        if self.cannot_open:
            return EnvironmentFailure("died", "the process ended while the environment was opened")
        return Observation((Message("user", f"{self.sum % 7}"),) if self.adds_message else ())

    def answer(self, turn: Turn) -> Outcome:
        self.sum += sum(turn.tokens)
        if self.sum % 11 == 4:
            return EnvironmentFailure("error", f"the sum is {self.sum}")
        content = "control" if self.sum % 13 == 6 else f"{self.sum % 5} {self.sum % 3}"
        return Observation(
            (Message("user", content),), self.sum % 4 / 4, done=self.sum % 5 == 2, metrics={"sum": float(self.sum)}
        )


def ignore(_: str) -> None:
    """Do nothing."""


class SumEnvironments:
    """The environments port, without processes. An unknown episode is restored from its past. With another `offset`,
    environments answer differently."""

    def __init__(self, *, offset: int = 0, on_call: Callable[[str], None] = ignore) -> None:
        self.offset = offset
        self.on_call = on_call
        self.open_ones: dict[str, SumEnvironment] = {}
        self.num_restored = 0
        self.is_shut_down = False

    def open(self, start: Past) -> Future[Outcome]:
        self.on_call(f"open {start.key}")
        assert not start.exchanges
        assert start.key not in self.open_ones
        self.open_ones[start.key] = SumEnvironment(start, self.offset)
        return _ready(self.open_ones[start.key].first())

    def step(self, past: Past, turn: Turn) -> Future[Outcome]:
        self.on_call(f"step {past.key}")
        if past.key not in self.open_ones:
            self.num_restored += 1
            restored = SumEnvironment(past, self.offset)
            answers = [restored.first(), *(restored.answer(earlier) for earlier, _ in past.exchanges)]
            if answers != [past.first, *(observation for _, observation in past.exchanges)]:
                return _ready(EnvironmentFailure("changed", "it answered the recorded turns differently"))
            self.open_ones[past.key] = restored
        return _ready(self.open_ones[past.key].answer(turn))

    def close(self, key: str) -> None:
        self.open_ones.pop(key, None)

    def shutdown(self) -> None:
        self.is_shut_down = True


def _ready(outcome: Outcome) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future
