"""Conversion of the ids of a response to the text that scorers, environments, evaluations and screens read. Engines
use only ids."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ppoctl.core.batch.requests import SamplingParams
from ppoctl.data.tokenizer import decode, load_tokenizer, quick_tokenizer, silent_ids

_BEFORE = "x"
"""Text before a response. Some decoders remove the blank at the start of a text."""


class ResponseText:
    """Converter of response ids to text. The model's tokenizer is loaded on first use."""

    def __init__(self, model: str, eos_token_ids: Sequence[int]) -> None:
        self._model = model
        self._eos_token_ids = frozenset(eos_token_ids)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer as an object of transformers, for vLLM."""
        return load_tokenizer(self._model)

    def text(self, tokens: Sequence[int], params: SamplingParams) -> str:
        """Return the decoded response without the token that ends the response (even if the tokenizer does not list
        this token as special), and without padding.

        Other special tokens are kept, or dropped, as `params` state. The text ends before the first stop string that
        is complete only after the first `min_new_tokens` tokens.
        """
        inner = self._without_end(tokens, params)
        text = self._decoded(inner, params)
        if not params.stop_strings:
            return text
        # vLLM looks for stop strings in the text after the prompt, where no blank is removed.
        whole = self._continued(inner, params)
        whole = whole if whole.endswith(text) else text
        ignored = len(self._continued(tokens[: params.min_new_tokens], params))
        starts = ((stop, max(0, ignored - len(stop) + 1)) for stop in params.stop_strings)
        stops = [position for position in (whole.find(stop, start) for stop, start in starts) if position >= 0]
        return whole[: min(stops)][len(whole) - len(text) :] if stops else text

    def marked_text(self, tokens: Sequence[int], params: SamplingParams) -> str:
        """Return the decoded response with special tokens and stop strings, without the token that ends the response.
        The text may be JSON."""
        return decode(self._reader, self._without_end(tokens, params))

    def _without_end(self, tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        ends = self._eos_token_ids.union(params.stop_token_ids)
        return tokens[:-1] if tokens and tokens[-1] in ends else tokens

    def _decoded(self, tokens: Sequence[int], params: SamplingParams) -> str:
        if params.special_tokens == "drop":
            return decode(self._reader, tokens, special=False)
        return decode(self._reader, [token for token in tokens if token not in self.silent])

    def _continued(self, tokens: Sequence[int], params: SamplingParams) -> str:
        """Return the decoded tokens as a continuation of a text."""
        return self._decoded([*self._before, *tokens], params).removeprefix(self._decoded(self._before, params))

    @cached_property
    def _reader(self) -> Any:
        return quick_tokenizer(self._model)

    @cached_property
    def silent(self) -> frozenset[int]:
        """Ids that are never part of the text: those that end a response, and padding."""
        return silent_ids(self._model, self._reader, self._eos_token_ids)

    @cached_property
    def _before(self) -> list[int]:
        return list(self._reader(_BEFORE, add_special_tokens=False)["input_ids"])
