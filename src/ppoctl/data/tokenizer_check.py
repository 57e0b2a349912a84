"""Check that rewards see the text that `tokenizer.json` stores, and that prompts have its ids.

The judge is the library `tokenizers` alone: this module uses no code of `data.tokenizer`. For texts, the judge gets
only the tokens of the probe, because reading a large vocabulary takes half a second.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.models.folder import read_json_object

_SPACED = 160
"""Number of probed tokens that are evenly spaced over the vocabulary."""
_ADDED = 64
"""Maximum number of probed added tokens."""
_TOGETHER = 7
_MARKS = ("", "\u0120", "\u2581", "##", " ")
"""Starts of a token that begins with a blank, or continues a word."""
_ENDS = (
    ".",
    ",",
    "!",
    "?",
    "'",
    "s",
    "'s",
    "'m",
    "'ve",
    "'re",
    "n't",
    "\u010a",
    "\n",
    "<0x0A>",
    "12",
    "1",
    "The",
    "a",
)
"""Tokens at which a decoder may remove or add blanks."""
_TEXTS = (
    "What is 12 + 3?\nIt's 15 .\n\n  #### 15",
    " don't , we 've\t\u00e9\u4f60\U0001f600\r\n",
    "def f(x):\n    return x ** 2  # 1,000",
)


def require_text_as_stored(
    folder: Path,
    text_of: Callable[[Sequence[int]], str],
    silent: Collection[int] = (),
    key: str = "model.path",
    stored: Mapping[str, Any] | None = None,
) -> None:
    """Raise EnvironmentProblemError if `text_of` returns another text for token ids than `tokenizer.json` in `folder`
    stores. `silent` are ids that may have no text. `key` is the recipe key of the folder. `stored` is the content of
    the file, if it has been read.

    `text_of` has to know the tokens of `added_tokens_decoder` in `tokenizer_config.json` too.
    """
    from tokenizers import Tokenizer

    stored = read_json_object(folder / "tokenizer.json") if stored is None else stored
    added = {int(token["id"]): str(token["content"]) for token in stored.get("added_tokens") or ()}
    vocabulary = {id: token for token, id in _pairs(stored["model"]["vocab"])} | added
    probed = _probed(vocabulary, [*added], silent)
    judge = Tokenizer.from_str(json.dumps(_reduced(stored, {id: vocabulary[id] for id in {*probed, *added}})))
    for ids in chain(_groups(probed), ([id] for id in probed)):
        _require_equal(folder, key, ids, text_of(ids), str(judge.decode(ids, skip_special_tokens=False)))
    config = read_json_object(folder / "tokenizer_config.json")
    for written, token in (config.get("added_tokens_decoder") or {}).items():
        if int(written) not in vocabulary and int(written) not in silent:
            _require_equal(folder, key, [int(written)], text_of([int(written)]), str(token["content"]))


def require_ids_as_stored(folder: Path, ids_of: Callable[[str], Sequence[int]], key: str = "model.path") -> None:
    """Raise EnvironmentProblemError if `ids_of` returns other ids for a text than `tokenizer.json` in `folder`."""
    from tokenizers import Tokenizer

    judge = Tokenizer.from_file(str(folder / "tokenizer.json"))
    judge.no_truncation()
    judge.no_padding()
    if getattr(judge.model, "dropout", None):
        judge.model.dropout = None
    for text in _TEXTS:
        ours, theirs = list(ids_of(text)), judge.encode(text, add_special_tokens=False).ids
        if ours != theirs:
            raise _two_readers(folder, key, f"prompts get the ids {ours} for {text!r}, but `tokenizer.json` {theirs}")


def _require_equal(folder: Path, key: str, ids: Sequence[int], ours: str, theirs: str) -> None:
    if ours != theirs:
        raise _two_readers(folder, key, f"rewards see {ours!r} for the ids {list(ids)}, but they are {theirs!r}")


def _two_readers(folder: Path, key: str, difference: str) -> EnvironmentProblemError:
    return EnvironmentProblemError(
        f"`{key}` is `{folder}`, whose tokenizer is read in two ways: {difference}",
        hint="pip list  # report this line with the versions of `tokenizers` and `transformers`",
    )


def _pairs(vocabulary: Any) -> Iterator[tuple[str, int]]:
    if isinstance(vocabulary, Mapping):
        return ((str(token), int(id)) for token, id in vocabulary.items())
    return ((str(entry[0]), id) for id, entry in enumerate(vocabulary))  # pairs of token and score, in id order


def _probed(vocabulary: Mapping[int, str], added: Sequence[int], silent: Collection[int]) -> list[int]:
    """Return the ids of the probe, in a mixed order."""
    ends = {mark + end for mark in _MARKS for end in _ENDS}
    ids = sorted(vocabulary)
    chosen = {
        *ids[:: max(1, len(ids) // _SPACED)],
        *added[:: max(1, -(-len(added) // _ADDED))],
        *(id for id, token in vocabulary.items() if token in ends),
    }
    kept = sorted(chosen.difference(silent))
    return [id for start in range(_TOGETHER) for id in kept[start::_TOGETHER]]


def _groups(ids: Sequence[int]) -> Iterator[list[int]]:
    return (list(ids[start : start + _TOGETHER]) for start in range(0, len(ids), _TOGETHER))


def _reduced(stored: Mapping[str, Any], tokens: Mapping[int, str]) -> dict[str, Any]:
    """Return the tokenizer with only these tokens. It can decode, and not encode."""
    model = dict(stored["model"])
    if isinstance(model["vocab"], Mapping):
        model["vocab"] = {token: id for id, token in tokens.items()}
        model["merges"] = []
    return {**stored, "model": model, "normalizer": None, "pre_tokenizer": None, "post_processor": None}
