"""Records of the jobs that were submitted for a run."""

from pathlib import Path

import pytest

from ppoctl.core.errors import CorruptArtifactError, StorageError
from ppoctl.store.jobs import (
    JobRecord,
    ScriptEnd,
    Start,
    ends,
    jobs,
    last_end,
    record,
    resume_command,
    started,
    starts,
)
from ppoctl.store.run_paths import RunPaths


def test_run_that_was_never_submitted_has_no_jobs(paths: RunPaths) -> None:
    assert jobs(paths) == []
    assert ends(paths, "7") == []


def test_jobs_are_read_back_oldest_first(paths: RunPaths) -> None:
    chain = [JobRecord("10", 5.0, "resume", after="9", restarts_max=3), JobRecord("9", 5.0, "resume")]
    first = JobRecord("4711", 1.5, "rollout", restarts_max=100)
    for job in (*chain, first):
        record(paths, job)
    assert jobs(paths) == [first, chain[1], chain[0]]


def test_recording_a_job_again_replaces_its_record(paths: RunPaths) -> None:
    record(paths, JobRecord("9", 5.0, "resume"))
    record(paths, JobRecord("9", 6.0, "resume"))
    assert jobs(paths) == [JobRecord("9", 6.0, "resume")]


def test_other_files_in_the_jobs_folder_are_ignored(paths: RunPaths) -> None:
    record(paths, JobRecord("9", 5.0, "resume"))
    paths.job_script("9").write_text("#!/bin/bash\n")
    paths.job_ended("9").write_text("0 0 7\n")
    (paths.jobs / "10.json.77.tmp").write_text("{")
    assert [job.id for job in jobs(paths)] == ["9"]


@pytest.mark.parametrize("text", ["{", '{"id": "9"}', "\udcff"])
def test_error_names_damaged_job_record(paths: RunPaths, text: str) -> None:
    record(paths, JobRecord("9", 5.0, "resume"))
    paths.job("9").write_text(text, "utf-8", errors="surrogateescape")
    with pytest.raises(CorruptArtifactError, match=r"jobs/9\.json` is corrupt") as raised:
        jobs(paths)
    assert raised.value.hint is not None
    assert raised.value.hint.endswith(f"rm {paths.job('9')}")


def test_unwritable_jobs_folder_raises_storage_error(paths: RunPaths, tmp_path: Path) -> None:
    paths.jobs.write_text("in the way")
    with pytest.raises(StorageError, match="jobs"):
        record(paths, JobRecord("9", 5.0, "resume"))
    with pytest.raises(StorageError, match="jobs"):
        jobs(paths)


def test_job_ends_skip_torn_and_invalid_lines(paths: RunPaths) -> None:
    record(paths, JobRecord("9", 5.0, "resume"))
    paths.job_ended("9").write_text("0 75 100 USR1\nnonsense\n1 137 200 -\n2 0 30")
    assert ends(paths, "9") == [ScriptEnd(0, 75, 100.0, "USR1"), ScriptEnd(1, 137, 200.0)]


def test_last_end_ignores_late_lines_of_earlier_starts(paths: RunPaths) -> None:
    """A superseded attempt behind a cut network ends after the job has started again elsewhere."""
    record(paths, JobRecord("9", 5.0, "resume"))
    paths.job_ended("9").write_text("1 75 200 USR1\n0 8 300 -\n")
    found = ends(paths, "9")
    assert last_end(found, began=[]) == last_end(found, began=[0, 1]) == ScriptEnd(1, 75, 200.0, "USR1")
    assert last_end(found, began=[0, 1, 2]) is None
    assert last_end([], began=[]) is None


def test_resume_command_keeps_the_slurm_option(paths: RunPaths) -> None:
    assert resume_command(paths.root) == f"ppoctl resume {paths.root}"
    record(paths, JobRecord("9", 5.0, "resume"))
    assert resume_command(paths.root) == f"ppoctl resume {paths.root} --on slurm"


def test_starts_of_a_job_are_recorded_in_order(paths: RunPaths) -> None:
    record(paths, JobRecord("9", 5.0, "resume"))
    assert starts(paths, "9") == []
    first, second = Start(0, 17, 100.0, 60.0), Start(1, 18, 200.0, 0.0)
    for start in (first, second):
        started(paths, "9", start)
    assert starts(paths, "9") == [first, second]
