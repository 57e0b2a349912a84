"""Are the folders and files that a recipe names there, and does its window fit the model? Reads config.json and no
more: no weights, no rows."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import Any

from ppoctl.errors import EnvironmentProblemError
from ppoctl.recipe.layers import is_hub_id
from ppoctl.recipe.problems import Problem
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.shape import Path

_WINDOW = ("max_prompt_tokens", "max_new_tokens")
DATA_SUFFIXES = {"gsm8k": (".jsonl",), "columns": (".jsonl", ".parquet")}


def missing_assets(recipe: Recipe, place: Callable[[Path], str]) -> list[Problem]:
    """What is not where the recipe says. A hub id is not looked up: that would need the network."""
    model = getattr(getattr(recipe, "model", None), "path", None)
    problems = [] if model is None else list(_model_problems(model, place(("model", "path"))))
    critic = getattr(getattr(recipe, "model", None), "critic", None)
    problems += [] if critic is None else list(_critic_problems(critic, place(("model", "critic"))))
    problems += _window_problems(recipe, place)
    for path, table in _datasets(recipe):
        name, layout = getattr(table, "path", None), getattr(table, "format", None)
        if isinstance(name, str) and isinstance(layout, str):
            problems += _data_problems(name, layout, ".".join(path), place(path))
    return problems


def local_model(recipe: Recipe) -> FilePath | None:
    """The model's folder; None for a hub id."""
    folder = FilePath(recipe.model.path)
    return folder if folder.is_dir() else None


def _datasets(recipe: Recipe) -> Iterator[tuple[Path, object]]:
    data = getattr(recipe, "data", None)
    train = getattr(data, "train", None)
    if train is not None:
        yield ("data", "train", "path"), train
    for name, table in (getattr(data, "eval", None) or {}).items():
        yield ("data", "eval", name, "path"), table


def _model_problems(path: str, place: str) -> Iterator[Problem]:
    folder = FilePath(path)
    if not folder.is_absolute() and is_hub_id(path):
        return
    if path.startswith("$"):
        return  # the variable is missing, and that is reported already
    if not folder.is_dir():
        yield Problem(place, f"`model.path` is `{path}`: no such folder", f"ls {folder.parent}")
    elif not (folder / "config.json").is_file():
        yield Problem(place, f"`model.path` is `{path}`: the folder has no config.json", f"ls {folder}")
    elif not any(folder.glob("*.safetensors")):
        yield Problem(place, f"`model.path` is `{path}`: the folder has no *.safetensors", f"ls {folder}")
    elif not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        yield Problem(place, f"`model.path` is `{path}`: the folder has no tokenizer", f"ls {folder}")


def _critic_problems(path: str, place: str) -> Iterator[Problem]:
    folder = FilePath(path)
    if path.startswith("$") or (not folder.is_absolute() and is_hub_id(path)):
        return
    if not (folder / "config.json").is_file():
        yield Problem(place, f"`model.critic` is `{path}`: no folder with a config.json", f"ls {folder.parent}")
    elif not (any(folder.glob("*.safetensors")) or (folder / ".metadata").is_file()):
        yield Problem(place, f"`model.critic` is `{path}`: the folder has no weights", f"ls {folder}")


def model_config(recipe: Recipe) -> dict[str, Any]:
    """The config.json of a local model; empty for a hub id or where there is none."""
    folder = local_model(recipe)
    return {} if folder is None else read_config(folder)


def read_config(folder: FilePath) -> dict[str, Any]:
    """The config.json of a model folder; empty where there is none. Raises EnvironmentProblemError where it is no
    JSON object."""
    return read_json_object(folder / "config.json")


def read_json_object(file: FilePath) -> dict[str, Any]:
    """What a JSON file of a model folder says; empty where there is none. Raises EnvironmentProblemError where it is
    no JSON object."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_bytes())
    except json.JSONDecodeError as error:
        says = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise EnvironmentProblemError(f"`{file}` is no JSON: {says}", hint="fetch the model again") from error
    except UnicodeDecodeError as error:
        raise EnvironmentProblemError(f"`{file}` is no UTF-8 text", hint="fetch the model again") from error
    except (OSError, RecursionError) as error:
        raise EnvironmentProblemError(f"`{file}` cannot be read: {error}", hint=f"ls -l {file}") from error
    if not isinstance(found, dict):
        raise EnvironmentProblemError(f"`{file}` is JSON, but no object", hint="fetch the model again")
    return found


def _window_problems(recipe: Recipe, place: Callable[[Path], str]) -> Iterator[Problem]:
    """Generator and trainer would fail at the first long response, or worse, go on without positions."""
    try:
        window = recipe.rollout.max_prompt_tokens + recipe.rollout.max_new_tokens
        positions = model_config(recipe).get("max_position_embeddings")
    except AttributeError:  # part of the recipe is wrong (see `partial`)
        return
    if isinstance(positions, int) and window > positions:
        parts = " + ".join(f"`rollout.{name}` `{getattr(recipe.rollout, name)}`" for name in _WINDOW)
        says = f"a window of {window} tokens ({parts}) does not fit the model's {positions} positions"
        key = ("rollout", "max_new_tokens")
        yield Problem(place(key), says, f"shorten `{key[0]}.{key[1]}` or `rollout.max_prompt_tokens`")


def _data_problems(name: str, layout: str, key: str, place: str) -> Iterator[Problem]:
    file = FilePath(name)
    suffixes = DATA_SUFFIXES.get(layout, ())
    if name.startswith("$"):
        return
    if not file.exists():
        yield Problem(place, f"`{key}` is `{name}`: no such file", f"ls {file.parent}")
    elif not file.is_file():
        yield Problem(place, f"`{key}` is `{name}`: not a file", f"ls {file}")
    elif suffixes and file.suffix not in suffixes:
        expected = " or ".join(f"`{suffix}`" for suffix in suffixes)
        yield Problem(place, f"`{key}` is `{name}`: must end in {expected}")
    elif file.stat().st_size == 0:
        yield Problem(place, f"`{key}` is `{name}`: the file is empty")
