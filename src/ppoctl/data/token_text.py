"""Token ids as text, for people. Light where the model has `tokenizer.json`: transformers takes seconds to import."""

from collections.abc import Callable, Sequence

from ppoctl.errors import EnvironmentProblemError
from ppoctl.model.folder import local_folder

_BROKEN = "\ufffd"
"""What a tokenizer gives for bytes that are no character, or not yet."""
_LONGEST = 4
"""Bytes of the longest character in UTF-8, and so the tokens that it may be cut into."""

Decode = Callable[[Sequence[int]], str]


class TokenText:
    """Text of token ids by a model's own tokenizer, special tokens included."""

    def __init__(self, path: str, key: str = "model.path") -> None:
        """Read the tokenizer of a model folder, or of a hub model in the local cache. Raises EnvironmentProblemError
        where there is none; `key` names the folder."""
        self._decode = _decoder(path, key)

    def text(self, ids: Sequence[int]) -> str:
        """The text of all of them."""
        return self._decode(ids)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What each adds to the text. A character that several tokens are parts of is with the first of them, and the
        others are empty; a token that is part of no character has a mark for it."""
        pieces = [""] * len(ids)
        known = start = 0  # decoding from the tokens before keeps the space that a first word loses
        while start < len(ids):
            told = len(self._decode(ids[known:start]))
            ends = range(start + 1, min(start + _LONGEST, len(ids)) + 1)
            texts = ((end, self._decode(ids[known:end])[told:]) for end in ends)
            end = next((end for end, text in texts if _BROKEN not in text), start + 1)
            pieces[start] = self._decode(ids[known:end])[told:]
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
    except Exception as error:  # the library raises Exception itself
        raise EnvironmentProblemError(
            f"`{key}` is `{path}`, and its `tokenizer.json` cannot be read: {error}",
            hint="fetch the model again",
        ) from error
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
