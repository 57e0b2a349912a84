"""Checks of what a resume must not change in a run. This module does not import torch, so an impossible change fails
before slow imports."""

from ppoctl.errors import RecipeError, StorageError, quoted
from ppoctl.loading.explain import shown
from ppoctl.loop.early_end import early_end, metrics_by_step
from ppoctl.recipe.fingerprint import differences
from ppoctl.recipe.origins import dotted
from ppoctl.recipe.parallel import reward_models, saved_layout, what_differs
from ppoctl.recipe.role_model import trainable_of
from ppoctl.recipe.schema import Recipe
from ppoctl.runs.run_recipe import recorded_recipes, require_same_roles
from ppoctl.store import manifest as manifests
from ppoctl.store.jobs import longer_command
from ppoctl.store.journal import read_lines
from ppoctl.store.outline import outlines_of
from ppoctl.store.retention import saved_steps
from ppoctl.store.run_paths import RunPaths


def require_same_run(paths: RunPaths, recipe: Recipe) -> None:
    """Raise RecipeError if the run cannot continue with this recipe at any step, and StorageError if a saved state
    cannot be loaded under the recipe's layout."""
    recipes = recorded_recipes(paths)
    _require_the_same(paths, recipes[max(recipes)], recipe)
    _require_fitting_states(paths, recipe)


def last_saved(paths: RunPaths) -> int:
    """Return the last step whose states are saved for all roles; 0: none."""
    return max(saved_steps(paths, outlines_of(paths).roles), default=0)


def _require_the_same(paths: RunPaths, recorded: Recipe, recipe: Recipe) -> None:
    """Raise RecipeError if a recipe changes the run's name, trained roles or models, or ends the run before a step
    that is done."""
    require_same_roles(recorded, recipe)
    _require_same_trained_part(recorded, recipe)
    if recipe.model != recorded.model:
        problems = [
            f"`{key}` is `{shown(new)}`, but the run was made from `{shown(old)}`"
            for key, old, new in differences(recorded, recipe)
            if key.partition(".")[0] == "model"
        ]
        raise RecipeError("\n".join(problems), hint="start a new run with another `name`")
    before, after = (
        {dotted(key): table.path for key, table in reward_models(source).items()} for source in (recorded, recipe)
    )
    if before != after:
        settings = [f"{key} `{path}`" for key, path in after.items()]
        raise RecipeError(
            f"the reward models are {', '.join(settings) or 'none'}, but a run keeps those with which it started",
            hint="start a new run with another `name`",
        )
    if recipe.name != recorded.name:
        raise RecipeError(
            f"`name` is `{recipe.name}`, but this run is `{recorded.name}`: a run keeps its name",
            hint=f"for a new run: ppoctl train {quoted(paths.recipe_toml)} --set name={quoted(recipe.name)}",
        )
    finished = (step for step in paths.committed_steps() if is_done(paths, step))
    done = max([last_saved(paths), *finished])
    if recipe.steps > recorded.steps and (reason := ended_early(paths, recipe)) is not None:
        raise RecipeError(
            f"`steps` is `{recipe.steps}`, but `[until]` ended the run after step {last_saved(paths)}: {reason}",
            hint=longer_command(paths.root, recipe.steps, ended_early=True),
        )
    if recipe.steps < done:
        raise RecipeError(
            f"`steps` is `{recipe.steps}`, but {done} steps of the run are done",
            hint=f"ppoctl resume {quoted(paths.root)} --set steps={done}",
        )


def _require_same_trained_part(recorded: Recipe, recipe: Recipe) -> None:
    """Raise RecipeError if other parameters of a role train than before: its states contain only those that train."""
    for role in recipe.trained:
        if trainable_of(recorded, role) == trainable_of(recipe, role):
            continue
        problems = [
            f"`{key}` is `{shown(new)}`, but the run was started with `{shown(old)}`"
            for key, old, new in differences(recorded, recipe)
            if key.startswith((f"{role}.train", f"{role}.freeze"))
        ]
        raise RecipeError("\n".join(problems), hint="start a new run with another `name`")


def ended_early(paths: RunPaths, recipe: Recipe) -> str | None:
    """Return the values that end the run with this recipe after its last saved step, before `steps`, as text; None:
    the run continues, or all steps are done."""
    return early_end(recipe, last_saved(paths), metrics_by_step(read_lines(paths.journal))) if recipe.until else None


def last_step(paths: RunPaths, recipe: Recipe) -> int:
    """Return the last step of the run with this recipe: `steps`, unless `[until]` has ended the run."""
    return recipe.steps if ended_early(paths, recipe) is None else last_saved(paths)


def is_done(paths: RunPaths, step: int) -> bool:
    """Whether the last stage of a step is committed."""
    return manifests.read(paths.stage(step, outlines_of(paths).at(step).last)) is not None


def _require_fitting_states(paths: RunPaths, recipe: Recipe) -> None:
    """Raise StorageError if a saved state cannot be loaded under the recipe's layout, before anything is started."""
    start = last_saved(paths)
    for role in outlines_of(paths).roles:
        for step in paths.saved_steps(role):
            manifest = manifests.read(paths.state(role, step)) if step >= start else None
            if manifest is None:
                continue
            saved, wanted = manifest.extra["layout"], saved_layout(recipe, role)
            keys = what_differs(saved, wanted)
            if not keys:
                continue
            saved_under, wanted_under = (
                ", ".join(f"{role}.parallel.{key} = {shown(layout[key])}" for key in keys)
                for layout in (saved, wanted)
            )
            raise StorageError(
                f"the {role}'s state of step {step} was saved under `{saved_under}` and cannot be loaded under "
                f"`{wanted_under}`",
                hint=_how_to_load(paths, keys),
            )


def _how_to_load(paths: RunPaths, keys: list[str]) -> str:
    if "distributed_optimizer" in keys:
        return "keep `distributed_optimizer` unchanged: no state fits the other kind of optimizer"
    return (
        "first save it for any layout under its present layout (this trains nothing): "
        f"ppoctl resume {quoted(paths.root)} --save-only --set checkpoint.reshardable=full"
    )
