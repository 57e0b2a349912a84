"""Learning rate schedule of a role, from the recipe."""

from ppoctl.algorithms.formulas.learning_rate import LearningRate
from ppoctl.algorithms.sizes import optimizer_of, planned_updates, updates_per_tick, warmup_updates
from ppoctl.algorithms.step_recipe import StepRecipe


def learning_rate_of(recipe: StepRecipe, role: str) -> LearningRate:
    """Return the learning rate schedule of a role. Without `lr_decay_updates`, the decay ends with the run."""
    table, per_tick = optimizer_of(recipe, role), updates_per_tick(recipe, role)
    return LearningRate(
        peak=table.lr,
        kind=table.lr_schedule,
        warmup_ticks=warmup_updates(recipe, role) // per_tick,
        total_ticks=(table.lr_decay_updates or planned_updates(recipe, role)) // per_tick,
        min_frac=table.lr_min_frac,
        warmup_init_frac=table.lr_warmup_init_frac,
    )
