"""Health rules, worked out by hand."""

import math

import pytest

from ppoctl.recipe.schema import HealthRule, HealthTable
from ppoctl.show.tracking.health import METRICS, HealthMonitor

EV = "value/explained_variance"


def acted(monitor: HealthMonitor, series: dict[int, dict[str, float]]) -> list[tuple[int, str, int]]:
    return [(v.step, v.key, v.num_steps) for step, metrics in series.items() for v in monitor.check(step, metrics)]


def test_every_health_rule_has_a_metric() -> None:
    assert set(METRICS) == set(HealthTable.model_fields)


def test_healthy_step_and_values_at_bounds_raise_no_alarm() -> None:
    monitor = HealthMonitor(HealthTable())
    assert monitor.check(1, {"policy/approx_kl": 0.5, "rollout/truncated_frac": 0.5, EV: -9.0}) == []


def test_alarm_names_metric_value_bound_and_key() -> None:
    (verdict,) = HealthMonitor(HealthTable()).check(1, {"policy/approx_kl": 0.73})
    assert verdict.action == "warn"
    assert verdict.text == "step 1: policy/approx_kl is 0.73, above 0.5 (`health.kl.max`)"


def test_equal_scores_in_a_step_raise_a_warning() -> None:
    monitor = HealthMonitor(HealthTable())
    assert monitor.check(1, {"reward/score_std": 0.001}) == []
    (verdict,) = monitor.check(2, {"reward/score_std": 0.0})
    assert (verdict.action, verdict.key) == ("warn", "health.reward_spread.min")


def test_sampler_mismatch_stops_the_run_unless_its_bound_is_raised() -> None:
    gap, k3 = "mismatch/gap_mean_abs", "mismatch/gap_k3"
    monitor = HealthMonitor(HealthTable())
    assert monitor.check(1, {gap: 0.2, k3: 0.045}) == []  # reached in bfloat16
    assert monitor.check(2, {gap: 0.03, k3: 0.3}) == []  # one token, perhaps
    (verdict,) = monitor.check(3, {gap: 0.03, k3: 0.3})
    assert (verdict.action, verdict.key, verdict.num_steps) == ("stop", "health.mismatch_k3.max", 2)
    (verdict,) = monitor.check(4, {gap: 0.31, k3: 0.03})
    assert (verdict.action, verdict.key) == ("stop", "health.mismatch_abs.max")
    off = HealthTable(mismatch_abs=HealthRule(), mismatch_k3=HealthRule(max=1.0))
    assert HealthMonitor(off).check(1, {gap: 0.9, k3: 0.9}) == []


def test_reward_errors_and_timeouts_are_added() -> None:
    monitor = HealthMonitor(HealthTable())
    assert monitor.check(1, {"reward/error_frac": 0.006, "reward/timeout_frac": 0.004}) == []
    (verdict,) = monitor.check(2, {"reward/error_frac": 0.006, "reward/timeout_frac": 0.005})
    assert verdict.text == (
        "step 2: reward/error_frac + reward/timeout_frac is 0.011, above 0.01 (`health.reward_errors.max`)"
    )


def test_health_rules_honour_from_step_and_for_steps() -> None:
    # min -1 from step 10 for 3 steps: steps 8 and 9 are not checked, 10 and 11 count 1 and 2, 12 is fine and ends the
    # row, 13, 14, 15 count 1, 2, 3: the first alarm is at 15, the next at 16.
    monitor = HealthMonitor(HealthTable())
    values = {8: -5.0, 9: -5.0, 10: -2.0, 11: -2.0, 12: 0.0, 13: -2.0, 14: -2.0, 15: -2.0, 16: -2.0}
    found = acted(monitor, {step: {EV: value} for step, value in values.items()})
    assert found == [(15, "health.explained_variance.min", 3), (16, "health.explained_variance.min", 4)]


def test_alarm_text_has_the_number_of_steps() -> None:
    rules = HealthTable(explained_variance=HealthRule(min=0.0, for_steps=2, action="stop"))
    monitor = HealthMonitor(rules)
    assert monitor.check(1, {EV: -0.25}) == []
    (verdict,) = monitor.check(2, {EV: -0.5})
    assert verdict.action == "stop"
    assert verdict.text == f"step 2: {EV} is -0.5, below 0 for 2 steps (`health.explained_variance.min`)"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_break_any_bound(value: float) -> None:
    rules = HealthTable(kl=HealthRule(min=0.0, max=0.5))
    (verdict,) = HealthMonitor(rules).check(1, {"policy/approx_kl": value})
    assert f"is {value}, not within" in verdict.text


def test_rule_without_bounds_never_acts() -> None:
    assert HealthMonitor(HealthTable()).check(1, {"policy/entropy_mean": math.nan, "kl/reference_mean": 1e9}) == []


def test_absent_metric_neither_counts_nor_resets_the_count() -> None:
    monitor = HealthMonitor(HealthTable(kl=HealthRule(max=0.5, for_steps=2)))
    bad = {"policy/approx_kl": 1.0}
    assert acted(monitor, {1: bad, 2: {}, 3: bad}) == [(3, "health.kl.max", 2)]


def test_repeated_check_of_a_step_counts_once() -> None:
    monitor = HealthMonitor(HealthTable(kl=HealthRule(max=0.5, for_steps=2)))
    bad = {"policy/approx_kl": 1.0}
    assert monitor.check(1, bad) == monitor.check(1, bad) == []
    assert monitor.check(2, bad) == monitor.check(2, bad) != []
    with pytest.raises(ValueError, match="step 1 is checked after step 2"):
        monitor.check(1, bad)


@pytest.mark.parametrize("killed_in_step", range(1, 18))
def test_resumed_health_monitor_equals_the_uninterrupted_monitor(killed_in_step: int) -> None:
    values = {step: -2.0 if step not in (12,) else 0.0 for step in range(1, 18)}
    history = [(step, {"rollout/truncated_frac": 0.9, EV: value}) for step, value in values.items()]
    whole = HealthMonitor(HealthTable())
    expected = [whole.check(step, metrics) for step, metrics in history]
    resumed = HealthMonitor(HealthTable())
    resumed.replay(history[: killed_in_step - 1])
    rest = [resumed.check(step, metrics) for step, metrics in history[killed_in_step - 1 :]]
    assert rest == expected[killed_in_step - 1 :]
    assert any(expected)


def test_question_whether_a_step_would_stop_changes_no_count() -> None:
    """The loop calls `would_stop` before the update, with the metrics that exist by then, and `check` at the end."""
    rules = HealthTable(kl=HealthRule(max=0.5, for_steps=3, action="stop"))
    monitor, bad, good = HealthMonitor(rules), {"policy/approx_kl": 1.0}, {"policy/approx_kl": 0.1}
    for step in (1, 2):
        assert [monitor.would_stop(step, metrics) for metrics in (bad, bad, bad, good)] == [False] * 4
        assert monitor.check(step, bad) == []
    assert [monitor.would_stop(3, metrics) for metrics in (bad, good, {}, bad)] == [True, False, False, True]
    assert [(alarm.step, alarm.num_steps) for alarm in monitor.check(3, bad)] == [(3, 3)]
    assert monitor.check(3, bad) == monitor.check(3, bad)


def test_only_a_rule_that_stops_would_stop() -> None:
    rules = HealthTable(kl=HealthRule(max=0.5), entropy=HealthRule(min=1.0, from_step=2, action="stop"))
    bad = {"policy/approx_kl": 1.0, "policy/entropy_mean": 0.5}
    assert [HealthMonitor(rules).would_stop(step, bad) for step in (1, 2)] == [False, True]
