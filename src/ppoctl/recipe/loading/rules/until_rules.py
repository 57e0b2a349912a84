"""Rules about `[until]`: some step before the last can end the run, and `[expect]` does not need a later step.

See `all_rules`.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from ppoctl.core import metric_registry
from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.recipe.loading.rules.metrics_rules import is_evaluation_metric, steps_with_metric
from ppoctl.recipe.schema import Recipe

_EVERY: KeyPath = ("eval", "every_steps")


def check_until_bounds(recipe: Recipe) -> Iterator[Finding]:
    for name, target in recipe.until.items():
        key: KeyPath = ("until", name)
        if metric_registry.find(name) is None:
            yield conflict(metric_registry.unknown(name), (key,), "ppoctl recipes metrics")
        if _is_of_machine(name):
            yield conflict(f"`{name}` depends on the machine, so a repeated run could end after another step", (key,))
        if target.min is None and target.max is None:
            yield conflict(f"`{dotted(key)}` has neither `min` nor `max`", (key,))
        if target.min is not None and target.max is not None and target.min > target.max:
            message = f"no value is at least {target.min} and at most {target.max}"
            yield conflict(message, ((*key, "min"), (*key, "max")))


def check_until_can_end(recipe: Recipe) -> Iterator[Finding]:
    """Check that each metric has enough values before the last step, and that some step reports all metrics."""
    steps = _steps_before_the_last(recipe)
    for name, found in steps.items():
        key: KeyPath = ("until", name)
        needed = recipe.until[name].for_steps
        if len(found) < needed:
            found_text = f"{len(found)} steps before the last report it, fewer than {needed}"
            message = f"`{name}` cannot end the run early: {found_text}"
            every = (_EVERY,) if is_evaluation_metric(name) else ()
            yield conflict(message, ((*key, "for_steps") if needed > 1 else key, *every, ("steps",)))
            return
    if len(steps) == len(recipe.until) and steps and _first_end(recipe, steps) is None:
        yield conflict("no step before the last reports all metrics of [until]", (("until",), ("steps",)))


def check_expected_before_end(recipe: Recipe) -> Iterator[Finding]:
    steps = _steps_before_the_last(recipe)
    first = _first_end(recipe, steps) if recipe.until and len(steps) == len(recipe.until) else None
    for name, expected in recipe.expect.items():
        if first is not None and expected.at_step is not None and expected.at_step > first:
            yield conflict(
                f"`{name}` is expected at step {expected.at_step}, but [until] may end the run after step {first}",
                (("expect", name, "at_step"), ("until",)),
            )


def _is_of_machine(name: str) -> bool:
    """Return whether the metric is a time, a rate or a memory peak, so that a repeated run has other values."""
    seconds = (metric_registry.REWARD_SECONDS_MEAN.name, metric_registry.REWARD_SECONDS_MAX.name)
    return name.startswith(("time/", "throughput/", "memory/")) or name in seconds


def _steps_before_the_last(recipe: Recipe) -> Mapping[str, Sequence[int]]:
    """Return metric -> the steps that report it and may end the run early, in order. A metric is left out if another
    rule refuses it."""
    known = (name for name in recipe.until if metric_registry.find(name) is not None)
    found = {
        name: [step for steps in steps_with_metric(recipe, name) for step in steps if 0 < step < recipe.steps]
        for name in known
        if steps_with_metric(recipe, name)
    }
    return {name: sorted(steps) for name, steps in found.items()}


def _first_end(recipe: Recipe, steps: Mapping[str, Sequence[int]]) -> int | None:
    """Return the first step after which `[until]` can end the run; None: there is none."""
    shared = sorted(set.intersection(*map(set, steps.values())))
    enough = (
        step
        for step in shared
        if all(bisect_right(found, step) >= recipe.until[name].for_steps for name, found in steps.items())
    )
    return next(enough, None)
