"""Health rules of a run: figures in, alarms out. Pure: the caller decides what stopping means.

The only memory is how many steps in a row a figure was out of bounds, and `replay` rebuilds it from the journal, so
a resumed run judges as the uninterrupted one would have.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ppoctl import metric_registry
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
"""Which metrics each rule of `[health]` reads; several are added up."""


@dataclass(frozen=True)
class HealthAlarm:
    """A health rule that acts at one step."""

    action: Literal["warn", "stop"]
    step: int
    metric: str
    value: float
    bound: float
    key: str
    """Recipe key of the bound that is broken."""
    num_steps: int
    """Consecutive steps out of bounds, this one included."""

    @property
    def text(self) -> str:
        """The alarm in words: metric, value, bound, for how many steps, and the key that set the bound."""
        side = "below" if self.key.endswith(".min") else "above"
        where = f"{side} {self.bound:.4g}" if math.isfinite(self.value) else f"not within {self.bound:.4g}"
        steps = "" if self.num_steps == 1 else f" for {self.num_steps} steps"
        return f"step {self.step}: {self.metric} is {self.value:.4g}, {where}{steps} (`{self.key}`)"


class HealthMonitor:
    """The rules of one recipe, and how long each has been broken."""

    def __init__(self, rules: HealthTable) -> None:
        self._rules: dict[str, HealthRule] = {name: getattr(rules, name) for name in METRICS}
        self._counts = dict.fromkeys(METRICS, 0)
        self._step = 0
        self._alarms: list[HealthAlarm] = []

    def check(self, step: int, figures: Mapping[str, float]) -> list[HealthAlarm]:
        """Alarms of the rules that act at this step, given all its figures; the same answer when asked again about
        the same step.

        A figure that is absent (a critic-only step has no actor's KL) neither counts nor interrupts a row of steps;
        one that is not finite is out of bounds. Raises ValueError on a step before the last judged one.
        """
        if step < self._step:
            raise ValueError(f"step {step} is judged after step {self._step}")
        if step > self._step:
            self._step = step
            found = [self._check_rule(name, step, figures) for name in METRICS]
            self._alarms = [alarm for alarm in found if alarm is not None]
        return list(self._alarms)

    def would_stop(self, step: int, figures: Mapping[str, float]) -> bool:
        """Whether `judge` would find a rule that stops, were these all the figures of a step that it has not judged;
        changes nothing."""
        counts = dict(self._counts)
        alarms = [self._check_rule(name, step, figures) for name in METRICS]
        self._counts = counts
        return any(alarm is not None and alarm.action == "stop" for alarm in alarms)

    def replay(self, history: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Take in the figures of earlier steps, oldest first; no alarm is given."""
        for step, figures in history:
            self.check(step, figures)

    def _check_rule(self, name: str, step: int, figures: Mapping[str, float]) -> HealthAlarm | None:
        rule = self._rules[name]
        value = _value(METRICS[name], figures)
        if value is None or step < rule.from_step:
            return None
        broken = _broken_bound(rule, value)
        self._counts[name] = 0 if broken is None else self._counts[name] + 1
        if broken is None or self._counts[name] < rule.for_steps:
            return None
        side, bound = broken
        return HealthAlarm(
            action=rule.action,
            step=step,
            metric=" + ".join(METRICS[name]),
            value=value,
            bound=bound,
            key=f"health.{name}.{side}",
            num_steps=self._counts[name],
        )


def _value(names: tuple[str, ...], figures: Mapping[str, float]) -> float | None:
    present = [figures[name] for name in names if name in figures]
    return sum(present) if present else None


def _broken_bound(rule: HealthRule, value: float) -> tuple[str, float] | None:
    """The bound that the value breaks, `min` or `max` with its number. Written as `not inside`, so that NaN breaks
    any bound."""
    if rule.max is not None and not value <= rule.max:
        return "max", rule.max
    if rule.min is not None and not value >= rule.min:
        return "min", rule.min
    return None
