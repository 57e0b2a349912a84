"""End of a run before its last step, decided from `[until]` and the committed metrics. Imports no torch.

The metrics of a step decide, and nothing else does, so a resume repeats the decision. An evaluation at the end of a
run follows the decision. It cannot change the decision: if `[until]` has a metric of an evaluation, only a step that
is evaluated in any case can end the run.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ppoctl.recipe.bounds import bounds_text, is_within
from ppoctl.recipe.schema import Recipe, Target

MetricsOf = Callable[[int], Mapping[str, float]]
"""Step -> the committed metrics of the step, without times."""


def early_end(recipe: Recipe, step: int, metrics_of: MetricsOf) -> str | None:
    """Return the values that end the run after this step, as text; None: the run does not end early after this
    step."""
    values = metrics_of(step) if recipe.until and step < recipe.steps else {}
    if not values or not all(_is_reached(name, target, step, metrics_of) for name, target in recipe.until.items()):
        return None
    return "; ".join(
        f"`{name}` is {values[name]:.4g} ({bounds_text(target.min, target.max)})"
        for name, target in recipe.until.items()
    )


def metrics_by_step(lines: Iterable[Mapping[str, Any]]) -> MetricsOf:
    """Return the metrics in the lines of a journal."""
    by_step: dict[int, dict[str, float]] = {}
    for line in lines:
        if "stage" in line:
            by_step.setdefault(int(line["step"]), {}).update(line["figures"])
    return lambda step: by_step.get(step, {})


def _is_reached(name: str, target: Target, step: int, metrics_of: MetricsOf) -> bool:
    """Return whether this step reports the metric, and its last `for_steps` values are within the bounds."""
    if name not in metrics_of(step):
        return False
    missing = target.for_steps
    for earlier in range(step, 0, -1):
        value = metrics_of(earlier).get(name)
        if value is None:
            continue
        if not is_within(value, target.min, target.max):
            return False
        missing -= 1
        if missing == 0:
            return True
    return False
