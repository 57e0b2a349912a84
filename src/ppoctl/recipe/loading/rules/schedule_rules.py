"""Rules about learning rates: warm-up, decay, and how often the rate changes. See `all_rules`."""

from collections.abc import Iterator
from math import ceil

from ppoctl.algorithms.sizes import planned_updates, updates_per_tick, warmup_updates
from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath
from ppoctl.recipe.schema import Recipe


def check_one_warmup_key(recipe: Recipe) -> Iterator[Finding]:
    for role, table in recipe.trained.items():
        optimizer = table.optimizer
        if optimizer.lr_warmup_frac is not None and optimizer.lr_warmup_updates:
            yield conflict(
                f"the warm-up of the {role} is set both as a fraction and as a number of updates",
                _keys(role, "lr_warmup_frac", "lr_warmup_updates"),
                f"--set {role}.optimizer.lr_warmup_updates=0",
            )
        has_warmup = optimizer.lr_warmup_frac or optimizer.lr_warmup_updates
        if optimizer.lr_warmup_init_frac is not None and not has_warmup:
            yield conflict(
                f"`{role}.optimizer.lr_warmup_init_frac` is set, but there is no warm-up",
                _keys(role, "lr_warmup_init_frac", "lr_warmup_updates"),
                f"--set {role}.optimizer.lr_warmup_frac=0.05",
            )


def check_warmup_fraction(recipe: Recipe) -> Iterator[Finding]:
    for role, table in recipe.trained.items():
        if table.optimizer.lr_warmup_frac and not warmup_updates(recipe, role):
            planned, per_tick = planned_updates(recipe, role), updates_per_tick(recipe, role)
            yield conflict(
                f"the {role} has no warm-up: this fraction of {planned} updates rounds to 0",
                _keys(role, "lr_warmup_frac"),
                f"--set {role}.optimizer.lr_warmup_frac={ceil(100 * per_tick / max(planned, per_tick)) / 100}",
            )


def check_lr_tick_multiples(recipe: Recipe) -> Iterator[Finding]:
    for role, table in recipe.trained.items():
        per_tick = updates_per_tick(recipe, role)
        for name in ("lr_warmup_updates", "lr_decay_updates"):
            length = getattr(table.optimizer, name)
            if length is not None and length % per_tick:
                yield conflict(
                    f"the learning rate of the {role} changes every {per_tick} updates, and {length} is not a "
                    f"multiple "
                    "of that",
                    _keys(role, name, "lr_ticks"),
                    f"--set {role}.optimizer.{name}={ceil(length / per_tick) * per_tick}",
                )


def check_warmup_length(recipe: Recipe) -> Iterator[Finding]:
    for role, table in recipe.trained.items():
        planned, warmup = planned_updates(recipe, role), table.optimizer.lr_warmup_updates
        if warmup > planned:
            yield conflict(
                f"a warm-up of {warmup} updates never ends: the run has only {planned} updates of the {role}",
                ((role, "optimizer", "lr_warmup_updates"), ("steps",)),
                f"--set {role}.optimizer.lr_warmup_updates={planned // 10}",
            )


def check_decay_length(recipe: Recipe) -> Iterator[Finding]:
    for role, table in recipe.trained.items():
        decay, warmup = table.optimizer.lr_decay_updates, warmup_updates(recipe, role)
        if decay is not None and decay <= warmup:
            written = "lr_warmup_updates" if table.optimizer.lr_warmup_frac is None else "lr_warmup_frac"
            yield conflict(
                f"the decay ends at update {decay}, before the warm-up ends (update {warmup})",
                _keys(role, "lr_decay_updates", written),
            )


def check_constant_lr_keys(recipe: Recipe) -> Iterator[Finding]:
    for role, table in recipe.trained.items():
        optimizer = table.optimizer
        for name in ("lr_decay_updates", "lr_min_frac"):
            if optimizer.lr_schedule == "constant" and getattr(optimizer, name):
                yield conflict(
                    f"`{role}.optimizer.{name}` is set, but a constant learning rate never decays",
                    _keys(role, name, "lr_schedule"),
                    f"--set {role}.optimizer.lr_schedule=linear",
                )


def _keys(role: str, *names: str) -> tuple[KeyPath, ...]:
    return tuple((role, "optimizer", name) for name in names)
