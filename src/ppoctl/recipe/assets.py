"""Where the model of a recipe is on this machine, and what its config.json says."""

import json
import os
from pathlib import Path as FilePath
from typing import Any

from ppoctl.errors import EnvironmentProblemError
from ppoctl.recipe.layers import is_hub_id
from ppoctl.recipe.schema import Recipe


def local_model(recipe: Recipe) -> FilePath | None:
    """The folder with the model's files; None where it is not on this machine."""
    return local_folder(recipe.model.path)


def local_folder(path: str) -> FilePath | None:
    """A model's folder, or what was fetched of a hub id; None where there is neither."""
    if os.path.isdir(path):  # noqa: PTH112 - no error where a folder above is closed
        return FilePath(path)
    return fetched(path) if is_hub_id(path) else None


def fetched(hub_id: str) -> FilePath | None:
    """The snapshot of a hub model that `hf download` made; nothing is asked of the network."""
    home = os.environ.get("HF_HOME") or FilePath(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or FilePath(home, "hub")
    model = FilePath(cache).expanduser() / f"models--{hub_id.replace('/', '--')}"
    try:
        snapshot = model / "snapshots" / (model / "refs" / "main").read_text("ascii").strip()
    except (OSError, ValueError):
        return None
    return snapshot if snapshot.is_dir() else None


def model_config(recipe: Recipe) -> dict[str, Any]:
    """The config.json of a model on this machine; empty where there is none, or none that can be read (which
    `preflight` says)."""
    folder = local_model(recipe)
    try:
        return {} if folder is None else read_config(folder)
    except EnvironmentProblemError:
        return {}


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
