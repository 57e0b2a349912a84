"""Conversion of token ids to the text that a scorer reads. The engine uses only ids."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ppoctl.ports import SamplingParams


class Detokenizer:
    """The model's tokenizer, loaded on first use."""

    def __init__(self, model: str, eos_token_ids: Sequence[int]) -> None:
        self._model = model
        self._eos_token_ids = frozenset(eos_token_ids)

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._model, trust_remote_code=False)

    def text(self, tokens: Sequence[int], params: SamplingParams) -> str:
        """Return the decoded response, without special tokens and without the token that ends the response (even if
        the tokenizer does not list this token as special). The text ends before the first stop string that is
        complete only after the first `min_new_tokens` tokens."""
        text = self._decoded(self._without_end(tokens, params))
        if not params.stop_strings:
            return text
        ignored = len(self._decoded(tokens[: params.min_new_tokens]))
        starts = ((stop, max(0, ignored - len(stop) + 1)) for stop in params.stop_strings)
        stops = [position for position in (text.find(stop, start) for stop, start in starts) if position >= 0]
        return text[: min(stops)] if stops else text

    def marked_text(self, tokens: Sequence[int], params: SamplingParams) -> str:
        """Return the decoded response with special tokens and stop strings, without the token that ends the response.
        No blanks are removed: the text may be JSON."""
        inner = list(self._without_end(tokens, params))
        return str(self.tokenizer.decode(inner, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _without_end(self, tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        ends = self._eos_token_ids.union(params.stop_token_ids)
        return tokens[:-1] if tokens and tokens[-1] in ends else tokens

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)) if tokens else ""
