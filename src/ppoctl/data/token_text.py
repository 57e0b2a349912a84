"""Token ids as text, for display.

If the model has `tokenizer.json`, transformers is not imported, because that would take seconds.
"""

from collections.abc import Callable, Sequence

from ppoctl.errors import EnvironmentProblemError
from ppoctl.model.folder import local_folder

_BROKEN = "\ufffd"
"""Replacement character that a tokenizer returns for bytes that are not a complete character."""
_LONGEST = 4
"""Number of bytes of the longest character in UTF-8. A character is split into at most this many tokens."""

Decode = Callable[[Sequence[int]], str]


class TokenText:
    """Converter of token ids to text with the tokenizer of a model, including special tokens."""

    def __init__(self, path: str, key: str = "model.path") -> None:
        """Read the tokenizer of a model folder, or of a hub model in the local cache.

        `key` is the recipe key that names the folder. Raises EnvironmentProblemError if there is no tokenizer.
        """
        self._decode = _decoder(path, key)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of all tokens."""
        return self._decode(ids)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds, shape [tokens].

        If a character consists of several tokens, the first token has its text, and the texts of the other tokens are
        empty. A token that is not part of a character has the replacement character.
        """
        pieces = [""] * len(ids)
        known = start = 0  # decoding with the previous tokens keeps the leading space of a word
        while start < len(ids):
            known_chars = len(self._decode(ids[known:start]))
            ends = range(start + 1, min(start + _LONGEST, len(ids)) + 1)
            texts = ((end, self._decode(ids[known:end])[known_chars:]) for end in ends)
            end = next((end for end, text in texts if _BROKEN not in text), start + 1)
            pieces[start] = self._decode(ids[known:end])[known_chars:]
            known, start = start, end
        return pieces


def _decoder(path: str, key: str) -> Decode:
    folder = local_folder(path)
    if folder is None or not (folder / "tokenizer.json").is_file():
        from ppoctl.data.template import load_tokenizer

        decode: Decode = load_tokenizer(path, key).decode
        return decode
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise EnvironmentProblemError(
            f"`{key}` is `{path}`, but its `tokenizer.json` cannot be read: {error}",
            hint="fetch the model again",
        ) from error
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
