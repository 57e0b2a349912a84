"""Which step a changed recipe holds from, when a run is resumed with other keys.

The first step without a committed rollout; or the unfinished step before it, when nothing committed of it reads a
changed key (so that the step that failed can be mended). Keys that decide prompts and sampling cannot change while
steps after the last saved states are only in the redo log: replaying those reads them.
"""

from dataclasses import dataclass
from typing import Any

from ppoctl.errors import RecipeError, StorageError, quoted
from ppoctl.recipe.explain import shown
from ppoctl.recipe.fingerprint import differences, result_differences
from ppoctl.recipe.origins import dotted
from ppoctl.recipe.parallel import reward_models, saved_layout, what_differs
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.sizes import warmup_updates
from ppoctl.recipe.write import recipe_as_toml
from ppoctl.store import manifest as manifests
from ppoctl.store import run_dir
from ppoctl.store.attempt import Attempt
from ppoctl.store.layout import RunLayout
from ppoctl.store.outline import EVAL, outlines_of
from ppoctl.store.retention import saved_steps
from ppoctl.wire.run_recipe import recorded_recipes
from ppoctl.wire.sources import recorded_reward_digest
from ppoctl.wire.stages import read_by
from ppoctl.wire.stories import as_recorded

OF_THE_WHOLE_RUN = ("seed", "data", "rollout")
"""Read when a step is drawn and when it is replayed, by parts of the job that know one recipe only."""


@dataclass(frozen=True)
class Change:
    """What a recipe changes of a run, and from when."""

    keys: list[tuple[str, Any, Any]]
    """(dotted key, value so far, value from then on)."""
    from_step: int
    steps: int
    """How many the run has then."""

    def lines(self) -> list[str]:
        """`actor.optimizer.lr 0.0004 -> 1e-05 from step 5`, for each key."""
        return [f"{key} {shown(old)} -> {shown(new)} from step {self.from_step}" for key, old, new in self.keys]


def change(layout: RunLayout, recipe: Recipe) -> Change | None:
    """What a resume with this recipe would change; None: nothing. Raises RecipeError for what no resume can do, or
    not yet, and StorageError when the recipe lays a role out as a saved state cannot be."""
    recipes = recorded_recipes(layout)
    recorded = recipes[max(recipes)]
    _require_the_same_run(layout, recorded, recipe)
    _require_fitting_states(layout, recipe)
    if recipe == recorded:
        return None
    found = Change(differences(recorded, recipe), _holds_from(layout, recorded, recipe), recipe.steps)
    _require_a_rate_that_goes_on(layout, recorded, recipe, found.from_step - 1)
    return found


def _require_a_rate_that_goes_on(layout: RunLayout, recorded: Recipe, recipe: Recipe, done: int) -> None:
    """Raise RecipeError where the actor's learning rate counts PPO steps, and the recipe has it count them from
    another one than the first that has trained or will train the actor."""
    was, asked = recorded.ppo.critic_only_steps, recipe.ppo.critic_only_steps
    table = recipe.actor.optimizer
    moves = table.lr_schedule != "constant" or warmup_updates(recipe, "actor") > 0
    if was == asked or table.lr_ticks != "step" or not moves or done <= min(was, asked):
        return
    step = min(was, done)
    raise RecipeError(
        f"`ppo.critic_only_steps` is `{asked}`, was `{was}`, and {done} steps are done: the learning rate of the "
        'actor counts steps from there (`actor.optimizer.lr_ticks` = `"step"`), and would jump',
        hint=f"ppoctl resume {quoted(layout.root)} --set ppo.critic_only_steps={step}",
    )


def _require_the_same_run(layout: RunLayout, recorded: Recipe, recipe: Recipe) -> None:
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
            hint=f"for a new run: ppoctl train {quoted(layout.recipe_toml)} --set name={quoted(recipe.name)}",
        )
    finished = (step for step in layout.committed_steps() if _is_done(layout, step))
    done = max([_last_saved(layout), *finished])
    if recipe.steps < done:
        raise RecipeError(
            f"`steps` is `{recipe.steps}`, and {done} steps of the run are done",
            hint=f"ppoctl resume {quoted(layout.root)} --set steps={done}",
        )


def _is_done(layout: RunLayout, step: int) -> bool:
    return manifests.read(layout.stage(step, outlines_of(layout).at(step).last)) is not None


def _last_saved(layout: RunLayout) -> int:
    return max(saved_steps(layout, outlines_of(layout).roles), default=0)


def adopt(attempt: Attempt, recipe: Recipe) -> Change | None:
    """Record `recipe` as the run's from the step it holds from, and say what it changes. Raises as `change` does;
    nothing is written then."""
    found = change(attempt.layout, recipe)
    if found is not None:
        run_dir.change_recipe(attempt, as_recorded(recipe), from_step=found.from_step)
        attempt.write(attempt.layout.recipe_toml, recipe_as_toml(recipe).encode())
    return found


def _holds_from(layout: RunLayout, recorded: Recipe, recipe: Recipe) -> int:
    """The first step that a changed recipe would hold for. Raises RecipeError when it cannot hold yet."""
    start = _last_saved(layout)
    step = run_dir.first_free_step(layout, after=start)
    if step - 1 > start and _is_mendable(layout, step - 1, recipe):
        step -= 1
    changed = [key for key, _, _ in result_differences(recorded, recipe) if _is_of_the_whole_run(key)]
    if changed and run_dir.first_free_step(layout, after=start) > start + 1:
        # Without saved states the evaluation of step 0 goes too: it was drawn with the old keys.
        redo = [layout.step(s).as_posix() for s in layout.committed_steps() if s > (start or -1)]
        raise RecipeError(
            f"`{changed[0]}` cannot change now: steps after the saved step {start} would be replayed with it",
            hint=f"drop those steps, they are drawn again: rm -r {' '.join(map(quoted, redo))}",
        )
    return step


def _require_fitting_states(layout: RunLayout, recipe: Recipe) -> None:
    """Raise StorageError, before anything is started, when the recipe lays a role out as a saved state cannot be."""
    start = _last_saved(layout)
    for role in outlines_of(layout).roles:
        for step in layout.saved_steps(role):
            manifest = manifests.read(layout.state(role, step)) if step >= start else None
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
                hint=_how_to_load(layout, keys),
            )


def _how_to_load(layout: RunLayout, keys: list[str]) -> str:
    if "distributed_optimizer" in keys:
        return "keep `distributed_optimizer` as it was; no state fits the other kind of optimizer"
    return (
        "first save it for any layout, under the one it has (nothing is trained): "
        f"ppoctl resume {quoted(layout.root)} --save-only --set checkpoint.reshardable=full"
    )


def _is_mendable(layout: RunLayout, step: int, recipe: Recipe) -> bool:
    """The step is unfinished, and its committed stages read nothing that has changed."""
    if _is_done(layout, step):
        return False
    names = (*outlines_of(layout).at(step).names, EVAL)
    committed = {name: manifests.read(layout.stage(step, name)) for name in names}
    scored_by = recorded_reward_digest(layout)
    return all(
        item is None or item.fingerprint == read_by(name, recipe, scored_by) for name, item in committed.items()
    )


def _is_of_the_whole_run(key: str) -> bool:
    return any(key == table or key.startswith(f"{table}.") for table in OF_THE_WHOLE_RUN)
