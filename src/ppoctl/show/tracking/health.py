"""Health rules of a run: they check its metrics and return alarms. The caller decides how to stop.

The only state is the number of consecutive steps for which a metric was out of bounds. `replay` rebuilds it from the
journal, so that a resumed run gets the same alarms as an uninterrupted run.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ppoctl.core import metric_registry
from ppoctl.recipe.schema import HealthRule, HealthTable

METRICS: dict[str, tuple[str, ...]] = {
    "kl": (metric_registry.POLICY_APPROX_KL.name,),
    "reference_kl": (metric_registry.KL_REFERENCE_MEAN.name,),
    "entropy": (metric_registry.POLICY_ENTROPY_MEAN.name,),
    "truncated": (metric_registry.ROLLOUT_TRUNCATED_FRAC.name,),
    "explained_variance": (metric_registry.VALUE_EXPLAINED_VARIANCE.name,),
    "reward_errors": (metric_registry.REWARD_ERROR_FRAC.name, metric_registry.REWARD_TIMEOUT_FRAC.name),
    "reward_spread": (metric_registry.REWARD_SCORE_STD.name,),
    "mismatch_k3": (metric_registry.MISMATCH_GAP_K3.name,),
    "mismatch_abs": (metric_registry.MISMATCH_GAP_MEAN_ABS.name,),
}
"""Metrics that each rule of `[health]` reads; the values of several metrics are added up."""


@dataclass(frozen=True)
class HealthAlarm:
    """A health rule that acts at one step."""

    action: Literal["warn", "stop"]
    step: int
    metric: str
    value: float
    bound: float
    key: str
    """Recipe key of the violated bound."""
    num_steps: int
    """Number of consecutive steps out of bounds, including this step."""

    @property
    def text(self) -> str:
        """Message of the alarm: metric, value, bound, number of steps, and the key of the bound."""
        side = "below" if self.key.endswith(".min") else "above"
        comparison = f"{side} {self.bound:.4g}" if math.isfinite(self.value) else f"not within {self.bound:.4g}"
        steps = "" if self.num_steps == 1 else f" for {self.num_steps} steps"
        return f"step {self.step}: {self.metric} is {self.value:.4g}, {comparison}{steps} (`{self.key}`)"


class HealthMonitor:
    """The health rules of a recipe, and for how many steps each rule has been violated."""

    def __init__(self, rules: HealthTable) -> None:
        self._rules: dict[str, HealthRule] = {name: getattr(rules, name) for name in METRICS}
        self._counts = dict.fromkeys(METRICS, 0)
        self._step = 0
        self._alarms: list[HealthAlarm] = []

    def check(self, step: int, metrics: Mapping[str, float]) -> list[HealthAlarm]:
        """Check the metrics of a step, and return the alarms of the rules that act at this step.

        A second call for the same step returns the same alarms. An absent metric (a critic-only step has no KL of the
        actor) does not change the count of consecutive steps; a metric that is not finite is out of bounds. Raises
        ValueError for a step before the last checked one.
        """
        if step < self._step:
            raise ValueError(f"step {step} is checked after step {self._step}")
        if step > self._step:
            self._step = step
            alarms = [self._check_rule(name, step, metrics) for name in METRICS]
            self._alarms = [alarm for alarm in alarms if alarm is not None]
        return list(self._alarms)

    def would_stop(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether `check` would return a stop alarm for these metrics of a new step. Changes no state."""
        counts = dict(self._counts)
        alarms = [self._check_rule(name, step, metrics) for name in METRICS]
        self._counts = counts
        return any(alarm is not None and alarm.action == "stop" for alarm in alarms)

    def replay(self, history: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Check the metrics of earlier steps, oldest first, without returning alarms."""
        for step, figures in history:
            self.check(step, figures)

    def _check_rule(self, name: str, step: int, metrics: Mapping[str, float]) -> HealthAlarm | None:
        rule = self._rules[name]
        value = _value(METRICS[name], metrics)
        if value is None or step < rule.from_step:
            return None
        violated = _violated_bound(rule, value)
        self._counts[name] = 0 if violated is None else self._counts[name] + 1
        if violated is None or self._counts[name] < rule.for_steps:
            return None
        side, bound = violated
        return HealthAlarm(
            action=rule.action,
            step=step,
            metric=" + ".join(METRICS[name]),
            value=value,
            bound=bound,
            key=f"health.{name}.{side}",
            num_steps=self._counts[name],
        )


def _value(names: tuple[str, ...], metrics: Mapping[str, float]) -> float | None:
    present = [metrics[name] for name in names if name in metrics]
    return sum(present) if present else None


def _violated_bound(rule: HealthRule, value: float) -> tuple[str, float] | None:
    """Return the violated bound, `min` or `max` with its value; None if there is none.

    The comparisons are negated, so that NaN violates every bound.
    """
    if rule.max is not None and not value <= rule.max:
        return "max", rule.max
    if rule.min is not None and not value >= rule.min:
        return "min", rule.min
    return None
