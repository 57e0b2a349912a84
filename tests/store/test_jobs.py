"""What a run knows of the jobs that were submitted for it."""

from pathlib import Path

import pytest

from ppoctl.errors import CorruptArtifactError, StorageError
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


def test_run_that_was_never_submitted_has_no_jobs(layout: RunPaths) -> None:
    assert jobs(layout) == []
    assert ends(layout, "7") == []


def test_jobs_are_read_back_oldest_first(layout: RunPaths) -> None:
    chain = [JobRecord("10", 5.0, "resume", after="9", restarts_max=3), JobRecord("9", 5.0, "resume")]
    first = JobRecord("4711", 1.5, "rollout", restarts_max=100)
    for job in (*chain, first):
        record(layout, job)
    assert jobs(layout) == [first, chain[1], chain[0]]


def test_recording_a_job_again_replaces_its_record(layout: RunPaths) -> None:
    record(layout, JobRecord("9", 5.0, "resume"))
    record(layout, JobRecord("9", 6.0, "resume"))
    assert jobs(layout) == [JobRecord("9", 6.0, "resume")]


def test_other_files_in_the_jobs_folder_are_ignored(layout: RunPaths) -> None:
    record(layout, JobRecord("9", 5.0, "resume"))
    layout.job_script("9").write_text("#!/bin/bash\n")
    layout.job_ended("9").write_text("0 0 7\n")
    (layout.jobs / "10.json.77.tmp").write_text("{")
    assert [job.id for job in jobs(layout)] == ["9"]


@pytest.mark.parametrize("text", ["{", '{"id": "9"}', "\udcff"])
def test_damaged_job_record_is_named(layout: RunPaths, text: str) -> None:
    record(layout, JobRecord("9", 5.0, "resume"))
    layout.job("9").write_text(text, "utf-8", errors="surrogateescape")
    with pytest.raises(CorruptArtifactError, match=r"jobs/9\.json` is corrupt") as raised:
        jobs(layout)
    assert raised.value.hint is not None
    assert raised.value.hint.endswith(f"rm {layout.job('9')}")


def test_unwritable_jobs_folder_raises_storage_error(layout: RunPaths, tmp_path: Path) -> None:
    layout.jobs.write_text("in the way")
    with pytest.raises(StorageError, match="jobs"):
        record(layout, JobRecord("9", 5.0, "resume"))
    with pytest.raises(StorageError, match="jobs"):
        jobs(layout)


def test_job_ends_skip_torn_and_invalid_lines(layout: RunPaths) -> None:
    record(layout, JobRecord("9", 5.0, "resume"))
    layout.job_ended("9").write_text("0 75 100 USR1\nnonsense\n1 137 200 -\n2 0 30")
    assert ends(layout, "9") == [ScriptEnd(0, 75, 100.0, "USR1"), ScriptEnd(1, 137, 200.0)]


def test_last_end_ignores_late_lines_of_earlier_starts(layout: RunPaths) -> None:
    """A superseded attempt behind a cut network ends after the job has begun again elsewhere."""
    record(layout, JobRecord("9", 5.0, "resume"))
    layout.job_ended("9").write_text("1 75 200 USR1\n0 8 300 -\n")
    found = ends(layout, "9")
    assert last_end(found, began=[]) == last_end(found, began=[0, 1]) == ScriptEnd(1, 75, 200.0, "USR1")
    assert last_end(found, began=[0, 1, 2]) is None
    assert last_end([], began=[]) is None


def test_resume_command_keeps_the_slurm_option(layout: RunPaths) -> None:
    assert resume_command(layout.root) == f"ppoctl resume {layout.root}"
    record(layout, JobRecord("9", 5.0, "resume"))
    assert resume_command(layout.root) == f"ppoctl resume {layout.root} --on slurm"


def test_starts_of_a_job_are_recorded_in_order(layout: RunPaths) -> None:
    record(layout, JobRecord("9", 5.0, "resume"))
    assert starts(layout, "9") == []
    first, second = Start(0, 17, 100.0, 60.0), Start(1, 18, 200.0, 0.0)
    for start in (first, second):
        started(layout, "9", start)
    assert starts(layout, "9") == [first, second]
