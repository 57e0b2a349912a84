"""The mirror thread: training never waits for it and never fails because of it."""

import multiprocessing
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tracking_lab import SETTINGS, MessageLog, Mlflow, RunDir, journaled_points, num_missing

from ppoctl.core.errors import quoted
from ppoctl.recipe.tracking_table import MlflowTracking
from ppoctl.show.tracking.forwarder import Forwarder
from ppoctl.show.tracking.inputs import DataInput
from ppoctl.show.tracking.mirror import MirrorHooks, MirrorIntervals, MlflowMirror, rebuild
from ppoctl.show.tracking.mlflow_payloads import MOST_OF_TRAINING, Ending, JournalBatch, MetricPoint
from ppoctl.show.tracking.mlflow_run import Address, Marker, MirrorTarget
from ppoctl.store.run_paths import RunPaths

QUICK = MirrorIntervals(poll_s=0.05, first_retry_s=0.01, longest_retry_s=0.02)
DEADLINE_S = 60.0


@dataclass
class FakeTarget:
    """MLflow as a list, with a gate at which it waits, and planned failures."""

    points_sent: list[MetricPoint] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    waiting: threading.Event = field(default_factory=threading.Event)
    failures: int = 0
    opened: int = 0

    def open(self, paths: RunPaths, address: Address) -> MirrorTarget:
        self.opened += 1
        self._pass()
        return self

    def _pass(self) -> None:
        self.waiting.set()
        assert self.gate.wait(DEADLINE_S)
        if self.failures > 0:
            self.failures -= 1
            raise ConnectionError("no answer\nfrom the server")

    def marker(self) -> Marker | None:
        last = [point for point in self.points_sent if point.name == "progress/journal_seq"]
        return Marker(last[-1].step, last[-1].at_ms) if last else None

    def restart(self) -> None:
        raise AssertionError("its journal was not made anew")

    def params(self) -> Mapping[str, str]:
        return {}

    def tags(self) -> Mapping[str, str]:
        return {}

    def send(self, batch: JournalBatch) -> None:
        self._pass()
        self.points_sent.extend(batch.points)

    def describe(self, params: Mapping[str, str], tags: Mapping[str, str]) -> None: ...

    def inputs(self) -> set[str]:
        return set()

    def add_inputs(self, inputs: Sequence[DataInput]) -> None:
        raise AssertionError("its run.json has no data")

    def keep(self, path: str, text: str) -> None:
        self.kept[path] = text

    def status(self) -> str:
        return self.statuses[-1] if self.statuses else "RUNNING"

    def end(self, ending: Ending) -> None:
        self.statuses.append(ending.status)

    @property
    def metrics(self) -> list[tuple[str, int]]:
        return [(p.name, p.step) for p in self.points_sent if not p.name.startswith(("progress/", "time/"))]


def faked(
    run: RunDir,
    target: FakeTarget,
    messages: MessageLog,
    around: MirrorHooks = MirrorHooks(),
    patience: MirrorIntervals = QUICK,
) -> MlflowMirror:
    around = replace(around, notify=messages)
    return MlflowMirror(run.root, SETTINGS, attempt=1, around=around, open_target=target.open, patience=patience)


