"""Metrics and recipe of a run, as the rules read them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from statistics import fmean
from typing import Any, Literal

from ppoctl.core.errors import quoted
from ppoctl.core.finding import Finding, Level
from ppoctl.core.metric_registry import POLICY_APPROX_KL, REWARD_SCORE_MEAN, REWARD_SCORE_STD, Metric

Points = Sequence[tuple[int, float]]
Shown = Literal["worst", "best", "longest"]
"""Choice of a sample of a step: by its score, or by its number of tokens."""

AVERAGED = 10
"""Largest number of steps of a mean: the score of one step varies by 0.1, so that ten steps are compared."""


class Phase(IntEnum):
    """Part of a step, in the order in which the parts run: what is measured in one cannot follow from a later one."""

    GENERATED = 0
    SCORED = 1
    MEASURED = 2
    """Log-probs, values and advantages, before the updates."""
    UPDATED = 3


@dataclass(frozen=True)
class Symptom:
    """A problem that a rule found."""

    finding: Finding
    """`where` is the step at which the problem began."""
    step: int
    phase: Phase
    """Part of the step in which the problem began."""
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
    limits: Mapping[str, int] = field(default_factory=dict)
    """Key of a limit -> number of responses that it truncated in the newest step with records (`limits.limits`)."""

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

    @property
    def first_update(self) -> int | None:
        """First step that trained the actor; None: no step did."""
        return next((step for step, _ in self.of(POLICY_APPROX_KL)), None)

    @property
    def rise(self) -> float:
        """Rise of the score from its first to its newest steps, beyond the noise of a mean; negative: it fell, 0: it
        stays within the noise."""
        change = self.recent(REWARD_SCORE_MEAN) - self.early(REWARD_SCORE_MEAN)
        return change if abs(change) > self.noise else 0.0

    @property
    def noise(self) -> float:
        """Difference between two mean scores that may be chance: a quarter of the standard deviation of the scores,
        and with few prompts more, because the scores of one prompt are alike."""
        prompts = (self.key("rollout.prompts_per_step") or 1) * self._averaged(REWARD_SCORE_MEAN)
        spread = max((value for _, value in self.of(REWARD_SCORE_STD)), default=0.0)
        return spread * max(1 / 4, 3 * math.sqrt(2 / prompts))

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

    def shown(self, metric: Metric | str, step: int) -> str:
        """Return the value at a step and, if it is another one, the mean of the newest steps, each with its step."""
        points = self.of(metric)[-self._averaged(metric) :]
        steps = f"in step {points[-1][0]}" if len(points) == 1 else f"in steps {points[0][0]} to {points[-1][0]}"
        first, recent = dict(self.of(metric)).get(step), f"{mean(points):.2g}"
        if first is None:
            return f"`{recent}` {steps}"
        return f"`{first:.2g}`" + (
            "" if points[-1][0] == step or f"{first:.2g}" == recent else f", and {recent} {steps}"
        )

    def best(self) -> tuple[tuple[int, int], float]:
        """Return the highest mean score of as many steps as `recent` has, with the first and the last of them; NaN if
        there is no score."""
        points, window = self.of(REWARD_SCORE_MEAN), self._averaged(REWARD_SCORE_MEAN)
        parts = [points[at : at + window] for at in range(len(points) - window + 1)]
        means = (((part[0][0], part[-1][0]), mean(part)) for part in parts)
        return max(means, key=lambda each: each[1], default=((0, 0), math.nan))

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


def symptom(
    level: Level, kind: str, began: tuple[int, Phase], what: str, hint: str | None, sample: Shown | None = None
) -> Symptom:
    """Return the symptom of a rule, which began in this part of this step."""
    step, phase = began
    return Symptom(Finding(level, what, f"step {step}", hint, kind), step, phase, sample)
