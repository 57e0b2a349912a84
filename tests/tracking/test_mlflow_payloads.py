"""Payloads for MLflow, worked out by hand."""

import math

from ppoctl.show.tracking.mlflow_payloads import (
    MARKER,
    POINTS_PER_BATCH,
    Ending,
    MetricPoint,
    batches,
    changed_params,
    ending,
    metric_name,
    params,
)


def stage(seq: int, metrics: dict[str, float], step: int = 3) -> dict[str, object]:
    return {"seq": seq, "step": step, "stage": "values", "at": 12.5, "seconds": 2.0, "figures": metrics}


def test_journal_line_becomes_points_and_a_marker() -> None:
    (batch,) = batches([[stage(7, {"a/b": 1.0})]], after=0)
    assert batch.points == (
        MetricPoint("a/b", 1.0, 12500, 3),
        MetricPoint("time/values_s", 2.0, 12500, 3),
        MetricPoint(MARKER, 7.0, 12500, 7),
    )
    assert (batch.num_lines, batch.last_seq, batch.tags) == (1, 7, {})


def test_sent_lines_are_skipped_and_events_move_the_marker() -> None:
    event = {"seq": 3, "event": "attempt_started", "at": 13.0}
    lines = [[stage(1, {"a": 1.0})], [stage(2, {"a": 2.0})], [event]]
    (batch,) = batches(lines, after=2)
    assert batch.points == (MetricPoint(MARKER, 3.0, 13000, 3),)
    assert list(batches(lines, after=3)) == []


def test_save_is_a_point_of_its_own_step_even_among_rounds_of_the_next() -> None:
    saved = {"seq": 8, "event": "saved", "at": 13.0, "step": 2, "role": "critic", "seconds": 9.0, "waited_s": 0.5}
    (batch,) = batches([[stage(7, {"a": 1.0}), saved, stage(9, {"a": 2.0})]], after=0)
    assert batch.points == (
        MetricPoint("a", 2.0, 12500, 3),
        MetricPoint("time/values_s", 2.0, 12500, 3),
        MetricPoint("time/critic_save_s", 0.5, 12500, 2),
        MetricPoint(MARKER, 9.0, 12500, 9),
    )


def test_non_finite_values_are_left_out_and_tagged() -> None:
    metrics = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.0}
    (batch,) = batches([[stage(1, metrics)]], after=0)
    assert [point.name for point in batch.points] == ["d", "time/values_s", MARKER]
    assert batch.tags == {
        "nonfinite/a": "nan at step 3",
        "nonfinite/b": "inf at step 3",
        "nonfinite/c": "-inf at step 3",
    }


def test_batches_stay_below_the_limit_and_lose_nothing() -> None:
    # 100 metrics and the seconds: 101 points per line; 8 lines are 808, the ninth would make 909.
    lines = [[stage(seq, {f"m{k}": float(k) for k in range(100)}, step=seq)] for seq in range(1, 21)]
    found = list(batches(lines, after=0))
    assert [batch.num_lines for batch in found] == [8, 8, 4]
    assert [batch.last_seq for batch in found] == [8, 16, 20]
    assert all(len(batch.points) <= POINTS_PER_BATCH + 1 for batch in found)
    assert sum(len(batch.points) - 1 for batch in found) == 20 * 101


def test_metric_names_are_valid_in_mlflow() -> None:
    assert metric_name("eval/gsm8k/pass_at_1") == "eval/gsm8k/pass_at_1"
    assert metric_name('eval/my "set" (v2)//..//x/') == "eval/my _set_ _v2_/_/_/_/x/_"
    assert len(metric_name("x" * 999)) == 250


def test_params_are_flat_without_empty_values_and_truncated() -> None:
    flat = params({"a": {"b": 1e-6, "c": None, "d": [1, 2], "e": {}}, "f": "text", "g": True, "h": "x" * 7000})
    assert flat["h"].endswith("... (7000 characters; see recipe.resolved.json)")
    assert len(flat.pop("h")) < 6000
    assert flat == {"a.b": "1e-06", "a.d": "[1, 2]", "f": "text", "g": "true"}


def test_changed_param_becomes_a_tag_until_changed_back() -> None:
    assert changed_params({"a": "1", "b": "2"}, {"a": "1", "b": "3", "new": "4"}, {}) == {"changed/b": "3"}
    assert changed_params({"b": "2"}, {"b": "2"}, {"changed/b": "3"}) == {"changed/b": "2"}
    assert changed_params({"a": "1", "b": "2"}, {"a": "1"}, {}) == {"changed/b": "absent"}


def test_last_event_gives_the_run_status() -> None:
    started = {"seq": 1, "event": "attempt_started", "attempt": 2, "at": 1.0}
    stopped = {"seq": 2, "event": "attempt_ended", "attempt": 2, "status": "preempted", "exit_code": 75, "at": 2.0}
    assert ending([]) == Ending("running")
    assert ending([started]) == Ending("running", attempt=2)
    assert ending([started, stopped, stage(3, {})]) == Ending("preempted", attempt=2, at_ms=2000)
    assert ending([stopped, started]).status == "RUNNING"


def test_every_end_has_an_mlflow_status() -> None:
    words = ("finished", "unmet", "failed", "short", "stopped", "preempted", "interrupted", "something else")
    assert [Ending(word).status for word in words] == [
        "FINISHED",
        "FINISHED",
        "FAILED",
        "FAILED",
        "FAILED",
        "KILLED",
        "KILLED",
        "FAILED",
    ]
