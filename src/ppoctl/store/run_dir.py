"""A run directory's identity: what it was asked, and what it was made from. Created once, whole; light.

`run.json` holds the run's id and the digests of its sources (model, tokenizer and template, data): a resume that
finds another source refuses. Recipes are kept by the first step they hold for, each with the stories that its steps
tell: `recipes/000001.json`, ...
"""

import glob
import shutil
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppoctl.batch.sealed_json import seal, unseal
from ppoctl.errors import CorruptArtifactError, RecipeError, RunExistsError, quoted
from ppoctl.store.attempt import Attempt
from ppoctl.store.disk import require_format, storage_error
from ppoctl.store.run_paths import FORMAT, RunPaths

STORIES = "stories"
"""Beside the keys of a recorded recipe: the outlines of its steps (`store.outline`)."""


def create(paths: RunPaths, *, recipe_toml: str, resolved: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Make the run directory, complete or not at all. `resolved`: the recipe with its stories; `facts`: sources,
    versions, command.

    Raises RunExistsError when it exists, StorageError when it cannot be written.
    """
    if paths.root.exists():
        raise RunExistsError(
            f"run directory `{paths.root}` exists", hint=f"continue it: ppoctl resume {quoted(paths.root)}"
        )
    _sweep(paths)
    aside = RunPaths(paths.root.with_name(f".{paths.root.name}.creating-{uuid.uuid4().hex[:8]}"))
    identity = {"format": FORMAT, "id": uuid.uuid4().hex, "name": paths.root.name, "created": time.time(), **facts}
    try:
        aside.recipes.mkdir(parents=True)
        aside.logs.mkdir()
        aside.recipe_toml.write_text(recipe_toml, encoding="utf-8")
        for path in (aside.recipe_resolved, aside.recipe_from(1)):
            path.write_text(_sealed(resolved), encoding="ascii")
        for path in (aside.journal, aside.ledger):
            path.touch()  # from now on a missing one was deleted
        aside.run_json.write_text(_sealed(identity), encoding="ascii")
        aside.root.rename(paths.root)
    except OSError as error:
        shutil.rmtree(aside.root, ignore_errors=True)
        raise storage_error(paths.root, error) from error


def _sweep(paths: RunPaths) -> None:
    """What commands left that were killed: of making this run, where nobody needs an hour for that, and of removing
    any run of the folder."""
    for path in paths.root.parent.glob(".*.removing-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in paths.root.parent.glob(f".{glob.escape(paths.root.name)}.creating-*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > 3600:
                shutil.rmtree(path, ignore_errors=True)


def facts(paths: RunPaths) -> dict[str, Any]:
    """`run.json`. Raises RecipeError when the folder is no run directory, StorageError when another version of ppoctl
    made it, CorruptArtifactError when it is not as it was written."""
    if not paths.run_json.exists():
        raise RecipeError(f"`{paths.root}` is not a run directory", hint="ppoctl runs")
    found = _load(paths.run_json, hint=f"bring it again from a copy of the run: ls {quoted(paths.root)}")
    require_format(paths.run_json, found.get("format"))
    return found


def complete(attempt: Attempt, digests: Mapping[str, str], rows: Mapping[str, Mapping[str, int]]) -> None:
    """Add the digests, and the numbers of rows, that nobody could take when the run was made: a login node has no
    tokenizer."""
    known = facts(attempt.paths)
    missing = {name: digest for name, digest in digests.items() if name not in known["sources"]}
    counted = {"rows": dict(rows)} if rows and "rows" not in known else {}
    if missing or counted:
        told = {**known, "sources": {**known["sources"], **missing}, **counted}
        attempt.write(attempt.paths.run_json, _sealed(told).encode("ascii"))


def recipes(paths: RunPaths) -> dict[int, dict[str, Any]]:
    """Resolved recipes by the first step they hold for. Raises as `asked` does."""
    return {
        start: {key: found[key] for key in found if key != STORIES} for start, found in read_recorded(paths).items()
    }


def read_recorded(paths: RunPaths) -> dict[int, dict[str, Any]]:
    """Resolved recipes with the stories that they tell, by the first step they hold for.

    Raises CorruptArtifactError when one is not as it was written, or when the first is gone, StorageError when they
    cannot be read.
    """
    known = f"what was asked last: ppoctl validate {quoted(paths.recipe_toml)} --show"
    found = {
        int(path.stem): _load(path, hint=f"bring it again from a copy of the run; {known}")
        for path in _recipe_files(paths)
    }
    if 1 not in found:
        there = f"mkdir -p {quoted(paths.recipes)}"
        again = f"{there} && cp {quoted(paths.recipe_resolved)} {quoted(paths.recipe_from(1))}"
        raise CorruptArtifactError(
            f"`{paths.recipe_from(1)}` is missing: the recipe that the run began with",
            hint=f"bring it again from a copy of the run; if no key was ever changed: {again}",
        )
    return found


def _recipe_files(paths: RunPaths) -> list[Path]:
    try:
        # Not `glob`, for which a folder that may not be read is an empty one.
        return sorted(path for path in paths.recipes.iterdir() if path.suffix == ".json")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error(paths.recipes, error, doing="read") from error


def change_recipe(attempt: Attempt, resolved: Mapping[str, Any], *, from_step: int) -> None:
    """Record that this recipe holds from `from_step` on (the first step with no committed rollout); earlier steps
    keep theirs."""
    layout = attempt.paths
    for path in layout.recipes.glob("*.json"):
        if int(path.stem) > from_step:
            attempt.remove(path)
    attempt.write(layout.recipe_from(from_step), _sealed(resolved).encode("ascii"))
    attempt.write(layout.recipe_resolved, _sealed(resolved).encode("ascii"))


def remove(paths: RunPaths) -> Path | None:
    """Delete a run, its name first: a kill then leaves nothing in the way of the next one, and what it leaves goes
    with the next that is made or removed beside it. Returns where what could not be deleted lies; None: nowhere.

    Raises StorageError where nothing could be.
    """
    aside = paths.root.with_name(f".{paths.root.name}.removing-{uuid.uuid4().hex[:8]}")
    try:
        paths.root.rename(aside)
    except OSError as error:
        raise storage_error(paths.root, error, doing="remove") from error
    _sweep(paths)
    return aside if aside.exists() else None


def has_begun(paths: RunPaths) -> bool:
    """Whether the run ever committed a stage of a step."""
    return bool(paths.saved_states()) or any(paths.has_committed(step) for step in paths.committed_steps() if step)


def first_free_step(paths: RunPaths, *, after: int) -> int:
    """The first step later than `after` of which nothing is committed."""
    step = after + 1
    while paths.has_committed(step):
        step += 1
    return step


def _sealed(data: Mapping[str, Any]) -> str:
    return seal(data, indent=1)


def _load(path: Path, *, hint: str) -> dict[str, Any]:
    try:
        return unseal(path.read_bytes().decode("ascii"))
    except FileNotFoundError as error:
        raise CorruptArtifactError(f"`{path}` is missing", hint=hint) from error
    except OSError as error:
        raise storage_error(path, error, doing="read") from error
    except ValueError as error:
        raise CorruptArtifactError(f"`{path}` is corrupt: {error}", hint=hint) from error
