"""Recipe keys that name folders, files, models and functions, and their resolution to absolute paths.

A relative path is relative to the folder of the recipe file. If a path begins with an environment variable whose
value is relative, it is relative to the current directory of the command.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppoctl.core.errors import MissingAssetError
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.core.user_functions import digest_of, file_of
from ppoctl.models.folder import fetched, is_hub_id, is_url
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.slurm_table import is_image_file

_SCORERS = ((), ("parts", tree.ANY_NAME), ("cases", tree.ANY_NAME), ("otherwise",))
_ENVIRONMENTS = tuple(
    (*table, *case)
    for table in (("environment",), ("eval", "environment"))
    for case in ((), ("cases", tree.ANY_NAME))
)
MODELS = (
    ("model", "path"),
    ("model", "critic", "path"),
    ("model", "reference", "path"),
    *(("reward", *path, "path") for path in _SCORERS),
)
"""Paths of the keys that name a model folder or a hub id."""
LORA_STARTS = tuple((role, "train", "lora", "start") for role in ("actor", "critic"))
"""Paths of the keys that name a peft adapter, which may be a hub id too."""
BY_ONE_KEY: dict[KeyPath, str] = {
    ("model", "critic"): "path",
    ("model", "reference"): "path",
    ("eval", "metrics"): "function",
}
"""Path of a table that may be written as the value of one of its keys (`models.PathOrTable`) -> that key."""
IMAGE = ("slurm", "container", "image")
_SETS = (("data", "train"), ("data", "eval", tree.ANY_NAME))
ROWS = (*_SETS, *((*path, "sources", tree.ANY_NAME) for path in _SETS))
"""Paths of the tables that name rows."""
DATASETS = tuple((*path, "dataset", "path") for path in ROWS)
FILES = tuple((*path, key) for path in ROWS for key in ("path", "prompt_file", "function"))
FUNCTIONS = (
    *(("reward", *path, "function") for path in _SCORERS),
    ("eval", "metrics", "function"),
    ("ppo", "policy_loss", "function"),
    ("ppo", "advantages", "function"),
    *((*path, "path") for path in _ENVIRONMENTS),
)
"""Paths of the keys that name a function or class with a digest. The key `digest` of the same table has the digest of
its file."""
TOOLS = tuple((*path, "tools") for path in _ENVIRONMENTS)
"""Paths of the keys that name several functions. The key `digests` of the same table has the digest of each file."""
PATHS = (*MODELS, *LORA_STARTS, *DATASETS, *FILES, IMAGE, ("slurm", "secrets"))
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})(?=/|$)")


@dataclass(frozen=True)
class PathResolver:
    """Converts the paths in one layer of a recipe to absolute paths."""

    base: Path
    """Folder at which relative paths start."""
    environ: Mapping[str, str]
    missing: Callable[[KeyPath, MissingAssetError], None]
    """Callback for a path whose environment variable is not set; it receives the key and the error."""
    folders: tuple[Path, ...] = ()
    """Folders of the recipe files. A text that has the form of a hub id, was not fetched, and begins with the name of
    a folder in one of them, is taken for a path."""

    def resolve(self, data: dict[str, Any], stronger: Mapping[str, Any]) -> None:
        """Make every path in `data` absolute, and add the digest of each function's file if it is not written.

        A path that a `stronger` layer overrides is skipped: the path is never read, so its environment variable need
        not be set.
        """
        for pattern in PATHS:
            may_be_hub = pattern in (*MODELS, *LORA_STARTS, *DATASETS)
            for path, table in matching(data, pattern):
                value = table[path[-1]]
                if is_written(stronger, path):
                    continue
                if isinstance(value, str):
                    table[path[-1]] = self._resolved(path, value, may_be_hub=may_be_hub)
                elif isinstance(value, list):
                    table[path[-1]] = [
                        self._resolved(path, item, may_be_hub=False) if isinstance(item, str) else item
                        for item in value
                    ]
        for pattern in FUNCTIONS:
            for path, table in matching(data, pattern):
                if isinstance(table[path[-1]], str):
                    self._resolve_function(path, table)
        for pattern in TOOLS:
            for path, table in matching(data, pattern):
                if isinstance(table[path[-1]], list):
                    self._resolve_tools(path, table)

    def _resolved(self, path: KeyPath, text: str, *, may_be_hub: bool) -> str:
        """Return the absolute path of a folder or file; return a URL, a hub id or an image in a registry
        unchanged."""
        base = self.base
        if is_url(text) or (path == IMAGE and not is_image_file(text)):
            return text
        if VARIABLE.match(text):
            base = Path.cwd()
            try:
                text = _expanded(dotted(path), text, self.environ)
            except MissingAssetError as error:
                self.missing(path, error)
                return text
        if may_be_hub and is_hub_id(text) and not self._is_below_a_folder(base, text):
            return text
        # `..` is removed, but links are not followed: a run keeps the path that the user wrote.
        return os.path.normpath((base / Path(text).expanduser()).absolute())

    def _is_below_a_folder(self, base: Path, text: str) -> bool:
        """Return whether a text begins with the name of an existing folder."""
        first = text.split("/")[0]
        if (base / first).exists():
            return True
        return any((folder / first).exists() for folder in self.folders) and fetched(text) is None

    def _resolve_function(self, path: KeyPath, table: dict[str, Any]) -> None:
        """Make the path of a function's file absolute, and add its digest if the layer does not have it."""
        table[path[-1]] = self._absolute(path, table[path[-1]])
        table.setdefault("digest", digest_of(table[path[-1]]))

    def _resolve_tools(self, path: KeyPath, table: dict[str, Any]) -> None:
        """Make the paths of the files in a list absolute, and add their digests if the layer does not have them."""
        table[path[-1]] = [self._absolute(path, one) if isinstance(one, str) else one for one in table[path[-1]]]
        digests = {
            one: digest_of(one) for one in table[path[-1]] if isinstance(one, str) and file_of(one) is not None
        }
        if digests:
            table.setdefault("digests", digests)

    def _absolute(self, path: KeyPath, function: str) -> str:
        """Return `path.py:name` with an absolute path; `module:name` unchanged."""
        file = file_of(function)
        if file is None:
            return function
        return f"{self._resolved(path, str(file), may_be_hub=False)}:{function.rpartition(':')[2]}"