def mirrored(
    run: RunDir, messages: MessageLog, settings: MlflowTracking = SETTINGS, attempt: int = 1
) -> MlflowMirror:
    mirror = MlflowMirror(run.root, settings, attempt=attempt, around=MirrorHooks(notify=messages), patience=QUICK)
    mirror.start()
    return mirror


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(6000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen within a minute")


@pytest.fixture
def bare(tmp_path: Path) -> RunDir:
    """A run without a database."""
    return RunDir(tmp_path / "runs")


def test_training_continues_while_mlflow_does_not_answer(bare: RunDir, messages: MessageLog) -> None:
    target = FakeTarget()
    mirror = faked(bare, target, messages)
    mirror.start()
    assert target.waiting.wait(DEADLINE_S)  # the thread is inside a call that does not return
    for step in (1, 2):
        bare.step(step)
        mirror.notify()
    assert target.metrics == []
    target.gate.set()
    bare.event("attempt_ended", status="finished")
    assert mirror.close("finished", DEADLINE_S)
    assert len(target.metrics) == len(set(target.metrics)) == 10
    assert target.statuses[-1] == "FINISHED"
    assert messages.lines == []


def test_system_metrics_are_sent_and_their_failures_are_silent(bare: RunDir, messages: MessageLog) -> None:
    target, calls = FakeTarget(), list[int]()
    target.gate.set()

    def gpus() -> Mapping[str, float]:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("GPU is lost")
        return {"gpu_0_utilization_percentage": 87.0}

    bare.step(1)
    mirror = faked(bare, target, messages, MirrorHooks(gpus=gpus), replace(QUICK, measure_s=0.01))
    mirror.start()
    until(lambda: any(point.name == "system/gpu_0_utilization_percentage" for point in target.points_sent))
    bare.step(2)
    assert mirror.close("finished", DEADLINE_S)
    metrics = [name for name, _ in target.metrics if not name.startswith("system/")]
    assert len(metrics) == 10
    assert messages.lines == []


def test_close_stops_at_its_deadline_and_reports_unsent_lines(bare: RunDir, messages: MessageLog) -> None:
    target = FakeTarget()
    mirror = faked(bare, target, messages)
    mirror.start()
    assert target.waiting.wait(DEADLINE_S)
    bare.step(1)
    assert not mirror.close("finished", 0.0)
    assert messages.lines == [f"mlflow: the upload is not complete; send the rest with: ppoctl track {bare.root}"]
    target.gate.set()
    until(lambda: not any(thread.name == "mlflow-mirror" for thread in threading.enumerate()))
    assert messages.lines[1:] == []
    assert target.statuses in ([], ["RUNNING"])


def test_outage_and_recovery_are_each_reported_once(bare: RunDir, messages: MessageLog) -> None:
    target = FakeTarget()
    target.gate.set()
    mirror = faked(bare, target, messages)
    mirror.start()
    bare.step(1)
    mirror.notify()
    until(lambda: len(target.metrics) == 5)
    target.failures = 7
    bare.step(2)
    mirror.notify()
    messages.wait_for(lambda line: "is reachable again" in line)
    assert mirror.close("failed", DEADLINE_S)
    assert len(target.metrics) == len(set(target.metrics)) == 10
    address = f"sqlite:///{bare.root.parent}/mlflow.db"
    assert messages.lines == [
        f"mlflow: cannot upload to `{address}` (no answer); training continues, and the journal keeps everything",
        f"mlflow: `{address}` is reachable again and has everything",
    ]
    assert target.opened > 1
    assert target.statuses[-1] == "FAILED"


def test_mirror_that_was_never_started_is_silent(bare: RunDir, messages: MessageLog) -> None:
    bare.step(1)
    assert not faked(bare, FakeTarget(), messages).close("failed", DEADLINE_S)
    assert messages.lines == []


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "sqlite:////dev/null/mlflow.db", "carrier-pigeon://roof"])
def test_unreachable_mlflow_costs_one_message_and_can_be_rebuilt(
    run: RunDir, runs_dir: Path, mlflow: Mlflow, messages: MessageLog, uri: str
) -> None:
    mirror = mirrored(run, messages, MlflowTracking(kind="mlflow", uri=uri))
    run.step(1)
    mirror.notify()
    messages.wait_for(lambda line: f"cannot upload to `{uri}`" in line)
    run.step(2)
    run.event("attempt_ended", status="stopped", exit_code=5)
    assert not mirror.close("stopped", DEADLINE_S)
    assert len(messages.lines) == 2
    assert messages.lines[1] == (
        f"mlflow: the upload is not complete; send the rest with: ppoctl track {quoted(run.root)}"
    )
    rebuild(run.root, SETTINGS)
    assert mlflow.points() == journaled_points(run.root)
    assert mlflow.run().info.status == "FAILED"


def test_close_reports_waiting_for_mlflow(run: RunDir, messages: MessageLog) -> None:
    target = FakeTarget()
    mirror = faked(run, target, messages, patience=replace(QUICK, silent_s=0.3))
    run.step(1)
    mirror.start()
    assert target.waiting.wait(DEADLINE_S)
    assert not mirror.close("finished", 0.5)
    target.gate.set()
    assert messages.lines == [
        "mlflow: the upload is not complete yet; waiting at most 1 s more",
        f"mlflow: the upload is not complete; send the rest with: ppoctl track {quoted(run.root)}",
    ]


