"""Tokenizer of a model that does not import transformers, which takes seconds. Commands that only check rows use it.

`PromptTemplate` gets the same results from this tokenizer as from the tokenizer of transformers.
tests/data/test_light_tokenizer.py compares the results.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppoctl.data.chat import ChatTemplate


class LightTokenizer:
    """Tokenizer of a model folder with `tokenizer.json`."""

    def __init__(self, folder: Path, template: ChatTemplate) -> None:
        """Read `tokenizer.json`. Raises any error of the library `tokenizers` if the file cannot be read."""
        from tokenizers import Tokenizer

        self.backend_tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        self._template = template
        self.chat_template, self.special_tokens_map = template.written, template.special

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-sequence token; None: the model has no such token."""
        text = self._template.special.get("bos_token")
        token_id: int | None = None if text is None else self.backend_tokenizer.token_to_id(text)
        return token_id

    def __call__(self, texts: str | Sequence[str], *, add_special_tokens: bool, verbose: bool = False) -> Any:
        """Return the token ids of one text, or a list of the token ids of several texts, as `input_ids`."""
        del verbose  # `verbose` is ignored: this class never warns
        if isinstance(texts, str):
            return {"input_ids": self.backend_tokenizer.encode(texts, add_special_tokens=add_special_tokens).ids}
        encoded = self.backend_tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return {"input_ids": [encoding.ids for encoding in encoded]}


def light_tokenizer(folder: Path, template: ChatTemplate) -> LightTokenizer | None:
    """Return the tokenizer of a folder; None: `tokenizer.json` is missing or cannot be read.

    In the second case, `load_tokenizer` reports the error.
    """
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        return LightTokenizer(folder, template)
    except Exception:  # noqa: BLE001 - the library raises plain Exception
        return None
