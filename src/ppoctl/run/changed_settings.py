"""Settings that a resume must not change in a run, and the first step that a changed recipe holds for. This module
does not import torch, so an impossible change fails before slow imports.

A changed recipe holds from the first step without a committed rollout. If the step before that is unfinished and none
of its committed stages read a changed key, the recipe holds from that earlier step. A failed step can therefore be
fixed. While steps after the last saved states are only in the redo log, keys of prompts and sampling and the file of
a loss cannot change: a replay reads them. An environment cannot change within a step that has generated with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ppoctl.algorithms.choose import outlines, trace_at
from ppoctl.algorithms.role_model import reward_models, trainable_of
from ppoctl.algorithms.roles import POLICY
from ppoctl.algorithms.sizes import optimizer_of, warmup_updates
from ppoctl.core.errors import RecipeError, StorageError, quoted
from ppoctl.core.key_path import dotted
from ppoctl.recipe.fingerprint import differences, result_differences
from ppoctl.recipe.loading.explain import shown
from ppoctl.recipe.loading.write import recipe_as_toml
from ppoctl.recipe.parallel import saved_layout, what_differs
from ppoctl.recipe.schema import Recipe
from ppoctl.run.loop.early_end import early_end, metrics_by_step
from ppoctl.run.run_recipe import as_recorded, newest_recorded, require_same_roles
from ppoctl.run.wire.sources import recorded_reward_digest
from ppoctl.store import run_dir
from ppoctl.store.attempt import Attempt
from ppoctl.store.jobs import longer_command
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths


def require_same_run(run: RecordedRun, recipe: Recipe) -> None:
    """Raise RecipeError if the run cannot continue with this recipe at any step, and StorageError if a saved state
    cannot be loaded under the recipe's layout."""
    _require_the_same(run, recipe)
    _require_fitting_states(run, recipe)


def _require_the_same(run: RecordedRun, recipe: Recipe) -> None:
    """Raise RecipeError if a recipe changes the run's name, trained roles or models, or ends the run before a step
    that is done."""
    paths, recorded = run.paths, newest_recorded(run)
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
    done = max([run.last_saved, *filter(run.is_done, paths.committed_steps())])
    if recipe.steps > recorded.steps and (reason := _ended_early(run, recipe)) is not None:
        raise RecipeError(
            f"`steps` is `{recipe.steps}`, but `[until]` ended the run after step {run.last_saved}: {reason}",
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


def _require_fitting_states(run: RecordedRun, recipe: Recipe) -> None:
    """Raise StorageError if a saved state cannot be loaded under the recipe's layout, before anything is started."""
    for role in run.outlines.roles:
        for step in run.paths.saved_steps(role):
            manifest = run.state_manifest(role, step) if step >= run.last_saved else None
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
                hint=_how_to_load(run.paths, keys),
            )


def _how_to_load(paths: RunPaths, keys: list[str]) -> str:
    if "distributed_optimizer" in keys:
        return "keep `distributed_optimizer` unchanged: no state fits the other kind of optimizer"
    return (
        "first save it for any layout under its present layout (this trains nothing): "
        f"ppoctl resume {quoted(paths.root)} --save-only --set checkpoint.reshardable=full"
    )


OF_THE_WHOLE_RUN = ("seed", "data", "rollout")
"""Tables that code with only one recipe reads, both for generation and for replay."""
OF_A_STEP = ("rollout.groups",)
"""Tables in them that only stages and step functions read, which know the recipe of each step."""
NOT_OF_A_STEP = ("rollout.groups.round_prompts",)
"""Keys in these tables that the source of prompts reads, which has one recipe."""

OF_ENVIRONMENTS = ("environment", "eval.environment")
"""Tables that processes of environments read. A run has one such set of processes."""
OF_EPISODES = tuple(
    f"{table}.{key}" for table in OF_ENVIRONMENTS for key in ("turns", "tokens_per_turn", "on_failure")
)
"""Keys in these tables that only stages read."""

