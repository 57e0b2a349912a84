"""What a run keeps from its first step to its last, whatever a resume changes. Light: a change of it is refused
before anything that takes long is imported."""

from ppoctl.errors import RecipeError, StorageError, quoted
from ppoctl.loading.explain import shown
from ppoctl.recipe.fingerprint import differences
from ppoctl.recipe.origins import dotted
from ppoctl.recipe.parallel import reward_models, saved_layout, what_differs
from ppoctl.recipe.schema import Recipe
from ppoctl.runs.run_recipe import recorded_recipes
from ppoctl.store import manifest as manifests
from ppoctl.store.outline import outlines_of
from ppoctl.store.retention import saved_steps
from ppoctl.store.run_paths import RunPaths


def require_same_run(paths: RunPaths, recipe: Recipe) -> None:
    """Raise RecipeError where the run cannot go on with this recipe at any step, and StorageError where the recipe
    lays a role out as a saved state cannot be."""
    recipes = recorded_recipes(paths)
    _require_the_same(paths, recipes[max(recipes)], recipe)
    _require_fitting_states(paths, recipe)


def last_saved(paths: RunPaths) -> int:
    """The last step whose states are saved; 0: none."""
    return max(saved_steps(paths, outlines_of(paths).roles), default=0)


def _require_the_same(paths: RunPaths, recorded: Recipe, recipe: Recipe) -> None:
    """Raise RecipeError where a recipe renames the run, is for another model, or ends the run before a step that it
    has done."""
    if recipe.model != recorded.model:
        said = [
            f"`{key}` is `{shown(new)}` and the run was made from `{shown(old)}`"
            for key, old, new in differences(recorded, recipe)
            if key.partition(".")[0] == "model"
        ]
        raise RecipeError("\n".join(said), hint="start a new run with another `name`")
    before, after = (
        {dotted(key): table.path for key, table in reward_models(each).items()} for each in (recorded, recipe)
    )
    if before != after:
        says = [f"{key} `{path}`" for key, path in after.items()]
        raise RecipeError(
            f"the reward models are {', '.join(says) or 'none'}, and a run keeps those that it was made with",
            hint="start a new run with another `name`",
        )
    if recipe.name != recorded.name:
        raise RecipeError(
            f"`name` is `{recipe.name}`, and this run is `{recorded.name}`: a run keeps its name",
            hint=f"for a new run: ppoctl train {quoted(paths.recipe_toml)} --set name={quoted(recipe.name)}",
        )
    finished = (step for step in paths.committed_steps() if is_done(paths, step))
    done = max([last_saved(paths), *finished])
    if recipe.steps < done:
        raise RecipeError(
            f"`steps` is `{recipe.steps}`, and {done} steps of the run are done",
            hint=f"ppoctl resume {quoted(paths.root)} --set steps={done}",
        )


def is_done(paths: RunPaths, step: int) -> bool:
    """Whether the last stage of a step is committed."""
    return manifests.read(paths.stage(step, outlines_of(paths).at(step).last)) is not None


def _require_fitting_states(paths: RunPaths, recipe: Recipe) -> None:
    """Raise StorageError, before anything is started, when the recipe lays a role out as a saved state cannot be."""
    start = last_saved(paths)
    for role in outlines_of(paths).roles:
        for step in paths.saved_steps(role):
            manifest = manifests.read(paths.state(role, step)) if step >= start else None
            if manifest is None:
                continue
            saved, asked = manifest.extra["layout"], saved_layout(recipe, role)
            keys = what_differs(saved, asked)
            if not keys:
                continue
            then, now = (
                ", ".join(f"{role}.parallel.{key} = {shown(of[key])}" for key in keys) for of in (saved, asked)
            )
            raise StorageError(
                f"the {role}'s state of step {step} was saved under `{then}` and cannot be loaded under `{now}`",
                hint=_how_to_load(paths, keys),
            )


def _how_to_load(paths: RunPaths, keys: list[str]) -> str:
    if "distributed_optimizer" in keys:
        return "keep `distributed_optimizer` as it was; no state fits the other kind of optimizer"
    return (
        "first save it for any layout, under the one it has (nothing is trained): "
        f"ppoctl resume {quoted(paths.root)} --save-only --set checkpoint.reshardable=full"
    )
