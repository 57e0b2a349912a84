"""Token ids as text, for display. transformers, which takes seconds to import, is imported only if necessary."""

from collections.abc import Sequence

from ppoctl.data.tokenizer import decode, is_known, quick_tokenizer

_BROKEN = "\ufffd"
"""Replacement character that a tokenizer returns for bytes that are not a complete character."""
_LONGEST = 4
"""Number of bytes of the longest character in UTF-8. A character is split into at most this many tokens."""


class TokenText:
    """Converter of token ids to text with the tokenizer of a model, including special tokens."""

    def __init__(self, path: str, key: str = "model.path") -> None:
        """Read the tokenizer of a model folder, or of a hub model in the local cache.

        `key` is the recipe key that names the folder. Raises EnvironmentProblemError if there is no tokenizer.
        """
        self._tokenizer = quick_tokenizer(path, key)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of all tokens."""
        return decode(self._tokenizer, ids)

    def unknown(self, ids: Sequence[int]) -> list[bool]:
        """Return whether the tokenizer lacks each id, shape [tokens]. Such a token has no text."""
        return [not is_known(self._tokenizer, id) for id in ids]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds, shape [tokens].

        If a character consists of several tokens, the first token has its text, and the texts of the other tokens are
        empty. A token that is not part of a character has the replacement character.
        """
        pieces = [""] * len(ids)
        known = start = 0  # decoding with the previous tokens keeps the leading space of a word
        while start < len(ids):
            known_chars = len(self.text(ids[known:start]))
            ends = range(start + 1, min(start + _LONGEST, len(ids)) + 1)
            texts = ((end, self.text(ids[known:end])[known_chars:]) for end in ends)
            end = next((end for end, text in texts if _BROKEN not in text), start + 1)
            pieces[start] = self.text(ids[known:end])[known_chars:]
            known, start = (start if pieces[start] else known), end
        return pieces
