"""A run directory's identity: what it was asked, and what it was made from. Created once, whole; light.

`run.json` holds the run's id and the digests of its sources (model, tokenizer and template, data): a resume that
finds another source refuses. Recipes are kept by the first step they hold for: `recipes/000001.json`, ...
"""

import json
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppoctl.errors import CorruptArtifactError, RecipeError, RunExistsError
from ppoctl.store.artifact import storage_error, write_atomically
from ppoctl.store.layout import RunLayout


def create(layout: RunLayout, *, recipe_toml: str, resolved: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Make the run directory, complete or not at all. `facts` go into `run.json` (sources, versions, command).

    Raises RunExistsError when it exists, StorageError when it cannot be written.
    """
    if layout.root.exists():
        raise RunExistsError(
            f"run directory `{layout.root}` exists", hint=f"continue it: ppoctl resume {layout.root}"
        )
    aside = RunLayout(layout.root.with_name(f".{layout.root.name}.creating-{uuid.uuid4().hex[:8]}"))
    identity = {"id": uuid.uuid4().hex, "name": layout.root.name, "created": time.time(), **facts}
    try:
        aside.recipes.mkdir(parents=True)
        aside.logs.mkdir()
        aside.recipe_toml.write_text(recipe_toml, encoding="utf-8")
        for path in (aside.recipe_resolved, aside.recipe_from(1)):
            path.write_text(_json(resolved), encoding="ascii")
        aside.run_json.write_text(_json(identity), encoding="ascii")
        aside.root.rename(layout.root)
    except OSError as error:
        shutil.rmtree(aside.root, ignore_errors=True)
        raise storage_error(layout.root, error) from error


def facts(layout: RunLayout) -> dict[str, Any]:
    """`run.json`; raises RecipeError when the folder is no run directory."""
    if not layout.run_json.is_file():
        raise RecipeError(f"`{layout.root}` is not a run directory", hint="see your runs: ls runs")
    return _load(layout.run_json)


def recipes(layout: RunLayout) -> dict[int, dict[str, Any]]:
    """Resolved recipes by the first step they hold for."""
    return {int(path.stem): _load(path) for path in sorted(layout.recipes.glob("*.json"))}


def change_recipe(layout: RunLayout, resolved: Mapping[str, Any], *, from_step: int) -> None:
    """From `from_step` on (the first step with no committed rollout) this recipe holds; earlier steps keep theirs."""
    layout.recipes.mkdir(exist_ok=True)
    for path in layout.recipes.glob("*.json"):
        if int(path.stem) > from_step:
            path.unlink()
    write_atomically(layout.recipe_from(from_step), _json(resolved).encode("ascii"))
    write_atomically(layout.recipe_resolved, _json(resolved).encode("ascii"))


def first_free_step(layout: RunLayout, *, after: int) -> int:
    """The first step later than `after` that has no committed rollout."""
    step = after + 1
    while (layout.stage(step, "rollout") / "manifest.json").is_file():
        step += 1
    return step


def update_facts(layout: RunLayout, **changes: Any) -> None:
    """Rewrite `run.json` with the given entries changed."""
    write_atomically(layout.run_json, _json({**facts(layout), **changes}).encode("ascii"))


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1, sort_keys=True) + "\n"


def _load(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="ascii")))
    except (ValueError, UnicodeDecodeError) as error:
        raise CorruptArtifactError(
            f"`{path}` is corrupt: {error}", hint=f"restore it from a copy of the run: ls {path.parent}"
        ) from error
