"""Seconds of attempts, worked out by hand."""

import pytest

from ppoctl.store.journal import JournalLine
from ppoctl.store.time_use import AttemptTime, attempt_times


def started(attempt: int, at: float, **more: object) -> JournalLine:
    return {"event": "attempt_started", "attempt": attempt, "at": at, **more}


def ended(attempt: int, at: float, **more: object) -> JournalLine:
    return {"event": "attempt_ended", "attempt": attempt, "at": at, "status": "preempted", **more}


def stage(attempt: int, at: float, step: int, name: str, seconds: float) -> JournalLine:
    return {"attempt": attempt, "at": at, "step": step, "stage": name, "seconds": seconds}


def journal(*lines: JournalLine) -> list[JournalLine]:
    return [{"seq": number, **line} for number, line in enumerate(lines, start=1)]


def test_attempt_time_splits_into_kept_starting_and_lost() -> None:
    lines = journal(
        started(1, 1000.0, gpus=8),
        stage(1, 1100.0, 1, "rollout", 60.0),
        stage(1, 1180.0, 1, "actor_update", 75.0),
        ended(1, 1300.0, starting_s=40.0, abandoned_s=90.0, replayed_s=10.0),
    )
    (one,) = attempt_times(lines)
    assert one == AttemptTime(attempt=1, gpus=8, wall_s=300.0, kept_s=135.0, starting_s=40.0, lost_s=100.0)
    assert (one.kept_gpu_hours, one.lost_gpu_hours) == pytest.approx((0.3, 8 * 100 / 3600))


def test_time_of_a_repeated_stage_is_lost_by_the_earlier_attempt() -> None:
    lines = journal(
        started(1, 0.0),
        stage(1, 10.0, 1, "rollout", 8.0),
        stage(1, 20.0, 1, "reward", 3.0),
        ended(1, 20.0),
        started(2, 100.0),
        stage(2, 110.0, 1, "reward", 4.0),
        stage(2, 120.0, 2, "reward", 5.0),
        ended(2, 121.0),
    )
    assert [(one.kept_s, one.lost_s) for one in attempt_times(lines)] == [(8.0, 3.0), (9.0, 0.0)]


def test_killed_attempt_ends_at_its_last_journal_line() -> None:
    killed = [started(1, 50.0), stage(1, 90.0, 1, "rollout", 30.0)]
    (one, other) = attempt_times(journal(*killed, started(2, 500.0)))
    assert (one.wall_s, one.kept_s, one.lost_s) == (40.0, 30.0, 0.0)
    assert (other.wall_s, other.kept_s, other.lost_s) == (0.0, 0.0, 0.0)


def test_run_without_attempts_has_no_time_use() -> None:
    assert attempt_times([]) == []
