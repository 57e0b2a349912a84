"""Paths in the words of the recipe files: a run records absolute ones, and a report shows what was written. Light."""

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ppoctl.loading.load import Loaded


def paths_as_written(loaded: Loaded) -> dict[str, str]:
    """The absolute paths of a recipe that one of its files has in other words, with those words."""
    resolved, found = loaded.resolved(), dict[str, str]()
    for file in loaded.files:
        found |= dict(_pairs(tomllib.loads(file.read_text(encoding="utf-8")), resolved, file.parent))
    return found


def _pairs(written: Any, resolved: Any, folder: Path) -> Iterator[tuple[str, str]]:
    """Each path below these two values, absolute and as written in a file of this folder."""
    if isinstance(written, Mapping) and isinstance(resolved, Mapping):
        for key in written.keys() & resolved.keys():
            yield from _pairs(written[key], resolved[key], folder)
    elif _is_array(written) and _is_array(resolved):
        for one, other in zip(written, resolved, strict=False):
            yield from _pairs(one, other, folder)
    elif isinstance(written, str) and isinstance(resolved, str) and written != resolved:
        base = Path.cwd() if written.startswith("$") else folder.absolute()
        if os.path.normpath(base / Path(os.path.expandvars(written)).expanduser()) == resolved:
            yield resolved, written


def _is_array(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
