"""Which step a changed recipe holds from, when a run is resumed with other keys.

The first step without a committed rollout; or the unfinished step before it, when nothing committed of it reads a
changed key (so that the step that failed can be mended). Keys that decide prompts and sampling cannot change while
steps after the last saved states are only in the redo log: replaying those reads them.
"""

from dataclasses import dataclass
from typing import Any

from ppoctl.errors import RecipeError, quoted
from ppoctl.loading.explain import shown
from ppoctl.loading.write import recipe_as_toml
from ppoctl.recipe.fingerprint import differences, result_differences
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.sizes import warmup_updates
from ppoctl.runs.resume_checks import is_done, last_saved, require_same_run
from ppoctl.runs.run_recipe import recorded_recipes
from ppoctl.store import manifest as manifests
from ppoctl.store import run_dir
from ppoctl.store.attempt import Attempt
from ppoctl.store.outline import EVAL, outlines_of
from ppoctl.store.run_paths import RunPaths
from ppoctl.wire.outlines import as_recorded
from ppoctl.wire.sources import recorded_reward_digest
from ppoctl.wire.stages import stage_fingerprint

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


def change(paths: RunPaths, recipe: Recipe) -> Change | None:
    """What a resume with this recipe would change; None: nothing. Raises RecipeError for what no resume can do, or
    not yet, and StorageError when the recipe lays a role out as a saved state cannot be."""
    recipes = recorded_recipes(paths)
    recorded = recipes[max(recipes)]
    require_same_run(paths, recipe)
    if recipe == recorded:
        return None
    found = Change(differences(recorded, recipe), _holds_from(paths, recorded, recipe), recipe.steps)
    _require_a_rate_that_goes_on(paths, recorded, recipe, found.from_step - 1)
    return found


def _require_a_rate_that_goes_on(paths: RunPaths, recorded: Recipe, recipe: Recipe, done: int) -> None:
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
        hint=f"ppoctl resume {quoted(paths.root)} --set ppo.critic_only_steps={step}",
    )


def adopt(attempt: Attempt, recipe: Recipe) -> Change | None:
    """Record `recipe` as the run's from the step it holds from, and say what it changes. Raises as `change` does;
    nothing is written then."""
    found = change(attempt.paths, recipe)
    if found is not None:
        run_dir.change_recipe(attempt, as_recorded(recipe), from_step=found.from_step)
        attempt.write(attempt.paths.recipe_toml, recipe_as_toml(recipe).encode())
    return found


def _holds_from(paths: RunPaths, recorded: Recipe, recipe: Recipe) -> int:
    """The first step that a changed recipe would hold for. Raises RecipeError when it cannot hold yet."""
    start = last_saved(paths)
    step = run_dir.first_free_step(paths, after=start)
    if step - 1 > start and _is_mendable(paths, step - 1, recipe):
        step -= 1
    changed = [key for key, _, _ in result_differences(recorded, recipe) if _is_of_the_whole_run(key)]
    if changed and run_dir.first_free_step(paths, after=start) > start + 1:
        # Without saved states the evaluation of step 0 goes too: it was drawn with the old keys.
        redo = [paths.step(s).as_posix() for s in paths.committed_steps() if s > (start or -1)]
        raise RecipeError(
            f"`{changed[0]}` cannot change now: steps after the saved step {start} would be replayed with it",
            hint=f"drop those steps, they are drawn again: rm -r {' '.join(map(quoted, redo))}",
        )
    return step


def _is_mendable(paths: RunPaths, step: int, recipe: Recipe) -> bool:
    """The step is unfinished, and its committed stages read nothing that has changed."""
    if is_done(paths, step):
        return False
    names = (*outlines_of(paths).at(step).names, EVAL)
    committed = {name: manifests.read(paths.stage(step, name)) for name in names}
    scored_by = recorded_reward_digest(paths)
    return all(
        item is None or item.fingerprint == stage_fingerprint(name, recipe, scored_by)
        for name, item in committed.items()
    )


def _is_of_the_whole_run(key: str) -> bool:
    return any(key == table or key.startswith(f"{table}.") for table in OF_THE_WHOLE_RUN)
