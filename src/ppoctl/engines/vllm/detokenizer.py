"""Token ids to the text a scorer reads. The engine itself sees ids only."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any


class Detokenizer:
    """The model's tokenizer, loaded when first needed."""

    def __init__(self, model: str, eos_token_ids: Sequence[int]) -> None:
        self._model = model
        self._eos_token_ids = frozenset(eos_token_ids)

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._model, trust_remote_code=False)

    def text(self, tokens: Sequence[int], stop_strings: Sequence[str]) -> str:
        """Decoded response: special tokens skipped, the end token left out (also where the tokenizer does not call it
        special), cut before the first stop string."""
        kept = tokens[:-1] if tokens and tokens[-1] in self._eos_token_ids else tokens
        text = str(self.tokenizer.decode(list(kept), skip_special_tokens=True))
        found = [at for at in (text.find(stop) for stop in stop_strings) if at >= 0]
        return text[: min(found)] if found else text
