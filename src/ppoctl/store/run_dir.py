"""Creation, change and removal of a run directory; `recorded_run` reads it. Imports no torch.

The directory is created atomically. `run.json` holds the run's id and the digests of its sources (model, tokenizer
and template, data); a resume with other sources is rejected. Each recipe is stored under the first step that it
applies to, with the outlines of its steps: `recipes/000001.json`, ...
"""

import glob
import shutil
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppoctl.core.batch.sealed_json import seal
from ppoctl.core.errors import RunExistsError, quoted
from ppoctl.store.attempt import Attempt
from ppoctl.store.disk_errors import storage_error
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import FORMAT, RunPaths


def create(paths: RunPaths, *, recipe_toml: str, resolved: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Create the run directory atomically.

    `resolved` is the recipe with its outlines; `facts` has the run's sources, versions and command. Raises
    RunExistsError if the directory exists; StorageError if it cannot be written.
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
            path.touch()  # so that a missing file later means that it was deleted
        aside.run_json.write_text(_sealed(identity), encoding="ascii")
        aside.root.rename(paths.root)
    except OSError as error:
        shutil.rmtree(aside.root, ignore_errors=True)
        raise storage_error(paths.root, error) from error


def _sweep(paths: RunPaths) -> None:
    """Delete folders that killed commands left: creations of this run over an hour old, and removals of any run."""
    for path in paths.root.parent.glob(".*.removing-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in paths.root.parent.glob(f".{glob.escape(paths.root.name)}.creating-*"):
        with suppress(OSError):
            # Another command may still be creating a younger folder.
            if time.time() - path.stat().st_mtime > 3600:
                shutil.rmtree(path, ignore_errors=True)


def complete(attempt: Attempt, digests: Mapping[str, str], rows: Mapping[str, Mapping[str, int]]) -> None:
    """Add digests and row counts that were unknown when the run was created, as on a login node without tokenizer."""
    known = RecordedRun(attempt.paths).facts
    missing = {name: digest for name, digest in digests.items() if name not in known["sources"]}
    counted = {"rows": dict(rows)} if rows and "rows" not in known else {}
    if missing or counted:
        content = {**known, "sources": {**known["sources"], **missing}, **counted}
        attempt.write(attempt.paths.run_json, _sealed(content).encode("ascii"))


def change_recipe(attempt: Attempt, resolved: Mapping[str, Any], *, from_step: int) -> None:
    """Record that this recipe applies from `from_step` on (the first step without a committed rollout).

    Earlier steps keep their recipes.
    """
    paths = attempt.paths
    for path in paths.recipes.glob("*.json"):
        if int(path.stem) > from_step:
            attempt.remove(path)
    attempt.write(paths.recipe_from(from_step), _sealed(resolved).encode("ascii"))
    attempt.write(paths.recipe_resolved, _sealed(resolved).encode("ascii"))


def remove(paths: RunPaths) -> Path | None:
    """Delete a run.

    The folder is renamed first, so that after a kill a new run can use the name. The next run that is created or
    removed in the same folder deletes the renamed folder. Returns the folder of the files that could not be deleted;
    None: all files were deleted. Raises StorageError if the run's folder could not be renamed.
    """
    aside = paths.root.with_name(f".{paths.root.name}.removing-{uuid.uuid4().hex[:8]}")
    try:
        paths.root.rename(aside)
    except OSError as error:
        raise storage_error(paths.root, error, doing="remove") from error
    _sweep(paths)
    return aside if aside.exists() else None


def first_free_step(paths: RunPaths, *, after: int) -> int:
    """Return the first step after `after` without a committed stage."""
    step = after + 1
    while paths.has_committed(step):
        step += 1
    return step


def _sealed(data: Mapping[str, Any]) -> str:
    return seal(data, indent=1)