def with_file_of(path: KeyPath) -> KeyPath:
    """Return the key that names the file of a digest; other keys unchanged."""
    for pattern, digest in (*((each, "digest") for each in FUNCTIONS), *((each, "digests") for each in TOOLS)):
        table = path[: len(pattern) - 1]
        if path[len(table) :][:1] == (digest,) and all(
            expected in (name, tree.ANY_NAME) for name, expected in zip(table, pattern, strict=False)
        ):
            return (*table, pattern[-1])
    return path


def is_written(data: Any, path: KeyPath) -> bool:
    """Whether a layer writes the key, or an array that contains it."""
    for name in path:
        if isinstance(data, list):
            return True
        if not isinstance(data, Mapping) or name not in data:
            return False
        data = data[name]
    return True


def matching(data: Any, pattern: KeyPath, path: KeyPath = ()) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Yield every written key that matches the pattern, with the table that contains it."""
    if not isinstance(data, dict):
        return
    names = list(data) if pattern[0] == tree.ANY_NAME else [pattern[0]]
    for name in names:
        if name in data and len(pattern) == 1:
            yield (*path, name), data
        elif name in data:
            yield from matching(data[name], pattern[1:], (*path, name))


def resolved_uri(uri: str | None) -> str | None:
    """Return the tracking URI that is passed to MLflow, with its environment variable expanded.

    The variable is expanded only here, so that its value is never written to a file. Raises MissingAssetError if the
    variable is not set.
    """
    return None if uri is None else _expanded("tracking.uri", uri, os.environ)


def _expanded(key: str, text: str, environ: Mapping[str, str]) -> str:
    """Return `text`, the value of a key, with the environment variable at its start expanded.

    Raises MissingAssetError if the variable is not set.
    """
    variable = VARIABLE.match(text)
    if variable is None:
        return text
    name = variable[1] or variable[2]
    if not environ.get(name):
        raise MissingAssetError(
            f"`{key}` is `{text}`, but `{name}` is not set in the environment", hint=f"export {name}=VALUE"
        )
    return environ[name] + text[variable.end() :]
