"""What a run asks its actor: prompts, and what is known of their answers. Imports no torch."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Json = bool | int | float | str | list[Any] | dict[str, Any] | None
"""A value that JSON has."""


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """One question: its stable id, its token ids as the generator sees them, and what a scorer may read."""

    id: str
    token_ids: tuple[int, ...]
    text: str
    """What the token ids were made from: the messages as the chat template renders them."""
    answer: str | None
    """Ground truth; None: the dataset has none."""
    messages: tuple[Message, ...] = ()
    """The chat that was rendered: that of the row, or its system message and question."""
    fields: Mapping[str, Json] = field(default_factory=dict)
    """Further columns of the row that the recipe names."""


@dataclass(frozen=True)
class Prompts:
    """The questions of one step (or of one evaluation set). Computed from the data and (seed, step); never stored."""

    step: int
    rows: tuple[Prompt, ...]

    @cached_property
    def identity(self) -> str:
        """Digest (hex) of all that a generator or a scorer may read of them, in order."""
        digest = hashlib.sha256()
        for row in self.rows:
            messages = [[message.role, message.content] for message in row.messages]
            told = [row.id, row.token_ids, row.text, row.answer, messages, dict(row.fields)]
            digest.update(json.dumps(told, sort_keys=True).encode() + b"\n")
        return digest.hexdigest()
