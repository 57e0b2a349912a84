"""Metrics and recipe of a run, as the rules read them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from ppoctl.errors import quoted
from ppoctl.finding import Finding, Level
from ppoctl.metric_registry import REWARD_SCORE_MEAN, Metric

Points = Sequence[tuple[int, float]]
Shown = Literal["worst", "best", "longest"]
"""Choice of a sample of a step: by its score, or by its number of tokens."""

AVERAGED = 10
"""Largest number of steps of a mean: the score of one step varies by 0.1, so that ten steps are compared."""


@dataclass(frozen=True)
class Symptom:
    """A problem that a rule found."""

    finding: Finding
    """`where` is the step at which the problem began."""
    step: int
    sample: Shown | None
    """Sample of that step which shows the problem; None: samples do not show it."""


@dataclass(frozen=True)
class Curves:
    """Metrics of the finished stages of a run, and the recipe of its newest steps."""

    run: str
    """Run directory, for commands in hints."""
    recipe: Mapping[str, Any]
    series: Mapping[str, Points]
    saved: Sequence[int] = ()
    """Steps with saved states, which a resume can return to."""

    @property
    def toml(self) -> str:
        """The recipe file of the run, for commands in hints."""
        return f"{self.run}/recipe.toml"

    @property
    def steps(self) -> int:
        """Number of steps with a score."""
        return len(self.of(REWARD_SCORE_MEAN))

    def key(self, path: str) -> Any:
        """Return the value of a recipe key such as `ppo.kl.coef`; None if the key is absent."""
        value: Any = self.recipe
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def of(self, metric: Metric | str) -> Points:
        """Return the finite values of a metric by step, without those of step 0; empty if it was not recorded."""
        name = metric if isinstance(metric, str) else metric.name
        return [(step, value) for step, value in self.series.get(name, ()) if step > 0 and math.isfinite(value)]

    def early(self, metric: Metric | str) -> float:
        """Return the mean over the first third of the steps, at most `AVERAGED`; NaN if there is no value."""
        return mean(self.of(metric)[: self._averaged(metric)])

    def recent(self, metric: Metric | str) -> float:
        """Return the mean over the last third of the steps, at most `AVERAGED`; NaN if there is no value."""
        return mean(self.of(metric)[-self._averaged(metric) :])

    def since(self, metric: Metric | str, bound: float, *, below: bool = False) -> int | None:
        """Return the first step with a value above (`below`: at or below) the bound; None if there is none."""
        return next((step for step, value in self.of(metric) if (value <= bound) == below), None)

    def trailing(self, metric: Metric, bound: float) -> Points:
        """Return the newest values, up to the last one above the bound."""
        points = self.of(metric)
        above = [at for at, (_, value) in enumerate(points) if value > bound]
        return points[above[-1] + 1 :] if above else points

    def set(self, key: str, value: object) -> str:
        """Return the option that sets a key."""
        shown = f"{value:.0e}".replace("e-0", "e-") if isinstance(value, float) and value < 1e-3 else f"{value}"
        return f"--set {quoted(f'{key}={shown}')}"

    def scaled(self, key: str, factor: float) -> str | None:
        """Return the option that multiplies a number by a factor, rounded to one digit; None if the key is absent."""
        value = self.key(key)
        return None if value is None else self.set(key, float(f"{value * factor:.1g}"))

    def back_to(self, step: int) -> str:
        """Return the second half of a hint: the command that continues from the newest saved state before a step;
        empty if there is none."""
        step = max((saved for saved in self.saved if saved < step), default=-1)
        return "" if step < 0 else f"; continue from before: ppoctl resume {quoted(self.run)} --back-to {step}"

    def _averaged(self, metric: Metric | str) -> int:
        return min(max(len(self.of(metric)) // 3, 1), AVERAGED)


def mean(points: Points) -> float:
    """Return the mean of the values; NaN if there is none."""
    return fmean(value for _, value in points) if points else math.nan


def symptom(level: Level, kind: str, step: int, what: str, hint: str | None, sample: Shown | None = None) -> Symptom:
    """Return the symptom of a rule."""
    return Symptom(Finding(level, what, f"step {step}", hint, kind), step, sample)