_LOSS, _LOSS_FILE = "ppo.policy_loss.function", "ppo.policy_loss.digest"
"""The file of a loss is not stored in a run: a replay requires the file of the recipe of its step."""


@dataclass(frozen=True)
class Change:
    """Changed keys of a run, and the step from which they hold."""

    keys: list[tuple[str, Any, Any]]
    """(dotted key, old value, new value)."""
    from_step: int
    steps: int
    """Last step of the changed run."""

    def lines(self) -> list[str]:
        """Return one line per key, such as `actor.optimizer.lr 0.0004 -> 1e-05 from step 5`."""
        return [f"{key} {shown(old)} -> {shown(new)} from step {self.from_step}" for key, old, new in self.keys]


def _ended_early(run: RecordedRun, recipe: Recipe) -> str | None:
    """Return the values that end the run with this recipe after its last saved step, before `steps`, as text; None:
    the run continues, or all steps are done."""
    return early_end(recipe, run.last_saved, metrics_by_step(run.lines)) if recipe.until else None


def last_step(run: RecordedRun, recipe: Recipe | None = None) -> int:
    """Return the last step of the run with a recipe (None: its recorded one): `steps`, unless `[until]` ended it."""
    recipe = newest_recorded(run) if recipe is None else recipe
    return recipe.steps if _ended_early(run, recipe) is None else run.last_saved


def change(run: RecordedRun, recipe: Recipe) -> Change | None:
    """Return the changes that a resume with this recipe would make; None: no change. Raises RecipeError for a change
    that is impossible, or not yet possible, and StorageError if a saved state cannot be loaded under the recipe's
    layout.
    """
    require_same_run(run, recipe)
    recorded = newest_recorded(run)
    if recipe == recorded:
        return None
    changes = Change(differences(recorded, recipe), _holds_from(run, recipe), last_step(run, recipe))
    _require_continuous_rate(run, recipe, changes.from_step - 1)
    return changes


def _require_continuous_rate(run: RecordedRun, recipe: Recipe, done: int) -> None:
    """Raise RecipeError if the actor's learning rate counts PPO steps and the recipe would change the step it counts
    from.

    The learning rate must count from the first step that trained, or will train, the actor.
    """
    recorded_steps, wanted = newest_recorded(run).ppo.critic_only_steps, recipe.ppo.critic_only_steps
    table = optimizer_of(recipe, POLICY)
    moves = table.lr_schedule != "constant" or warmup_updates(recipe, POLICY) > 0
    if recorded_steps == wanted or table.lr_ticks != "step" or not moves or done <= min(recorded_steps, wanted):
        return
    step = min(recorded_steps, done)
    raise RecipeError(
        f"`ppo.critic_only_steps` is `{wanted}`, was `{recorded_steps}`, and {done} steps are done: the actor's "
        'learning rate counts steps from there (`actor.optimizer.lr_ticks` = `"step"`), so it would jump',
        hint=f"ppoctl resume {quoted(run.paths.root)} --set ppo.critic_only_steps={step}",
    )


def adopt(attempt: Attempt, run: RecordedRun, recipe: Recipe) -> Change | None:
    """Record `recipe` for the run, from the step it holds for, and return the changes. Raises the errors of `change`,
    and then writes nothing."""
    changes = change(run, recipe)
    if changes is not None:
        run_dir.change_recipe(attempt, as_recorded(recipe), from_step=changes.from_step)
        attempt.write(attempt.paths.recipe_toml, recipe_as_toml(recipe).encode())
        run.refresh()
    return changes


