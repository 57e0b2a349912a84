"""Token ids as text for people: the pieces join to the whole text, and a split character stays in one piece."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.data.token_text import TokenText
from ppoctl.data.tokenizer import load_tokenizer

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart/model"


def of_bytes(folder: Path) -> tuple[Tokenizer, TokenText]:
    """Return a tokenizer with one token for each byte."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer, TokenText(str(folder))


def test_multi_token_character_is_shown_at_its_first_token(tmp_path: Path) -> None:
    tokenizer, text = of_bytes(tmp_path)
    ids = tokenizer.encode("a\u00e9 \U0001f600b").ids
    assert text.pieces(ids) == ["a", "\u00e9", "", " ", "\U0001f600", "", "", "", "b"]


def test_invalid_bytes_do_not_affect_other_characters(tmp_path: Path) -> None:
    tokenizer, text = of_bytes(tmp_path)
    start, rest = tokenizer.encode("\u00e9").ids
    assert text.pieces([rest, rest, rest, rest, start, rest]) == ["\ufffd"] * 4 + ["\u00e9", ""]
    assert text.pieces([start]) == ["\ufffd"]
    smile = tokenizer.encode("\U0001f600").ids
    assert text.pieces([*smile[:3], start, rest])[-2:] == ["\u00e9", ""]
    assert text.pieces([start, *smile]) == ["\ufffd", "\U0001f600", "", "", ""]


def test_words_keep_their_leading_space(tmp_path: Path) -> None:
    tokenizer = Tokenizer(BPE(vocab={"\u2581": 0, "a": 1, "\u2581a": 2}, merges=[("\u2581", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TokenText(str(tmp_path)).pieces([2, 2, 1]) == ["a", " a", "a"]


def test_decoded_text_equals_transformers(make_tokenizer: Callable[..., Any], tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    for folder in (tmp_path, QUICKSTART):
        theirs = load_tokenizer(str(folder))
        ids = list(range(min(60, len(theirs))))
        assert TokenText(str(folder)).text(ids) == theirs.decode(ids)


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblemError, match="no tokenizer can be loaded from it"):
        TokenText(str(tmp_path / "none"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(
        EnvironmentProblemError, match="no tokenizer can be loaded from it: a file lacks 'added_tokens'"
    ):
        TokenText(str(tmp_path))
