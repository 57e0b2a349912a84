"""The tokenizer of a model. Prompts, scorers, stop strings, tool parsers and screens all read text through it.

If the model has `tokenizer.json`, the library `tokenizers` reads that file, and its decoder alone makes text.
`AutoTokenizer` could instead build another tokenizer from the vocabulary, the class in `tokenizer_config.json` and
the architecture in `config.json`. Such a tokenizer may split and join text differently than the tokenizer that the
model was trained with. `AutoTokenizer` is used only for a model without `tokenizer.json`.

    load_tokenizer    with transformers, which takes seconds to import, and adds the tokens that only other files name
    quick_tokenizer   without transformers, if the other files name no such token; otherwise the same as above

Both have the same vocabulary and give the same ids and texts. tests/data/test_tokenizer_folders.py compares them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.models.folder import local_folder, read_json_object

FILE = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_PATCHES = ("split_special_tokens", "fix_mistral_regex", "fast_tokenizer_files")
"""Keys of tokenizer_config.json with which transformers changes the tokenizer of tokenizer.json."""
_LISTS = ("extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens")


class LightTokenizer:
    """Tokenizer of `tokenizer.json` with the methods of a tokenizer of transformers that `PromptTemplate` calls."""

    def __init__(self, folder: Path) -> None:
        """Read the tokenizer. Raises any error of the library `tokenizers` if the file cannot be read."""
        self.backend_tokenizer = _read(folder / FILE)
        self.special_tokens_map = special_tokens(folder)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-sequence token; None: the model has no such token."""
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that the tokenizer calls end of sequence; None: it has no such token."""
        return self._id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token; None: the model has no such token."""
        return self._id("pad_token")

    def _id(self, name: str) -> int | None:
        text = self.special_tokens_map.get(name)
        token_id: int | None = None if text is None else self.backend_tokenizer.token_to_id(text)
        return token_id

    def __call__(self, texts: str | Sequence[str], *, add_special_tokens: bool, verbose: bool = False) -> Any:
        """Return the token ids of one text, or a list of the token ids of several texts, as `input_ids`."""
        del verbose  # `verbose` is ignored: this class never warns
        if isinstance(texts, str):
            return {"input_ids": self.backend_tokenizer.encode(texts, add_special_tokens=add_special_tokens).ids}
        encoded = self.backend_tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return {"input_ids": [encoding.ids for encoding in encoded]}


def _read(file: Path) -> Any:
    state = file.stat()
    return _read_once(str(file), state.st_mtime_ns, state.st_size)


@lru_cache(2)  # a large vocabulary takes half a second
def _read_once(file: str, _modified: int, _bytes: int) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(file)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _stop_dropout(tokenizer)
    return tokenizer


def _stop_dropout(backend: Any) -> None:
    """Let a text always have the same ids. Some files store the dropout with which the tokenizer was trained."""
    if getattr(backend.model, "dropout", None):
        backend.model.dropout = None


def light_tokenizer(folder: Path) -> LightTokenizer | None:
    """Return the tokenizer of a folder; None: `tokenizer.json` is missing, cannot be read, or is not all that
    transformers reads.

    In the last two cases, `load_tokenizer` reads it or reports the error.
    """
    if not (folder / FILE).is_file() or read_json_object(folder / _CONFIG).keys() & {*_PATCHES}:
        return None
    try:
        tokenizer = LightTokenizer(folder)
        known = {token.content: token for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values()}
        return tokenizer if all(token.is_one_of(known) for token in named_tokens(folder)) else None
    except EnvironmentProblemError:
        raise
    except Exception:  # noqa: BLE001 - the library raises plain Exception
        return None


def quick_tokenizer(path: str, key: str = "model.path") -> Any:
    """Return the tokenizer of a model folder. transformers is imported only if the tokenizer is otherwise not the
    same. Raises the errors of `load_tokenizer`."""
    folder = local_folder(path)
    return (None if folder is None else light_tokenizer(folder)) or load_tokenizer(path, key)


def load_tokenizer(path: str, key: str = "model.path") -> Any:
    """Return the tokenizer of a model folder, or of a hub model in the local cache. Downloads nothing.

    `key` is the recipe key that names the folder. Raises EnvironmentProblemError if there is no tokenizer, or if a
    token of the configuration does not have the id that the configuration states.
    """
    folder = local_folder(path)
    has_file = folder is not None and (folder / FILE).is_file()
    try:
        # AutoTokenizer imports every architecture, which takes seconds.
        if has_file:
            from transformers import PreTrainedTokenizerFast

            tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        else:
            from transformers import AutoTokenizer

            # Without `trust_remote_code=False`, it would ask on a terminal whether to run code of the folder.
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library `tokenizers` raises plain Exception for a file that it cannot read
        first = next(iter(str(error).splitlines()), type(error).__name__)
        first = f"a file lacks {first}" if isinstance(error, KeyError) else first
        raise EnvironmentProblemError(
            f"`{key}` is `{path}`, but no tokenizer can be loaded from it: {first}",
            hint=f"name a folder with `{FILE}`; a hub model is fetched first, with `hf download MODEL`",
        ) from error
    if set(tokenizer.get_vocab()) <= {str(token) for token in tokenizer.added_tokens_decoder.values()}:
        raise EnvironmentProblemError(
            f"`{key}` is `{path}`, whose tokenizer has no vocabulary: only its added tokens would have ids",
            hint=f"fetch the model again, with its `{FILE}`",
        )
    if folder is not None and has_file:
        _stop_dropout(tokenizer.backend_tokenizer)
        _require_stated_ids(folder, tokenizer.backend_tokenizer)
    return tokenizer


