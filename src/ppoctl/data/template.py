"""The way from questions to token ids, through the model's own tokenizer and chat template.

With a chat template: the messages of `framing`, then what opens the assistant's turn.
Without one (base models): the same parts as plain text, a blank line between messages, after the tokenizer's
beginning-of-sequence token where it adds one. No other token is added.

A model with `tokenizer.json` is read as that file says. `AutoTokenizer` may rebuild it from the vocabulary with the
rules of the architecture in `config.json`, and then cut the same text differently from what the model was trained on.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ppoctl.batch.prompts import Message
from ppoctl.data.framing import Framing
from ppoctl.data.rows import DatasetRow
from ppoctl.errors import DataError, EnvironmentProblemError
from ppoctl.recipe.rows import SingleTable


@dataclass(frozen=True)
class Rendered:
    """One row as the generator gets it."""

    messages: tuple[Message, ...]
    text: str
    token_ids: tuple[int, ...]


def load_tokenizer(path: str, key: str = "model.path") -> Any:
    """Tokenizer of a model folder, or of a hub model in the local cache; nothing is downloaded. Raises
    EnvironmentProblemError where there is none; `key` names the folder."""
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
            f"`{key}` is `{path}`, and no tokenizer can be loaded from it: {first}",
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

    def render(self, rows: Sequence[DatasetRow], table: SingleTable, *, name: str) -> list[Rendered]:
        """Render rows in order. `name` is the dataset's key below `data`.

        Raises what `Framing.chat` raises, and DataError where the template refuses a row.
        """
        framing = Framing(table, name=name)
        chats = [framing.chat(row) for row in rows]
        texts = [self.text(chat, row, table.template_args) for chat, row in zip(chats, rows, strict=True)]
        told = zip(chats, texts, self.token_ids(texts), strict=True)
        return [Rendered(chat, text, ids) for chat, text, ids in told]

    def text(self, chat: Sequence[Message], row: DatasetRow, arguments: Mapping[str, object]) -> str:
        """The chat as text, with what opens the assistant's turn. Raises DataError where the template refuses it."""
        if self._chat_template is None:
            return "\n\n".join(message.content for message in chat)
        messages = [{"role": message.role, "content": message.content} for message in chat]
        try:
            text = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **arguments
            )
        except Exception as error:  # a template is code: it can fail in any way
            raise refused(row, error) from error
        return str(text)

    def token_ids(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Token ids of texts that `text` gave."""
        # The template writes its special tokens itself; the tokenizer must not add a second beginning.
        # Lengths are our own check's business (`index`), so it need not warn of them.
        encoded = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [(*self.opening, *ids) for ids in encoded]

    def most_tokens(self, text: str) -> int | None:
        """A bound on the tokens of a text that costs no look at its merges; None: the tokenizer allows none.

        A token of a byte-level vocabulary is at least one byte. Unicode's composed form (NFC) leaves ASCII alone, and
        makes at most three bytes of one.
        """
        if not self._is_byte_level:
            return None
        return len(self.opening) + (len(text) if text.isascii() else 3 * len(text.encode()))

    @cached_property
    def opening(self) -> tuple[int, ...]:
        """Ids of the beginning-of-sequence token where there is no template to write it, and this tokenizer adds
        one. The tokenizer itself is asked, because what it adds at the *end* (some add an end token) must not end up
        in a prompt."""
        bos = self._tokenizer.bos_token_id
        if self._chat_template is not None or bos is None:
            return ()
        with_special = self._tokenizer("x", add_special_tokens=True)["input_ids"]
        return (bos,) if with_special[:1] == [bos] else ()

    @cached_property
    def _is_byte_level(self) -> bool:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return False
        told = json.loads(backend.to_str())
        before = told.get("pre_tokenizer") or {}
        steps = before.get("pretokenizers", [before])
        cuts = ("Split", "Digits", "Punctuation", "Whitespace")  # which add nothing
        byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
        return (
            (told.get("normalizer") or {"type": "NFC"})["type"] == "NFC"
            and len(byte_level) == 1
            and not byte_level[0].get("add_prefix_space")
            and all(step in byte_level or step.get("type") in cuts for step in steps)
        )

    @property
    def _chat_template(self) -> Any:
        return getattr(self._tokenizer, "chat_template", None)


def refused(row: DatasetRow, error: Exception) -> DataError:
    """The error for a row that the model's chat template does not take."""
    return DataError(
        f"the model's chat template refuses row `{row.id}` ({row.place}): {error}",
        hint="many templates take no system message, or want user and assistant to take turns",
    )
