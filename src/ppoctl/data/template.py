"""The way from questions to token ids, through the model's own tokenizer and chat template.

With a chat template: [system message,] user message "question[\\ninstruction]", then what opens the assistant's turn.
Without one (base models): the same parts as plain text, a blank line between messages, after the tokenizer's
beginning-of-sequence token where it adds one. No other token is added.

A model with `tokenizer.json` is read as that file says. `AutoTokenizer` may rebuild it from the vocabulary with the
rules of the architecture in `config.json`, and then cut the same text differently from what the model was trained on.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppoctl.batch.prompts import Message
from ppoctl.data.rows import Row
from ppoctl.errors import DataError, EnvironmentProblemError
from ppoctl.recipe.schema import ColumnRows, Gsm8kRows


@dataclass(frozen=True)
class Rendered:
    """One row as the generator gets it."""

    messages: tuple[Message, ...]
    text: str
    token_ids: tuple[int, ...]


def load_tokenizer(path: str) -> Any:
    """Tokenizer of a model folder, or of a hub model in the local cache; nothing is downloaded. Raises
    EnvironmentProblemError where there is none."""
    try:
        # Imported apart: the automatic one brings every architecture, which takes seconds.
        if _has_tokenizer_json(path):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        from transformers import AutoTokenizer

        # Otherwise it asks whoever sits at a terminal whether to run code of the folder.
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises Exception itself for a file that it cannot read
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise EnvironmentProblemError(
            f"`model.path` is `{path}`, and no tokenizer can be loaded from it: {first}",
            hint="name a folder with `tokenizer.json`; a hub model is fetched first, with `hf download MODEL`",
        ) from error


def _has_tokenizer_json(path: str) -> bool:
    if Path(path).is_dir():
        return (Path(path) / "tokenizer.json").is_file()
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(path, "tokenizer.json"), str)


class PromptTemplate:
    """Renderer of rows. `tokenizer` is a Hugging Face one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def digest(self) -> str:
        """SHA-256 of everything that decides which ids a text gets: the tokenizer, its special tokens, the
        template."""
        tokenizer = self._tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        core = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        parts = json.dumps([core, sorted(special.items()), self._chat_template])
        return hashlib.sha256(parts.encode()).hexdigest()

    def render(self, rows: Sequence[Row], table: Gsm8kRows | ColumnRows, *, name: str) -> list[Rendered]:
        """Render rows in order. `name` is the dataset's key below `data`.

        Raises DataError where the table's system message or instruction meets a chat that has its own, and where the
        template refuses a row.
        """
        chats = [chat_of(row, table, name=name) for row in rows]
        if self._chat_template is None:
            texts = ["\n\n".join(message.content for message in chat) for chat in chats]
            opening = self._opening_ids()
        else:
            texts = [self._apply(chat, row) for chat, row in zip(chats, rows, strict=True)]
            opening = ()
        # The template writes its special tokens itself; the tokenizer must not add a second beginning.
        # Lengths are our own check's business (`require_fits`), so it need not warn of them.
        encoded = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [Rendered(chat, text, (*opening, *ids)) for chat, text, ids in zip(chats, texts, encoded, strict=True)]

    @property
    def _chat_template(self) -> Any:
        return getattr(self._tokenizer, "chat_template", None)

    def _apply(self, chat: tuple[Message, ...], row: Row) -> str:
        messages = [{"role": message.role, "content": message.content} for message in chat]
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is code: it can fail in any way
            raise refused(row, error) from error
        return str(text)

    def _opening_ids(self) -> tuple[int, ...]:
        """Ids of the beginning-of-sequence token where this tokenizer adds one. The tokenizer itself is asked,
        because what it adds at the *end* (some add an end token) must not end up in a prompt."""
        bos = self._tokenizer.bos_token_id
        with_special = self._tokenizer("x", add_special_tokens=True)["input_ids"]
        return (bos,) if bos is not None and with_special[:1] == [bos] else ()


def refused(row: Row, error: Exception) -> DataError:
    """The error for a row that the model's chat template does not take."""
    return DataError(
        f"the model's chat template refuses row `{row.id}` ({row.place}): {error}",
        hint="many templates take no system message, or want user and assistant to take turns",
    )


def chat_of(row: Row, table: Gsm8kRows | ColumnRows, *, name: str) -> tuple[Message, ...]:
    """Messages of a row: its own, or system message and question with instruction. Raises DataError on a conflict of
    the two."""
    system = (Message("system", table.system),) if table.system else ()
    if isinstance(row.question, str):
        question = f"{row.question}\n{table.instruction}" if table.instruction else row.question
        return (*system, Message("user", question))
    if table.instruction:
        raise DataError(
            f"`data.{name}.instruction` is set, and the prompt of row `{row.id}` ({row.place}) is a chat",
            hint=f'--set data.{name}.instruction=""; a chat says everything itself',
        )
    if system and row.question[0].role == "system":
        raise DataError(
            f"`data.{name}.system` is set, and row `{row.id}` ({row.place}) has a system message of its own",
            hint=f'--set data.{name}.system=""',
        )
    return (*system, *row.question)


def require_fits(rows: Sequence[Row], rendered: Sequence[Rendered], *, max_prompt_tokens: int, name: str) -> None:
    """Raises DataError on the longest prompt where it is over the limit, and on a prompt without tokens."""
    lengths = [len(prompt.token_ids) for prompt in rendered]
    if not min(lengths):
        row = rows[lengths.index(0)]
        raise DataError(f"row `{row.id}` ({row.place}) renders to no tokens", hint="look at the chat template")
    longest = max(lengths)
    if longest > max_prompt_tokens:
        row = rows[lengths.index(longest)]
        too_long = sum(length > max_prompt_tokens for length in lengths)
        raise DataError(
            f"row `{row.id}` ({row.place}) has {longest} prompt tokens, and `rollout.max_prompt_tokens` is "
            f"{max_prompt_tokens}; {too_long} of {len(lengths)} rows of `data.{name}` are over it",
            hint=f"--set rollout.max_prompt_tokens={longest}",
        )
