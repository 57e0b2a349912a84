"""Episodes for people: the turns and the observations in order, each with a title. This module does not import
torch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ppoctl.core.batch.episodes import Episode, EpisodeTurn
from ppoctl.core.batch.prompts import Message
from ppoctl.core.units import counted


@dataclass(frozen=True)
class EpisodePart:
    """A turn, an observation, or the failure of the environment."""

    title: str
    messages: tuple[Message, ...]
    is_turn: bool = False
    calls: tuple[str, ...] = ()
    """Tool calls of a turn, one text each."""
    start: int = 0
    """Position of the first token in the response."""
    end: int = 0
    """Position after the last token; equal to `start` if the response does not contain the part, or if only texts are
    known."""


def recorded_parts(episode: Episode, means: Mapping[str, Sequence[float] | None]) -> Iterator[EpisodePart]:
    """Yield the parts of an episode of a step. `means`: numbers of each token, whose means are in the titles of the
    turns; None: not recorded."""
    for number, (turn, (start, end)) in enumerate(zip(episode.turns, episode.spans(), strict=True), start=1):
        given = [
            f", mean {name} {fmean(values[start:end]):+z.3f}"
            for name, values in means.items()
            if values is not None and start < end
        ]
        title = f"turn {number}: {counted(turn.generated, 'token')}, reward {turn.reward:g}{''.join(given)}"
        said = (Message("assistant", turn.text),)
        yield EpisodePart(title, said, is_turn=True, calls=_calls(turn), start=start, end=end)
        if turn.observed:
            title = f"observation: {counted(turn.observed, 'token')}, not in the loss"
            yield EpisodePart(title, turn.messages, start=end, end=end + turn.observed)
        elif turn.messages:
            yield EpisodePart("observation: not in the response", turn.messages)
    if episode.is_failed:
        yield EpisodePart("failure of the environment", (Message(episode.end, episode.message),))


def evaluated_parts(conversation: Sequence[Mapping[str, str]]) -> Iterator[EpisodePart]:
    """Yield the parts of an episode of an evaluation, from the messages in its row: a part for each message."""
    turns = 0
    for message in conversation:
        is_turn = message["role"] == "assistant"
        turns += is_turn
        yield EpisodePart(
            f"turn {turns}" if is_turn else "observation", (Message.from_json(message),), is_turn=is_turn
        )


def _calls(turn: EpisodeTurn) -> tuple[str, ...]:
    calls = [f"{call.name} {json.dumps(dict(call.arguments), ensure_ascii=False)}" for call in turn.calls]
    return (*calls, *([f"a call that cannot be read: {turn.malformed}"] if turn.malformed else []))
