"""Prompts of a step, with the data that scorers read about each prompt. This module does not import torch."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Json = bool | int | float | str | list[Any] | dict[str, Any] | None
"""A JSON value."""


@dataclass(frozen=True)
class Message:
    """One message of a chat."""

    role: str
    content: str | None
    """Text; None: the message has only further keys, such as tool calls."""
    further: Mapping[str, Json] = field(default_factory=dict, hash=False)
    """All other keys of the message, as the chat template reads them (`tool_calls`, `name`). `content` is one of them
    if the row contains null for it."""

    def as_json(self) -> dict[str, Json]:
        """Return the message as chat templates read it."""
        content: dict[str, Json] = {} if self.content is None else {"content": self.content}
        return {"role": self.role, **content, **self.further}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "Message":
        """Return the message that `as_json` returned."""
        known = {"role"} if value.get("content") is None else {"role", "content"}
        further = {key: inner for key, inner in value.items() if key not in known}
        return Message(value["role"], value.get("content"), further)


@dataclass(frozen=True)
class Prompt:
    """One prompt: its stable id, its token ids for the generator (vLLM), and the data for scorers."""

    id: str
    token_ids: tuple[int, ...]
    text: str
    """Text of the token ids: the messages after the chat template rendered them."""
    answer: str | None
    """Ground truth; None: the dataset has none."""
    messages: tuple[Message, ...] = ()
    """Chat that was rendered: the messages of the row, or the system message and the question."""
    fields: Mapping[str, Json] = field(default_factory=dict)
    """Additional columns of the row that the recipe names."""
    template_args: Mapping[str, Json] = field(default_factory=dict)
    """Arguments of the chat template, including `tools`, if an environment may render further messages."""


@dataclass(frozen=True)
class Prompts:
    """Prompts of one step or of one evaluation set. They are computed from the data and (seed, step), and never
    stored."""

    step: int
    rows: tuple[Prompt, ...]

    @cached_property
    def identity(self) -> str:
        """Digest (hex) of everything that a generator or a scorer can read, in order."""
        digest = hashlib.sha256()
        for row in self.rows:
            content = [row.id, row.token_ids, row.text, row.answer, as_lists(row.messages), dict(row.fields)]
            if row.template_args:
                content.append(dict(row.template_args))
            digest.update(json.dumps(content, sort_keys=True).encode() + b"\n")
        return digest.hexdigest()


def as_lists(messages: Iterable[Message]) -> list[list[Json]]:
    """Return messages as lists of their parts, for digests. A message without further keys has two parts."""
    return [
        [message.role, message.content, *([dict(message.further)] if message.further else [])] for message in messages
    ]
