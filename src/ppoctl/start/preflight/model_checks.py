"""Checks of whether a model can be trained and can generate.

The checks read the configuration of the model and the headers of its weight files.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from ppoctl.algorithms.roles import REFERENCE, head_of_model
from ppoctl.core.errors import EnvironmentProblemError, MissingAssetError, PpoctlError, RecipeError, quoted
from ppoctl.data.chat import ChatTemplate
from ppoctl.models.bundled_configs import carried_folder
from ppoctl.models.convert.frozen_base import completing_folder, read_frozen_base
from ppoctl.models.convert.headers import PICKLE, SAFETENSORS, Header, has_weights, headers
from ppoctl.models.convert.tensor_accounting import account, not_part_of, not_tied
from ppoctl.models.convert.tensors import EMBEDDING, LM_HEAD, VALUE_HEAD
from ppoctl.models.end_tokens import end_token_ids
from ppoctl.models.folder import hub_cache, is_hub_id, is_url, local_folder, read_config
from ppoctl.models.head import Head
from ppoctl.models.labels import label_number, labels_of
from ppoctl.models.shape import ModelShape
from ppoctl.models.shape_reader import read_shape
from ppoctl.recipe.generator_limits import require_head_size, unread_router_bias
from ppoctl.rewards.model_reward import ModelScorer
from ppoctl.start.preflight.critic_state import tokenizer_folder
from ppoctl.start.preflight.tokenizer_checks import require_tokenizer, tokens_of
from ppoctl.store.disk_errors import existing

_CHUNK_BYTES = 1 << 22
_VALUE_HEAD_CLASS = "ForSequenceClassification"
"""End of the name of each class in `architectures` that has a value head."""


def find_model(path: str, key: str) -> Path:
    """Return the folder of a model on this machine. `key` is the recipe key of the model, for messages.

    Raises MissingAssetError if a hub id has not been fetched, RecipeError for a URL, EnvironmentProblemError if the
    folder does not exist or cannot be read.
    """
    if found := local_folder(path):
        if not os.access(found, os.R_OK | os.X_OK):
            raise EnvironmentProblemError(
                f"`{key}` is `{path}`: the folder cannot be read: Permission denied", hint=f"ls -ld {quoted(found)}"
            )
        return found
    if is_url(path):
        raise RecipeError(
            f"`{key}` is `{path}`, a URL; a model is a folder or a hub id",
            hint=f"fetch it first, then --set {key}={quoted(f'./{Path(path).name}')}",
        )
    if is_hub_id(path):
        searched = f"not in {quoted(hub_cache())}; a folder is written {quoted(f'./{path}')}"
        raise MissingAssetError(
            f"`{key}` is `{path}`: it has not been fetched", hint=f"hf download {quoted(path)}  # {searched}"
        )
    raise EnvironmentProblemError(f"`{key}` is `{path}`: no such folder", hint=_similar(Path(path), key))


def _similar(folder: Path, key: str) -> str:
    """Return the command that sets the key to a folder with a similar name, or that lists the nearest folder which
    exists."""
    parent = existing(folder.parent)
    names = [each.name for each in parent.iterdir() if each.is_dir()] if os.access(parent, os.R_OK | os.X_OK) else []
    if parent == folder.parent and (nearest := get_close_matches(folder.name, names, n=1)):
        return f"--set {key}={quoted(parent / nearest[0])}"
    return f"ls {quoted(parent)}  # a folder; a hub id is written {quoted(f'ORGANISATION/{folder.name}')}"


def model_faults(path: str, device: str | None) -> Iterator[PpoctlError]:
    """Yield all errors of the base model. `device` is the device of the generator (vLLM); None if it is unknown."""
    checks: tuple[Callable[[Path, ModelShape], None], ...]
    generator = partial(_require_generator, device=device)
    try:
        folder, checks = find_model(path, "model.path"), (_require_weights, _require_end_tokens, require_tokenizer)
    except PpoctlError as error:
        yield error
        if (carried := carried_folder(path)) is None:
            return
        folder, checks = carried, ()
    try:
        _require_file(folder, "config.json", "model.path")
        shape = read_shape(folder)
    except PpoctlError as error:
        yield error
        return
    for check in (*checks, generator):
        try:
            check(folder, shape)
        except PpoctlError as error:
            yield error


def require_own_model(name: str, path: str, base: str) -> list[str]:
    """Return notes on the own model of the critic, which may have any architecture, or of the reference.

    Raises RecipeError if its tokenizer differs from the actor's tokenizer or if it has another head, and the errors
    that `model_faults` yields for missing files.
    """
    key = f"model.{name}.path"
    folder, base_folder = find_model(path, key), local_folder(base)
    is_megatron = (folder / ".metadata").is_file()
    if (frozen := read_frozen_base(folder)) is not None:
        completing_folder(folder, frozen)
    if is_megatron and not (folder / "config.json").is_file():
        raise RecipeError(
            f"`{key}` is `{path}`: the folder has no config.json, so its model is unknown",
            hint=f"ppoctl convert-ckpt {quoted(folder)} {quoted(name.upper())} --to hf",
        )
    _require_file(folder, "config.json", key)
    shape = read_shape(folder)
    own_tokenizer = tokenizer_folder(folder) if is_megatron else folder
    if base_folder is not None:
        _require_same_tokens(name, path, own_tokenizer or folder, shape, base_folder)
    if is_megatron:
        _require_megatron_head(name, path, folder)  # only torch can read the rest
        unknown = f"`{key}` is `{path}`, whose run is not here: its tokenizer is not compared with the actor's"
        return [] if own_tokenizer is not None else [unknown]
    found, head = _headers(folder, key), head_of_model(name)
    _require_bytes(found, folder, shape, head)
    starts_at_zero = head == "value" and VALUE_HEAD not in found
    return [f"`{key}` is `{path}`, which has no value head: the value head starts at zero"] * starts_at_zero


def require_reward_model(table: ModelScorer, key: str) -> None:
    """Raise an error if a reward model cannot score. `key` is the recipe key of its table.

    Possible causes: no folder, no head, a head without the label of the recipe, incomplete weights, fewer positions
    than `max_tokens`, no tokenizer, no chat template.
    """
    folder = find_model(table.path, f"{key}.path")
    _require_file(folder, "config.json", f"{key}.path")
    label_number(folder, table.label, key)
    shape = replace(read_shape(folder), labels=len(labels_of(folder)))
    if not (folder / ".metadata").is_file():  # only torch can read weights in Megatron format
        _require_bytes(_headers(folder, f"{key}.path"), folder, shape, "value")
    if table.max_tokens is not None and table.max_tokens > shape.max_positions:
        raise RecipeError(
            f"`{key}.max_tokens` is `{table.max_tokens}`, but the reward model in `{folder}` has "
            f"{shape.max_positions} positions",
            hint=f"--set {key}.max_tokens={shape.max_positions}",
        )
    require_tokenizer(folder, shape, f"{key}.path")
    if table.template == "own" and ChatTemplate.of_folder(folder).text is None:
        raise EnvironmentProblemError(
            f"the reward model in `{folder}` has no chat template",
            hint=f"put it next to its tokenizer, or let the model read plain text: --set {key}.template=text",
        )


def _require_same_tokens(name: str, path: str, folder: Path, shape: ModelShape, base: Path) -> None:
    wanted, key = read_shape(base).vocab_size, f"model.{name}.path"
    default = "is the actor's initial model" if name == REFERENCE else "starts from the actor's model"
    hint = f"use a {name} with the actor's tokenizer, or omit the key: the {name} then {default}"
    if shape.vocab_size < wanted:
        raise RecipeError(
            f"`{key}` is `{path}`, whose `vocab_size` is `{shape.vocab_size}`, but `model.path` has `{wanted}`: "
            f"the {name} must read every token that the actor can generate",
            hint=hint,
        )
    ours, its = (model / "tokenizer.json" for model in (base, folder))
    if not (ours.is_file() and its.is_file()) or ours.read_bytes() == its.read_bytes():
        return
    known = tokens_of(its)
    for token, id in tokens_of(ours).items():
        if known.get(token) != id:
            raise RecipeError(
                f"`{key}` is `{path}`, whose tokenizer maps `{token}` to `{known.get(token, 'absent')}`, but the "
                f"tokenizer of `model.path` maps it to `{id}`",
                hint=hint,
            )


def _require_megatron_head(name: str, path: str, folder: Path) -> None:
    """Raise RecipeError if the folder has the weights of an actor for a critic, or the weights of a critic for a
    reference."""
    classes, key = read_config(folder).get("architectures") or (), f"model.{name}.path"
    has_value_head = any(each.endswith(_VALUE_HEAD_CLASS) for each in classes)
    if has_value_head and head_of_model(name) == "token":
        raise RecipeError(
            f"`{key}` is `{path}`, which has the weights of a critic in Megatron format",
            hint="use the weights of an actor: a state in `states/actor` of a run",
        )
    if not has_value_head and head_of_model(name) == "value":
        raise RecipeError(
            f"`{key}` is `{path}`, which has the weights of an actor in Megatron format",
            hint="use the weights of a critic, or convert these (the value head starts at zero): "
            f"ppoctl convert-ckpt {quoted(folder)} {quoted(name.upper())} --to hf",
        )


def _require_file(folder: Path, name: str, key: str) -> None:
    if not (folder / name).is_file():
        raise MissingAssetError(f"`{key}` is `{folder}`: the folder has no {name}", hint=f"ls {quoted(folder)}")


def _require_generator(folder: Path, shape: ModelShape, device: str | None) -> None:
    if device is not None:
        require_head_size(shape.head_dim, str(folder), device)
    has_bias = shape.experts is not None and shape.experts.sigmoid is not None
    if has_bias and "topk_method" not in read_config(folder):
        raise unread_router_bias(str(folder))


def _require_weights(folder: Path, shape: ModelShape) -> None:
    _require_bytes(_headers(folder, "model.path"), folder, shape, "token")


def _headers(folder: Path, key: str) -> dict[str, Header]:
    """Return the headers of the weights of a model, which the recipe key `key` names."""
    if has_weights(folder, SAFETENSORS):
        return headers(folder)
    if has_weights(folder, PICKLE):
        raise EnvironmentProblemError(
            f"the weights in `{folder}` are pickles (`{PICKLE}`), which ppoctl does not load for training",
            hint=f"save the model again with transformers' save_pretrained, or fetch {SAFETENSORS}",
        )
    raise MissingAssetError(
        f"`{key}` is `{folder}`: the folder has neither {SAFETENSORS} nor its index", hint=f"ls {quoted(folder)}"
    )


def _require_bytes(found: Mapping[str, Header], folder: Path, shape: ModelShape, head: Head) -> None:
    """Check the names and shapes of all tensors, and the values of tensors that must be equal (tied) or zero."""
    result = account(found, folder, shape, head)
    if result.must_be_tied and not _same_bytes(found[LM_HEAD], found[EMBEDDING]):
        raise not_tied(folder)
    for name in result.must_be_zero:
        if any(any(chunk) for chunk in _chunks(found[name])):
            raise not_part_of(name, folder, head)


def _same_bytes(one: Header, other: Header) -> bool:
    return one.kind == other.kind and all(a == b for a, b in zip(_chunks(one), _chunks(other), strict=True))


def _chunks(header: Header) -> Iterator[bytes]:
    with header.file.open("rb") as file:
        file.seek(header.start)
        for start in range(header.start, header.end, _CHUNK_BYTES):
            yield file.read(min(_CHUNK_BYTES, header.end - start))


def _require_end_tokens(folder: Path, shape: ModelShape) -> None:
    for token in end_token_ids(folder):
        if not 0 <= token < shape.vocab_size:
            raise EnvironmentProblemError(
                f"`eos_token_id = {token}` of `{folder}` is not in the vocabulary of {shape.vocab_size} tokens",
                hint="fetch the model again",
            )
