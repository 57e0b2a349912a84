"""Token ids of text from an environment, in which no text becomes a control token.

Control tokens are the added tokens of a tokenizer (`<|im_end|>`, `<tool_call>`), except tokens of blanks only and the
token of unknown characters. Only the chat template writes them. An observation with the text of one gets the ids of
an ordinary text.
"""

import json
import re
from collections.abc import Collection, Sequence
from functools import cached_property, lru_cache
from typing import Any

from ppoctl.core.batch.episodes import ControlTokensError

_HARMLESS = "x"
"""Content that contains no control token."""


class ControlText:
    """Encoder of text that alternates between static text of a template and contents of an environment.

    `tokenizer` is a Hugging Face tokenizer or a `LightTokenizer`. `ends` are control tokens in any case.
    """

    def __init__(self, tokenizer: Any, ends: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        added = tokenizer.added_tokens_decoder if self._backend is None else self._backend.get_added_tokens_decoder()
        unknown = getattr(getattr(self._backend, "model", None), "unk_token", None)
        texts = {id: token.content for id, token in added.items()}
        self.texts = {id: text for id, text in texts.items() if id in ends or (text.strip() and text != unknown)}
        """Id of a control token -> its text."""
        self._ids = {text: id for id, text in self.texts.items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._whole = lru_cache(256)(self._encode)

    def first(self, text: str) -> tuple[int, int] | None:
        """Return the id of the control token that a text starts with, and the position after it; None: there is none.
        Blanks may be before the token."""
        found = self._any.match(text, len(text) - len(text.lstrip()))
        return None if found is None else (self._ids[found.group()], found.end())

    def encode(self, pieces: Sequence[str], before: int | None = None) -> tuple[int, ...]:
        """Return the ids of static text and contents in turn; the first and the last piece are static text.

        `before` is the control token before the first piece; None: the pieces are at the start of a text. The ids are
        those of the complete text, unless a content contains the text of a control token. Raises ControlTokensError.
        """
        anchor = "" if before is None else self.texts[before]
        opening, *rest = pieces
        wanted = self._whole(_with_harmless((anchor + opening, *rest)))
        ids = self._encode(anchor + "".join(pieces))
        if self._controls(ids) != self._controls(wanted):
            ids = self._apart((anchor + opening, *rest), wanted)
        assert before is None or ids[0] == before
        return ids if before is None else ids[1:]

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _controls(self, ids: Sequence[int]) -> list[int]:
        return [id for id in ids if id in self.texts]

    def _apart(self, pieces: Sequence[str], wanted: Sequence[int]) -> tuple[int, ...]:
        """Return the ids of the pieces if the contents are encoded by a tokenizer without control tokens."""
        texts = [text for piece in pieces[1::2] for text in self._any.findall(piece)]
        if self._backend is None or self._split(_harmless(pieces)) != tuple(wanted):
            raise ControlTokensError(f"the tokenizer cannot write the control tokens {texts} as text")
        ids = self._split(pieces)
        if self._controls(ids) != self._controls(wanted):
            raise ControlTokensError(f"the tokenizer has no other tokens for the text of the control tokens {texts}")
        return ids

    def _split(self, pieces: Sequence[str]) -> tuple[int, ...]:
        """Return the ids of the pieces. The control tokens of the static pieces are found first; the text between
        them is encoded without control tokens."""
        opening = pieces[0]
        start = max((found.end() for found in self._any.finditer(opening)), default=len(opening))
        ids, run = list(self._encode(opening[:start])), opening[start:]
        for number, piece in enumerate(pieces[1:], start=1):
            end = 0
            for found in self._any.finditer(piece) if number % 2 == 0 else ():
                ids += self._ordinary(run + piece[end : found.start()])
                ids.append(self._ids[found.group()])
                run, end = "", found.end()
            run += piece[end:]
        return (*ids, *self._ordinary(run))

    def _ordinary(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _plain(self) -> Any:
        """The tokenizer without control tokens. It encodes each text as a text that follows a control token."""
        from tokenizers import Tokenizer

        assert self._backend is not None
        config = json.loads(self._backend.to_str())
        config["added_tokens"] = [token for token in config["added_tokens"] if token["id"] not in self.texts]
        splitter = config["pre_tokenizer"] or {}
        for step in (splitter, *splitter.get("pretokenizers", ())):
            if step.get("prepend_scheme") == "first":
                step["prepend_scheme"] = "never"
        plain = Tokenizer.from_str(json.dumps(config))
        plain.no_truncation()
        plain.no_padding()
        return plain


def _harmless(pieces: Sequence[str]) -> list[str]:
    return [_HARMLESS if number % 2 else piece for number, piece in enumerate(pieces)]


def _with_harmless(pieces: Sequence[str]) -> str:
    return "".join(_harmless(pieces))
