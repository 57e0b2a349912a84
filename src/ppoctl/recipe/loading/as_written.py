"""Paths as the recipe files write them: a run records absolute paths, and a report shows the written form.

Imports no torch.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ppoctl.recipe.loading.load import Loaded


def paths_as_written(loaded: Loaded) -> dict[str, str]:
    """Return absolute path -> written form, for each path that a file of the recipe writes in another form."""
    resolved, written_forms = loaded.resolved(), dict[str, str]()
    for file in loaded.files:
        written_forms |= dict(_pairs(tomllib.loads(file.read_text("utf-8-sig")), resolved, file.parent))
    return written_forms


def _pairs(written: Any, resolved: Any, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (absolute path, written path) for each path in the two values; `folder` contains the file with the
    written value."""
    if isinstance(written, Mapping) and isinstance(resolved, Mapping):
        for key in written.keys() & resolved.keys():
            yield from _pairs(written[key], resolved[key], folder)
    elif _is_array(written) and _is_array(resolved):
        for written_item, resolved_item in zip(written, resolved, strict=False):
            yield from _pairs(written_item, resolved_item, folder)
    elif isinstance(written, str) and isinstance(resolved, str) and written != resolved:
        base = Path.cwd() if written.startswith("$") else folder.absolute()
        if os.path.normpath(base / Path(os.path.expandvars(written)).expanduser()) == resolved:
            yield resolved, written


def _is_array(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