def test_mirror_waits_for_a_locked_database(
    run: RunDir, runs_dir: Path, mlflow: Mlflow, messages: MessageLog
) -> None:
    connection = sqlite3.connect(runs_dir / "mlflow.db", isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    mirror = mirrored(run, messages)
    run.step(1)
    messages.wait_for(lambda line: "database is locked" in line)
    connection.rollback()
    connection.close()
    messages.wait_for(lambda line: "is reachable again" in line)
    assert mirror.close("finished", DEADLINE_S)
    assert mlflow.points() == journaled_points(run.root)


def test_resumes_share_one_mlflow_run_with_the_current_status(
    run: RunDir, mlflow: Mlflow, messages: MessageLog
) -> None:
    seen = []
    endings = {"preempted": "KILLED", "interrupted": "KILLED", "short": "FAILED", "finished": "FINISHED"}
    for attempt, (word, expected) in enumerate(endings.items(), start=1):
        run.append({"event": "attempt_started", "attempt": attempt})
        mirror = mirrored(run, messages, attempt=attempt)
        run.step(attempt)
        mirror.notify()
        until(lambda: len(mlflow.runs()) == 1 and mlflow.run().info.status == "RUNNING")
        run.append({"event": "attempt_ended", "attempt": attempt, "status": word})
        assert mirror.close(word, DEADLINE_S)
        found = mlflow.run()
        assert (found.info.status, found.data.tags["ppoctl.status"]) == (expected, word)
        assert found.data.tags["ppoctl.attempt"] == str(attempt)
        seen.append(found.info.run_id)
    assert len(set(seen)) == 1
    assert mlflow.points() == journaled_points(run.root)
    assert "ppoctl.version.torch" in mlflow.run().data.tags
    assert num_missing(rebuild(run.root, SETTINGS)) == 0
    assert messages.lines == []


def test_metrics_are_sent_even_if_artifacts_cannot_be_stored(
    run: RunDir, runs_dir: Path, mlflow: Mlflow, messages: MessageLog
) -> None:
    (runs_dir / "mlflow-artifacts").write_text("not a folder")
    mirror = mirrored(run, messages)
    run.step(1)
    mirror.notify()
    messages.wait_for(lambda line: "cannot upload" in line)
    run.step(2)
    assert not mirror.close("finished", DEADLINE_S)
    assert "the upload is not complete; send" in messages.lines[-1]
    assert mlflow.points() == journaled_points(run.root)
    assert mlflow.run().info.status == "FINISHED"


def test_superseded_attempt_does_not_change_the_final_status(run: RunDir, messages: MessageLog) -> None:
    """It was suspended, woke up after the next attempt had finished, and found itself superseded."""
    target = FakeTarget()
    target.gate.set()
    run.event("attempt_started")
    sleeper = faked(run, target, messages)
    run.step(1)
    sleeper.start()
    until(lambda: len(target.metrics) == 5)
    run.append({"event": "attempt_started", "attempt": 2})
    run.append({"event": "attempt_ended", "attempt": 2, "status": "finished", "exit_code": 0})
    target.statuses.append("FINISHED")
    run.event("attempt_ended", status="superseded", exit_code=8)
    assert sleeper.close("superseded", DEADLINE_S)
    assert target.statuses[-1] == "FINISHED"


def test_superseded_attempt_does_not_report_a_running_status(run: RunDir, messages: MessageLog) -> None:
    """The newer attempt may have ended before the suspended one reports."""
    target = FakeTarget()
    target.gate.set()
    run.event("attempt_started")
    run.step(1)
    sleepers = [faked(run, target, messages) for _ in range(2)]
    sleepers[0].start()
    until(lambda: target.statuses == ["RUNNING"])
    run.append({"event": "attempt_started", "attempt": 2})
    run.event("attempt_ended", status="superseded", exit_code=8)
    sleepers[1].start()  # it was suspended before it had sent anything
    for sleeper in sleepers:
        assert sleeper.close("superseded", DEADLINE_S)
    assert target.statuses == ["RUNNING"]


def live(runs: Path, ready: int) -> None:
    """Append steps to a run that is mirrored; write a line to this file after the second."""
    run = RunDir(runs)
    around = MirrorHooks(notify=sys.stderr.write)
    mirror = MlflowMirror(run.root, SETTINGS, attempt=1, around=around, patience=MirrorIntervals(poll_s=0.01))
    run.event("attempt_started")
    mirror.start()
    for step in range(1, 10_000):
        run.step(step)
        mirror.notify()
        if step == 2:
            os.write(ready, b"under way\n")
        time.sleep(0.03)


def test_kill_while_mirroring_loses_and_doubles_nothing(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = os.pipe()
    life = multiprocessing.get_context("fork").Process(target=live, args=(runs_dir, theirs))
    life.start()
    os.close(theirs)
    mlflow = Mlflow(runs_dir)  # after the fork, which must not share a connection
    try:
        assert os.read(ours, 20) == b"under way\n"
        until(lambda: bool(mlflow.runs()) and "policy/loss" in mlflow.run().data.metrics)
    finally:
        life.kill()
        life.join()
        os.close(ours)
    assert capfd.readouterr().err == ""
    assert mlflow.run().info.status == "RUNNING"
    root = runs_dir / "demo"
    before = sum(mlflow.points().values())
    sent = rebuild(root, SETTINGS)
    assert before > 0
    assert mlflow.points() == journaled_points(root)
    assert sum(mlflow.points().values()) - before == sent.points
    assert mlflow.run().info.status == "RUNNING"


def test_tracking_import_loads_no_mlflow_or_torch() -> None:
    names = ("health", "view", "console", "mlflow_payloads", "forwarder", "mirror")
    imports = "; ".join(f"import ppoctl.show.tracking.{name}" for name in names)
    heavy = "('mlflow', 'torch', 'sqlalchemy', 'numpy', 'vllm', 'transformers')"
    script = f"import sys; {imports}; sys.exit(str([m for m in {heavy} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr == "[]\n"


def test_tables_are_read_only_for_the_newest_steps(run: RunDir) -> None:
    calls: list[int] = []

    def samples(step: int) -> list[dict[str, Any]]:
        calls.append(step)
        return [{"step": step, "response": "4"}] if step != 60 else []

    target = FakeTarget()
    target.gate.set()
    sender = Forwarder(run.paths, target, samples)
    for step in range(1, 61):
        run.stage(step, "advantages")
    sender.forward()
    sender.keep_files()
    assert calls == list(range(61 - MOST_OF_TRAINING, 61))
    assert target.kept["samples/train-000059.json"] == '{"columns": ["step", "response"], "data": [[59, "4"]]}'
    assert "samples/train-000060.json" not in target.kept, "the step is gone"
