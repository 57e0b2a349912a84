"""Checks of a model's tokenizer: its ids fit the model, everyone reads the same text, and stop tokens exist."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ppoctl.algorithms.rollout_table import RolloutTable
from ppoctl.core.batch.requests import SamplingParams
from ppoctl.core.errors import EnvironmentProblemError, MissingAssetError, PpoctlError, RecipeError, quoted
from ppoctl.data.response_text import ResponseText
from ppoctl.data.tokenizer import FILE, named_tokens, quick_tokenizer
from ppoctl.data.tokenizer_check import require_text_as_stored
from ppoctl.models.end_tokens import end_token_ids
from ppoctl.models.folder import read_json_object
from ppoctl.models.shape import ModelShape

ANY_FILE = (FILE, "tokenizer_config.json", "tokenizer.model")
"""Files of which a folder with a tokenizer has at least one."""


def require_tokenizer(folder: Path, shape: ModelShape, key: str = "model.path") -> None:
    """Raise an error if a model has no tokenizer, or if an id of its tokenizer is not in the vocabulary of the model.
    Rewards must see the text that `tokenizer.json` stores. `key` is the recipe key of the folder."""
    if not any((folder / name).is_file() for name in ANY_FILE):
        raise MissingAssetError(f"`{key}` is `{folder}`: the folder has no tokenizer", hint=f"ls {quoted(folder)}")
    for token in named_tokens(folder):
        if token.id is not None:
            _require_id(token.id, token.file, shape)
    file = folder / FILE
    stored = read_json_object(file)
    if file.is_file():
        _require_id(max(_tokens_in(stored, file).values(), default=-1), file, shape)
    backend = getattr(quick_tokenizer(str(folder), key), "backend_tokenizer", None)
    if backend is not None:
        _require_id(max(backend.get_added_tokens_decoder(), default=-1), folder / "tokenizer_config.json", shape)
    if not file.is_file():
        return
    try:
        ends = end_token_ids(folder)
    except PpoctlError:  # reported by the check of end tokens
        ends = ()
    text, params = ResponseText(str(folder), ends), SamplingParams(1.0, 1)
    require_text_as_stored(folder, lambda ids: text.text(ids, params), text.silent, key, stored)


def _require_id(id: int, file: Path, shape: ModelShape) -> None:
    if id >= shape.vocab_size:
        raise EnvironmentProblemError(
            f"`{file}` has tokens up to {id}, but the model's vocabulary ends at {shape.vocab_size - 1} "
            "(`vocab_size` in config.json)",
            hint="put the model's own tokenizer into the folder",
        )


def tokens_of(file: Path) -> dict[str, int]:
    """Return the ids of all tokens of a `tokenizer.json`. Raises EnvironmentProblemError for other content."""
    return _tokens_in(read_json_object(file), file)


def _tokens_in(written: Mapping[str, Any], file: Path) -> dict[str, int]:
    try:
        vocabulary = written["model"]["vocab"]
        if isinstance(vocabulary, list):  # pairs of token and score, in id order
            vocabulary = {str(entry[0]): id for id, entry in enumerate(vocabulary)}
        added = {str(token["content"]): int(token["id"]) for token in written.get("added_tokens") or ()}
        return {**{str(token): int(id) for token, id in vocabulary.items()}, **added}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EnvironmentProblemError(
            f"`{file}` is not a tokenizer: it has no vocabulary of tokens and ids", hint="fetch the model again"
        ) from error


def stop_errors(
    rollout: RolloutTable, path: str, folder: Path | None, vocab_size: int | None
) -> Iterator[tuple[str, PpoctlError]]:
    """Yield the errors of stop tokens and stop strings that the model of `path` cannot generate, each with its key
    of `rollout`. `folder` contains the model, and `vocab_size` is the size of its vocabulary; None: it is not
    known."""
    ids = rollout.stop_token_ids
    if vocab_size is not None and (wrong := [id for id in ids if id >= vocab_size]):
        rest = [id for id in ids if id < vocab_size]
        yield (
            "stop_token_ids",
            RecipeError(
                f"`rollout.stop_token_ids` contains id {wrong[0]}, but the vocabulary of `{path}` has {vocab_size} "
                "ids",
                hint=f"--set {quoted(f'rollout.stop_token_ids={rest}')}",
            ),
        )
    if folder is None or rollout.special_tokens == "keep" or not rollout.stop_strings:
        return
    backend = getattr(quick_tokenizer(path), "backend_tokenizer", None)
    added = {} if backend is None else backend.get_added_tokens_decoder()
    special = [token.content for token in added.values() if token.special]
    for text in rollout.stop_strings:
        if dropped := [token for token in special if token in text]:
            yield (
                "stop_strings",
                RecipeError(
                    f"`rollout.stop_strings` contains `{text}`, but `rollout.special_tokens` is `drop`: without "
                    f"`{dropped[0]}`, the text never contains it, so it ends no response",
                    hint="--set rollout.special_tokens=keep",
                ),
            )
