"""A stage in a thread of its own: a cancelled thread ends, its error and its record reach the main thread."""

import threading
from typing import Any, cast

import pytest

from ppoctl.core.batch.records import Record
from ppoctl.core.measured import MEASUREMENTS, Measured
from ppoctl.core.ports import Gate
from ppoctl.store.parallel_run import ParallelRun


class Open:
    """A gate that never closes."""

    def between(self) -> None:
        pass


def running(work: Any, committed: list[tuple[Any, Measured]]) -> ParallelRun:
    found = ParallelRun(
        work,
        lambda record, measured, seconds: committed.append((record, measured)),
        lambda: cast(Gate, Open()),
        lambda done, total, tokens: None,
    )
    found.start()
    return found


def test_cancelled_thread_ends_at_its_gate() -> None:
    began, ended, committed = threading.Event(), threading.Event(), list[tuple[Any, Measured]]()

    def work(gate: Gate, _: Any) -> Record[Any]:
        began.set()
        try:
            while True:
                gate.between()
        finally:
            ended.set()

    stage = running(work, committed)
    assert began.wait(20)
    stage.cancel()
    assert ended.is_set()
    assert committed == []


def test_record_and_measurements_of_the_thread_are_committed_once() -> None:
    """The main thread has measured a move, which belongs to another stage."""
    record, committed = cast(Any, object()), list[tuple[Any, Measured]]()
    MEASUREMENTS.take()
    with MEASUREMENTS.moving():
        pass

    def work(_: Gate, __: Any) -> Record[Any]:
        with MEASUREMENTS.transfer():
            pass
        return cast(Record[Any], record)

    stage = running(work, committed)
    stage.finish()
    ((found, measured),) = committed
    assert found is record
    assert measured.transfer_s > 0 == measured.moved_s
    assert MEASUREMENTS.take().moved_s > 0


def test_error_of_the_thread_is_raised_at_each_look() -> None:
    committed: list[tuple[Any, Measured]] = []

    def work(_: Gate, __: Any) -> Record[Any]:
        raise ValueError("lost")

    stage = running(work, committed)
    for look in (stage.finish, stage.raise_error):
        with pytest.raises(ValueError, match="lost"):
            look()
    assert committed == []
