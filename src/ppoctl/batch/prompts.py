"""Prompts of a step, with the data that scorers read about each prompt. This module does not import torch."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Json = bool | int | float | str | list[Any] | dict[str, Any] | None
"""A JSON value."""


@dataclass(frozen=True)
class Message:
    """One message of a chat."""

    role: str
    content: str


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
            messages = [[message.role, message.content] for message in row.messages]
            content = [row.id, row.token_ids, row.text, row.answer, messages, dict(row.fields)]
            if row.template_args:
                content.append(dict(row.template_args))
            digest.update(json.dumps(content, sort_keys=True).encode() + b"\n")
        return digest.hexdigest()
