"""A model's tokenizer without transformers, whose import takes seconds: for checks that only read.

It gives `PromptTemplate` what transformers' tokenizer gives it; tests/data/test_light_tokenizer.py holds them equal.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppoctl.batch.prompts import Message
from ppoctl.data.chat import ChatTemplate


class LightTokenizer:
    """Tokenizer of a model folder with `tokenizer.json`."""

    def __init__(self, folder: Path, template: ChatTemplate) -> None:
        """Read the file. Raises whatever the library raises where it cannot read it."""
        from tokenizers import Tokenizer

        self.backend_tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        self._template = template
        self.chat_template = template.text

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-sequence token; None: there is none."""
        text = self._template.special.get("bos_token")
        found: int | None = None if text is None else self.backend_tokenizer.token_to_id(text)
        return found

    def __call__(self, texts: str | Sequence[str], *, add_special_tokens: bool, verbose: bool = False) -> Any:
        """Ids of one text, or of each of several, as `input_ids`."""
        del verbose  # nothing is warned of
        if isinstance(texts, str):
            return {"input_ids": self.backend_tokenizer.encode(texts, add_special_tokens=add_special_tokens).ids}
        encoded = self.backend_tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return {"input_ids": [each.ids for each in encoded]}

    def apply_chat_template(
        self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool, **arguments: object
    ) -> str:
        """The chat as text, with what opens the assistant's turn."""
        assert add_generation_prompt
        assert not tokenize
        return self._template.render([Message(each["role"], each["content"]) for each in messages], arguments)


def light_tokenizer(folder: Path, template: ChatTemplate) -> LightTokenizer | None:
    """The light tokenizer of a folder; None where it has no file for one, or one that cannot be read (whoever loads
    the model's own tokenizer says so)."""
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        return LightTokenizer(folder, template)
    except Exception:  # noqa: BLE001 - the library raises Exception itself
        return None