def _holds_from(run: RecordedRun, recipe: Recipe) -> int:
    """Return the first step that a changed recipe would hold for. Raises RecipeError if the recipe cannot change
    yet."""
    paths, start = run.paths, run.last_saved
    step = free = run_dir.first_free_step(paths, after=start)
    if step - 1 > start and _is_fixable(run, step - 1, recipe):
        step -= 1
    keys = [key for key, _, _ in result_differences(newest_recorded(run), recipe)]
    of_the_run = [key for key in keys if _is_of_the_whole_run(key)]
    changed = [key for key in of_the_run if free > start + 1]
    if step > start + 1 and _LOSS not in keys:
        changed += [key for key in keys if key == _LOSS_FILE]
    if changed:
        raise RecipeError(
            f"`{changed[0]}` cannot change now: steps after the saved step {start} would be replayed with it",
            hint=_generated_again(paths, start),
        )
    _require_responses(run, recipe, [*of_the_run, *(key for key in keys if _decides_responses(key))])
    if step - 1 > start and not run.is_done(step - 1):
        _require_same_environments(run, step - 1, keys)
    return step


def _generated_again(paths: RunPaths, saved: int) -> str:
    """Return the hint to delete the steps after the last saved one."""
    # Without saved states, the evaluation of step 0 must be dropped too: it was generated with the old keys.
    redo = [paths.step(step).as_posix() for step in paths.committed_steps() if step > (saved or -1)]
    return f"delete these steps, which are then generated again: rm -r {' '.join(map(quoted, redo))}"


def _require_responses(run: RecordedRun, recipe: Recipe, changed: Sequence[str]) -> None:
    """Raise RecipeError if a later step would read responses of the steps before that have other settings, or that do
    not exist."""
    start = run.last_saved
    if not (start and changed):
        return
    made = run.outlines.read_after(start)
    wanted = outlines(recipe)
    if made:
        later = run.outlines.readers(*min(made))
        why = f"responses of step {later[0]} have already been generated with the old value"
    elif missing := wanted.read_after(start):
        step, stage = min(missing)
        why = f"step {step} has generated no responses for step {wanted.readers(step, stage)[0]}"
    else:
        return
    raise RecipeError(
        f"`{changed[0]}` cannot change now: {why}",
        hint=f"ppoctl resume {quoted(run.paths.root)}  # without the change; or start a new run with it",
    )


def _require_same_environments(run: RecordedRun, step: int, changed: Sequence[str]) -> None:
    """Raise RecipeError if an environment changes, although an unfinished step keeps its recipe: the rest of the step
    would run in the new environment."""
    for key in changed:
        if _is_in(key, OF_ENVIRONMENTS) and not _is_in(key, OF_EPISODES):
            paths, saved = run.paths, run.last_saved
            back = f"ppoctl resume {quoted(paths.root)} --back-to {quoted(str(saved))}  # later steps are repeated"
            raise RecipeError(
                f"`{key}` cannot change now: step {step} is unfinished, and its responses have the old environment",
                hint=back if saved else _generated_again(paths, saved),
            )


def _is_fixable(run: RecordedRun, step: int, recipe: Recipe) -> bool:
    """Whether the step is unfinished and its committed stages read no changed key."""
    if run.is_done(step):
        return False
    committed = {stage.name: run.manifest(step, stage.name) for stage in run.stages(step)}
    now, scored_by = trace_at(recipe, step), recorded_reward_digest(run)
    return all(
        name in now and item.fingerprint == now[name].fingerprint(recipe, scored_by)
        for name, item in committed.items()
        if item is not None
    )


def _is_of_the_whole_run(key: str) -> bool:
    return _is_in(key, NOT_OF_A_STEP) or (_is_in(key, OF_THE_WHOLE_RUN) and not _is_in(key, OF_A_STEP))


def _decides_responses(key: str) -> bool:
    """Whether a key of the environment decides the responses of a rollout."""
    return _is_in(key, ("environment",)) and not _is_in(key, ("environment.on_failure",))


def _is_in(key: str, tables: tuple[str, ...]) -> bool:
    return any(key == table or key.startswith(f"{table}.") for table in tables)
