"""The folder of a model's files on this machine, and its JSON files."""

import json
import os
import re
from pathlib import Path
from typing import Any

from ppoctl.core.errors import EnvironmentProblemError, quoted

NAMED_TEMPLATES = "additional_chat_templates/*.jinja"
"""Pattern of a model's chat templates with a name; `default` is in chat_template.jinja."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_URL = re.compile(r"[A-Za-z][\w+.-]*://")


def is_hub_id(text: str) -> bool:
    """Whether a model path has the form `organisation/name`."""
    return _HUB_ID.fullmatch(text) is not None


def is_url(text: str) -> bool:
    """Whether a path is a URL (`s3://...`). ppoctl does not download URLs."""
    return _URL.match(text) is not None


def local_folder(path: str) -> Path | None:
    """Return the folder of a model path, or the fetched snapshot of a hub id; None: there is neither."""
    if os.path.isdir(path):  # noqa: PTH112 - no error if a parent folder cannot be read
        return Path(path)
    return fetched(path) if is_hub_id(path) else None


def model_folder(path: str) -> Path:
    """Return the folder of a model's files, like `local_folder`, without fetching. Raises EnvironmentProblemError if
    there is none."""
    if found := local_folder(path):
        return found
    if is_hub_id(path):
        raise EnvironmentProblemError(f"model `{path}` has not been fetched", hint=f"hf download {quoted(path)}")
    raise EnvironmentProblemError(f"`{path}` does not exist", hint=f"ls {quoted(Path(path).parent)}")


def fetched(hub_id: str) -> Path | None:
    """Return the folder of the snapshot that `hf download` made of a hub model, without network access; None: there
    is none."""
    model = hub_cache() / f"models--{hub_id.replace('/', '--')}"
    try:
        snapshot = model / "snapshots" / (model / "refs" / "main").read_text("ascii").strip()
    except (OSError, ValueError):
        return None
    return snapshot if snapshot.is_dir() else None


def hub_cache() -> Path:
    """Return the cache folder of `hf download`."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or Path(home, "hub")
    return Path(cache).expanduser()


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a model folder, unchanged; empty if there is none. Raises EnvironmentProblemError if
    it is not a JSON object. `shape_reader` interprets it."""
    return read_json_object(folder / "config.json")


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a model folder; empty if there is no file. Raises EnvironmentProblemError
    if the content is not a JSON object."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except json.JSONDecodeError as error:
        reason = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise EnvironmentProblemError(f"`{file}` is not JSON: {reason}", hint="fetch the model again") from error
    except UnicodeDecodeError as error:
        raise EnvironmentProblemError(f"`{file}` is not UTF-8 text", hint="fetch the model again") from error
    except (OSError, RecursionError) as error:
        raise EnvironmentProblemError(f"`{file}` cannot be read: {error}", hint=f"ls -l {quoted(file)}") from error
    if not isinstance(content, dict):
        raise EnvironmentProblemError(f"`{file}` is JSON, but not an object", hint="fetch the model again")
    return content