def _require_stated_ids(folder: Path, backend: Any) -> None:
    for token in named_tokens(folder):
        if token.id is not None and (found := backend.token_to_id(token.content)) != token.id:
            raise EnvironmentProblemError(
                f"`{token.file}` gives the token `{token.content}` the id {token.id}, but with `{folder / FILE}` it "
                f"has the id {found}: the model would read another token",
                hint="put the model's own tokenizer into the folder",
            )


def decode(tokenizer: Any, ids: Sequence[int], *, special: bool = True) -> str:
    """Return the text of token ids, with or without special tokens. No blanks are removed. Ids that the tokenizer
    does not know have no text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return str(backend.decode(list(ids), skip_special_tokens=not special))
    known = [id for id in ids if is_known(tokenizer, id)]
    return str(tokenizer.decode(known, skip_special_tokens=not special, clean_up_tokenization_spaces=False))


def is_known(tokenizer: Any, id: int) -> bool:
    """Whether the tokenizer has a token with this id. A model's vocabulary may be larger."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return 0 <= id < len(tokenizer) if backend is None else backend.id_to_token(id) is not None


def silent_ids(path: str, tokenizer: Any, end_token_ids: Iterable[int]) -> frozenset[int]:
    """Return the ids that are never part of the text of a response: those that end it, and padding. If the folder
    names an ordinary token of `tokenizer.json` as its padding, such as `!`, that token is text."""
    own = {id for id in (*end_token_ids, tokenizer.eos_token_id, tokenizer.pad_token_id) if id is not None}
    folder = local_folder(path)
    if folder is None or not (folder / FILE).is_file():
        return frozenset(own)
    stored = _read(folder / FILE)
    added = stored.get_added_tokens_decoder()
    return frozenset(id for id in own if id in added or stored.id_to_token(id) is None)


@dataclass(frozen=True)
class NamedToken:
    """A token that a file next to `tokenizer.json` names."""

    content: str
    file: Path
    id: int | None = None
    """Id that the file states; None: it states none."""
    flags: Mapping[str, bool] | None = None
    """`lstrip`, `normalized`, `special`, ...; None: the file states none."""
    is_special: bool = True
    """Whether the file names the token as a special one."""

    def is_one_of(self, known: Mapping[str, Any]) -> bool:
        """Whether `tokenizer.json` has the same token, so that transformers adds nothing. `known` are its added
        tokens, by content."""
        token = known.get(self.content)
        if token is None or (self.is_special and not token.special):
            return False
        return all(getattr(token, name, None) == flag for name, flag in (self.flags or {}).items())


def named_tokens(folder: Path) -> Iterator[NamedToken]:
    """Yield the tokens that transformers would add to those of `tokenizer.json`, in any order and with repetitions.

    Raises EnvironmentProblemError if a file is not a JSON object, or has other values where tokens belong.
    """
    file = folder / _CONFIG
    try:
        config = read_json_object(file)
        for id, written in (config.get("added_tokens_decoder") or {}).items():
            yield _named(written, file, int(id))
        yield from (_named(written, file) for written in _special(config))
        if "added_tokens_decoder" not in config:  # files of earlier versions of transformers
            file = folder / "special_tokens_map.json"
            yield from (_named(written, file) for written in _special(read_json_object(file)))
            file = folder / "added_tokens.json"
            yield from (_named(token, file, int(id)) for token, id in read_json_object(file).items())
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise EnvironmentProblemError(
            f"`{file}` does not have the form of a tokenizer's file: {type(error).__name__}: {error}",
            hint="fetch the model again",
        ) from error


def _special(config: Mapping[str, Any]) -> list[Any]:
    """Return the special tokens of a file: those with a name (`bos_token`), and those in lists."""
    found = [token for name, token in config.items() if name.endswith("_token") and isinstance(token, str | dict)]
    for name in _LISTS:
        listed = config.get(name) or ()
        found += listed.values() if isinstance(listed, dict) else listed
    return found


def _named(written: Any, file: Path, id: int | None = None) -> NamedToken:
    if isinstance(written, str):
        return NamedToken(written, file, id, is_special=id is None)
    flags = {name: value for name, value in written.items() if isinstance(value, bool)}
    return NamedToken(str(written["content"]), file, id, flags, is_special=id is None)


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens with a name (`bos_token`). As in transformers, special_tokens_map.json counts only if
    tokenizer_config.json does not list the added tokens, and then it counts more than tokenizer_config.json."""
    found = dict(read_json_object(folder / _CONFIG))
    if "added_tokens_decoder" not in found:
        found |= read_json_object(folder / "special_tokens_map.json")
    extra = found.get("extra_special_tokens")
    named = {name: token for name, token in found.items() if name.endswith("_token")}
    named |= extra if isinstance(extra, Mapping) else {}
    texts = {name: token.get("content") if isinstance(token, Mapping) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
