"""Convert questions to token ids, with the tokenizer and chat template of the model.

With a chat template: the messages of `framing`, then the generation prompt that opens the assistant's turn.
Without a chat template (base models): the messages as plain text with a blank line between them, after the
beginning-of-sequence token if the tokenizer adds one. No other token is added.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2

from ppoctl.core.batch.prompts import Message
from ppoctl.core.errors import DataError, EnvironmentProblemError
from ppoctl.data.chat import ChatTemplate
from ppoctl.data.framing import Framing
from ppoctl.data.row_tables import SingleTable
from ppoctl.data.rows import DatasetRow

BLANK_LINE = "\n\n"
"""Text between two messages if the model has no chat template."""


@dataclass(frozen=True)
class Rendered:
    """One row in the form that the generator (vLLM) receives."""

    messages: tuple[Message, ...]
    text: str
    token_ids: tuple[int, ...]


class PromptTemplate:
    """Renderer of rows to token ids.

    `tokenizer` is from `data.tokenizer`. `template` has the chat templates of its model; None: those of the object
    `tokenizer`.
    """

    def __init__(self, tokenizer: Any, template: ChatTemplate | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate.of_tokenizer(tokenizer) if template is None else template

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def digest(self) -> str:
        """SHA-256 of everything that token ids depend on: the tokenizer, its special tokens, the chat template."""
        tokenizer = self._tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        core = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        parts = json.dumps([core, sorted(special.items()), self._template.written])
        return hashlib.sha256(parts.encode()).hexdigest()

    def render(self, rows: Sequence[DatasetRow], table: SingleTable, *, name: str) -> list[Rendered]:
        """Render rows in order. `name` is the key of the data set below `data`.

        Raises the errors of `Framing.chat`, and DataError if the chat template rejects a row.
        """
        framing = Framing(table, name=name)
        chats = [framing.chat(row) for row in rows]
        texts = [self.text(chat, row, table.template_args) for chat, row in zip(chats, rows, strict=True)]
        rendered = zip(chats, texts, self.token_ids(texts), strict=True)
        return [Rendered(chat, text, ids) for chat, text, ids in rendered]

    def text(self, chat: Sequence[Message], row: DatasetRow, arguments: Mapping[str, object]) -> str:
        """Return the chat as text, ending with the generation prompt. `arguments` are those of the chat template,
        including `tools`.

        Raises DataError if the template rejects the chat, or if no template can write the further keys of a message.
        """
        if not self.has_chat_template:
            return _plain_text(chat, row)
        try:
            return self.rendered([message.as_json() for message in chat], arguments)
        except Exception as error:  # a template is code and may raise any error
            raise refused(row, error) from error

    def rendered(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, object]) -> str:
        """Return messages as text, ending with the generation prompt. The model must have a chat template, which may
        raise any error."""
        # A tokenizer class may have default tokens that no file of the model names.
        special = getattr(self._tokenizer, "special_tokens_map", {})
        return self._template.rendered(list(messages), {**special, **arguments})

    @property
    def has_chat_template(self) -> bool:
        return self._template.text is not None

    @property
    def chat_template(self) -> ChatTemplate:
        return self._template

    def token_ids(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the token ids of texts that `text` returned. Raises EnvironmentProblemError if the tokenizer
        fails."""
        # The template writes the special tokens; the tokenizer must not add a second beginning-of-sequence token.
        # `prompt_set` checks the lengths, so warnings of the tokenizer are off.
        try:
            encoded = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        except Exception as error:  # the library `tokenizers` raises plain Exception
            raise EnvironmentProblemError(
                f"the model's tokenizer cannot read a prompt: {error}",
                hint="put the model's own tokenizer into its folder",
            ) from error
        return [(*self.opening, *ids) for ids in encoded]

    def most_tokens(self, text: str) -> int | None:
        """Return an upper bound on the number of tokens of a text, without tokenizing the text.

        None means that the tokenizer allows no bound. A token of a byte-level vocabulary is at least one byte.
        Unicode normalization (NFC) does not change ASCII, and at most triples the number of bytes of other text.
        """
        if not self._is_byte_level:
            return None
        return len(self.opening) + (len(text) if text.isascii() else 3 * len(text.encode()))

    @cached_property
    def opening(self) -> tuple[int, ...]:
        """Id of the beginning-of-sequence token if the tokenizer adds it and no template writes it; otherwise empty.

        A test text shows whether the tokenizer adds the token. Other special tokens, such as an end token, must not
        be in a prompt.
        """
        bos = self._tokenizer.bos_token_id
        if self.has_chat_template or bos is None:
            return ()
        with_special = self._tokenizer("x", add_special_tokens=True)["input_ids"]
        return (bos,) if with_special[:1] == [bos] else ()

    @cached_property
    def _is_byte_level(self) -> bool:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return False
        config = json.loads(backend.to_str())
        pre_tokenizer = config.get("pre_tokenizer") or {}
        steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
        splitters = ("Split", "Digits", "Punctuation", "Whitespace")  # splitters add no bytes
        byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
        return (
            (config.get("normalizer") or {"type": "NFC"})["type"] == "NFC"
            and len(byte_level) == 1
            and not byte_level[0].get("add_prefix_space")
            and all(step in byte_level or step.get("type") in splitters for step in steps)
        )


def _plain_text(chat: Sequence[Message], row: DatasetRow) -> str:
    for message in chat:
        if message.further:
            raise DataError(
                f"row `{row.id}` ({row.place}) has a message with `{next(iter(message.further))}`, but the model has "
                "no chat template to write it",
                hint="use a model with a chat template, or write all text of the chat in `content`",
            )
    return BLANK_LINE.join(message.content or "" for message in chat)


def refused(row: DatasetRow, error: Exception) -> DataError:
    """Return the error for a row that the chat template of the model rejects."""
    is_by_choice = type(error) is jinja2.TemplateError  # the template has called `raise_exception`
    return DataError(
        f"the model's chat template rejects row `{row.id}` ({row.place}): {error}",
        hint="many templates reject system messages, or require user and assistant to alternate"
        if is_by_choice
        else "the template fails: correct it, or the values of the row and of `template_args` that it reads",
    )
