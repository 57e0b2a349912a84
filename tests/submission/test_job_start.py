"""The start of a job for a run: when it continues, and when it ends at once."""

import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from ppoctl.core.batch.sealed_json import seal
from ppoctl.core.errors import FinishedShortError
from ppoctl.start.slurm.allocation import Allocation
from ppoctl.start.slurm.job_start import MAX_STARTS_WITHOUT_PROGRESS, register_start
from ppoctl.start.slurm.slurm_client import Slurm, SlurmJob
from ppoctl.store.attempt import claim
from ppoctl.store.jobs import JobRecord, Start, jobs, record, started, starts
from ppoctl.store.journal import Journal
from ppoctl.store.run_paths import FORMAT, RunPaths


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    made = RunPaths(tmp_path / "run")
    made.root.mkdir()
    made.journal.touch()
    made.run_json.write_text(seal({"format": FORMAT, "sources": {}}), "utf-8")
    record(made, JobRecord("7", 1.0, "train", None, 5))
    record(made, JobRecord("8", 2.0, "train", "7", 5))
    return made


class Answering(Slurm):
    """Slurm client with the same end for each job."""

    def __init__(self, ends_at: float) -> None:
        super().__init__({})
        self.ends_at = ends_at

    def job(self, id: str) -> SlurmJob:
        return SlurmJob(id, "RUNNING", ends_at=self.ends_at)


def job(id: str, restarts: int = 0, slurm: Slurm | None = None) -> Allocation:
    return Allocation(id, restarts, "node1", 1, "node1", slurm or Slurm({}))


def ended(paths: RunPaths, id: str, *lines: str) -> None:
    paths.job_ended(id).write_text("".join(f"{line}\n" for line in lines))


def test_custom_script_starts_and_is_not_counted(paths: RunPaths) -> None:
    assert register_start(paths, job("9")) is None
    assert starts(paths, "9") == []


@pytest.mark.parametrize(
    ("code", "leaves"),
    [
        *((code, True) for code in (0, 2, 5, 7, 9, 130, 133, 140)),
        *((code, False) for code in (75, 3, 6, 134, 137, 139)),
    ],
)
def test_chained_job_starts_only_if_work_remains(paths: RunPaths, code: int, leaves: bool) -> None:
    ended(paths, "7", "0 75 100 USR1", f"1 {code} 200 -")
    assert register_start(paths, job("8")) == (code if leaves else None)


def test_chained_job_starts_after_a_job_without_an_end_record(paths: RunPaths) -> None:
    """Its node died, or Slurm killed it."""
    assert register_start(paths, job("8")) is None


def test_unrecorded_job_registers_itself(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPOCTL_JOB", "9")  # as its script sets it
    assert register_start(paths, job("9")) is None
    assert [found.id for found in jobs(paths)] == ["7", "8", "9"]


def end(paths: RunPaths, restart: int, *, code: int = 3, signal: str = "-", at: float = 0.0) -> None:
    """Write the end record of job 7's script."""
    with paths.job_ended("7").open("a", encoding="ascii") as file:
        file.write(f"{restart} {code} {at:.0f} {signal}\n")


def test_late_end_of_a_superseded_attempt_does_not_end_the_chain(paths: RunPaths) -> None:
    ended(paths, "7", "1 75 100 USR1", "0 8 200 -")
    assert register_start(paths, job("8")) is None
    for restart in range(3):  # the last of them was killed
        started(paths, "7", Start(restart, 0, 0.0, 0.0))
    ended(paths, "7", "1 0 100 -")
    assert register_start(paths, job("8")) is None


def test_start_is_recorded_with_the_seconds_until_its_time_limit(paths: RunPaths) -> None:
    now = time.time()
    assert register_start(paths, job("7", 2, Answering(now + 600.0))) is None
    [start] = starts(paths, "7")
    assert (start.restart, start.progress, start.at) == (2, 0, pytest.approx(now, abs=2.0))
    assert start.limit_s == pytest.approx(now + 600.0 - start.at, abs=2.0)  # whole seconds


def test_job_stops_after_repeated_starts_without_progress(paths: RunPaths) -> None:
    """Events of attempts do not count as progress."""
    journal = Journal(paths, claim(paths))
    for restart in range(MAX_STARTS_WITHOUT_PROGRESS):
        assert register_start(paths, job("7", restart)) is None
        journal.event("attempt_started", pid=1, host="node1", job="7", restart=restart)
        end(paths, restart)
    with pytest.raises(
        FinishedShortError, match="job 7 started 3 times in a row and committed nothing new"
    ) as raised:
        register_start(paths, job("7", MAX_STARTS_WITHOUT_PROGRESS))
    assert raised.value.hint is not None
    assert raised.value.hint.startswith("find the reason: ppoctl logs ")


@pytest.mark.parametrize("signal", ["TERM", "USR1", None])
def test_starts_ended_by_slurm_do_not_count_as_failures(paths: RunPaths, signal: str | None) -> None:
    """Preempted with or without a warning, or ended by a dead node, which leaves no record."""
    for restart in range(5):
        assert register_start(paths, job("7", restart)) is None
        if signal is not None:
            end(paths, restart, code=75, signal=signal)


@pytest.mark.parametrize(
    ("limit_s", "signal", "at", "counts"),
    [
        (600.0, "USR1", 1301.0, True),
        (600.0, "USR1", 1300.0, False),  # half of the limit: a preemption
        (600.0, "USR1", 1250.0, False),
        (600.0, "TERM", 1500.0, False),
        (0.0, "USR1", 1500.0, False),  # no limit is known
    ],
)
def test_time_limit_too_short_to_start_counts_as_no_progress(
    paths: RunPaths, limit_s: float, signal: str, at: float, counts: bool
) -> None:
    for restart in range(MAX_STARTS_WITHOUT_PROGRESS):
        started(paths, "7", Start(restart, 0, 1000.0, limit_s))
        end(paths, restart, code=75, signal=signal, at=at)
    with pytest.raises(FinishedShortError) if counts else nullcontext():
        register_start(paths, job("7", MAX_STARTS_WITHOUT_PROGRESS))


def test_finished_rollout_samples_count_as_progress(paths: RunPaths) -> None:
    parts = paths.parts(1, "rollout")
    parts.mkdir(parents=True)
    for restart in range(5):
        assert register_start(paths, job("7", restart)) is None
        end(paths, restart)
        (parts / f"{restart}.safetensors").touch()
