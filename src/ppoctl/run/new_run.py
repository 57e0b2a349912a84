"""Directory of a new run: its content before anything starts, and whether its name is free. This module does not
import torch, because a login node creates the directory for a job that starts days later.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from ppoctl.algorithms.role_model import own_models
from ppoctl.core.errors import RunExistsError, SlurmError, quoted
from ppoctl.core.machine.versions import versions
from ppoctl.models.folder import model_folder
from ppoctl.recipe.loading.as_written import paths_as_written
from ppoctl.recipe.loading.load import Loaded
from ppoctl.recipe.loading.write import recipe_as_toml
from ppoctl.recipe.schema import Recipe
from ppoctl.run.run_recipe import as_recorded
from ppoctl.start.preflight.critic_state import require_kept
from ppoctl.start.slurm.run_status import require_idle
from ppoctl.store import run_dir
from ppoctl.store.jobs import jobs, resume_command
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.saved_by import saved_by

ROLLOUT = "rollout"
TRAIN = "train"


def create(
    paths: RunPaths,
    recipe: Recipe,
    digests: Mapping[str, str],
    *,
    command: str,
    on: str | None = None,
    known: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    """Create the directory of a new run. Raises RecipeError if a role starts from a saved state of another run that
    will delete the state.

    `on`: the cluster kind of the run, `slurm`; None: it runs at once. `known`: additional facts for run.json (empty
    facts are left out), such as `rows` of each table, and those of `known_of`. If a role starts from a saved state of
    a run, run.json records which (`ROLE_from`).
    """
    require_kept(recipe)
    starts = {f"{role}_from": saved_by(model_folder(table.path)) for role, table in own_models(recipe).items()}
    run_dir.create(
        paths,
        recipe_toml=recipe_as_toml(recipe),
        resolved=as_recorded(recipe),
        facts={
            "sources": dict(digests),
            "versions": versions(),
            "command": command,
            **{name: dict(fact) for name, fact in known.items() if fact},
            **({} if on is None else {"on": on}),
            **{name: asdict(origin) for name, origin in starts.items() if origin is not None},
        },
    )


def known_of(loaded: Loaded) -> dict[str, Mapping[str, Any]]:
    """Return facts about a new run that only its start knows (see `create`): paths as written, and whether the user
    starts it although memory or disk seem too small, so that a resume does not ask again."""
    return {"written": paths_as_written(loaded), "forced": {"resources": True} if loaded.forced else {}}


def make_way(paths: RunPaths) -> None:
    """Remove the directory of a run that never began. Raises RunExistsError if the name belongs to a run that must
    stay."""
    if is_taken(paths):
        raise exists(paths)
    if paths.root.exists():
        run_dir.remove(paths)


def is_taken(paths: RunPaths) -> bool:
    """Whether the name belongs to a run that must stay. Raises the errors of `is_replaceable`."""
    return paths.root.exists() and not is_replaceable(paths)


def exists(paths: RunPaths) -> RunExistsError:
    """Return the error of a name that is taken."""
    submitted = jobs(paths)
    by = f": submitted as job {submitted[-1].id}" if submitted else ""
    return RunExistsError(
        f"run directory `{paths.root}` exists{by}",
        hint=(f"see it: ppoctl status {quoted(paths.root)}; " if by else "")
        + f"continue it: {resume_command(paths.root)}",
    )


def is_replaceable(paths: RunPaths) -> bool:
    """Whether a corrected command may reuse the name: the run has no rollout, and no job was submitted for it.

    Raises RunAliveError while another process is using it.
    """
    run = RecordedRun(paths)
    if not paths.run_json.is_file() or run.has_begun() or jobs(paths):
        return False
    if "on" in run.facts:  # a job may be queued although it could not be recorded
        return False
    require_idle(paths)
    return True


def require_way(paths: RunPaths, *, or_resume: bool) -> None:
    """Raise RunExistsError if `train` can neither start a run of this name nor continue it, and RunAliveError while
    another process or job is using this run."""
    if not is_taken(paths):
        return
    with suppress(SlurmError):  # the start asks Slurm again
        require_idle(paths)
    if not (or_resume or holds_only_rollouts(paths)):
        raise exists(paths)


def holds_only_rollouts(paths: RunPaths) -> bool:
    """Whether the run contains only rollouts of `ppoctl rollout`, with their rewards."""
    run = RecordedRun(paths)
    if run.facts.get("command") != ROLLOUT:
        return False
    return all(
        run.manifest(step, stage.name) is None
        for step in paths.committed_steps()
        for stage in run.stages(step)
        if not generates_or_scores(stage.name)
    )


def generates_or_scores(stage: str) -> bool:
    """Whether `ppoctl rollout` runs a stage of this name."""
    return stage.partition(".")[0] in ("partial_rollout", "rollout", "reward")
