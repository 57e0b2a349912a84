"""Slurm jobs that were submitted for a run, and how their scripts ended. Imports no torch.

The record remains in the run directory even if Slurm no longer has the job.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ppoctl.core.batch.sealed_json import seal, unseal
from ppoctl.core.errors import CorruptArtifactError, quoted
from ppoctl.store.artifact import write_atomically
from ppoctl.store.disk_errors import storage_error
from ppoctl.store.run_paths import RunPaths


@dataclass(frozen=True)
class JobRecord:
    """A job as it was submitted."""

    id: str
    """Slurm's job id."""
    submitted_at: float
    """Time of the submission, in unix seconds."""
    command: str
    """Command that the script runs: `resume` or `rollout`."""
    after: str | None = None
    """Id of the job that this job waits for in a chain; None: it waits for no job."""
    restarts_max: int = 0
    """Largest number of requeues."""


@dataclass(frozen=True)
class ScriptEnd:
    """One end of a job's script, as the script recorded it."""

    restart: int
    """Number of requeues of the job before this end."""
    code: int
    """Exit code of the command."""
    at: float
    """Time, in unix seconds."""
    signal: str = ""
    """Last signal that the script received, `USR1` or `TERM`; empty: no signal."""


@dataclass(frozen=True)
class Start:
    """One start of a job on its run."""

    restart: int
    """Number of requeues of the job before this start."""
    progress: int
    """Progress of the run before this start: a number that grows with every commit."""
    at: float
    """Time, in unix seconds."""
    limit_s: float
    """Seconds until the time limit; 0: not known, or no time limit."""


def record(paths: RunPaths, job: JobRecord) -> None:
    """Record that a job was submitted for the run. Raises StorageError."""
    try:
        paths.jobs.mkdir(exist_ok=True)
    except OSError as error:
        raise storage_error(paths.jobs, error) from error
    write_atomically(paths.job(job.id), seal(asdict(job), indent=1).encode("ascii"))


def resume_command(run: Path) -> str:
    """Return the command that resumes the run: as a Slurm job if a job was or may have been submitted."""
    paths = RunPaths(run)
    return f"ppoctl resume {quoted(run)}" + (" --on slurm" if paths.jobs.is_dir() else "")


def longer_command(root: Path, steps: int, *, ended_early: bool) -> str:
    """Return the command that continues a finished run: with twice its steps or, if `[until]` ended the run, without
    that table."""
    return f"{resume_command(root)} --set " + ("until={}" if ended_early else f"steps={2 * steps}")


def jobs(paths: RunPaths) -> list[JobRecord]:
    """Return the jobs that were submitted for the run, oldest first.

    Raises CorruptArtifactError naming a file that was changed after it was written; StorageError if a file cannot be
    read.
    """
    try:
        files = [path for path in paths.jobs.iterdir() if path.suffix == ".json"]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error(paths.jobs, error, doing="read") from error
    # The ids of a cluster rise, so they order jobs that were submitted in the same second.
    return sorted(map(_read, files), key=lambda job: (job.submitted_at, len(job.id), job.id))


def ends(paths: RunPaths, id: str) -> list[ScriptEnd]:
    """Return every recorded end of the job's script, in the order of restarts; incomplete lines are ignored.

    The lines are sorted because a node that was cut off from the network may write its line late. Raises StorageError
    if the file cannot be read.
    """
    lines = _lines(paths.job_ended(id), r"(\d+) (\d+) (\d+) (\S+)")
    recorded = [
        ScriptEnd(int(restart), int(code), float(at), signal.strip("-")) for restart, code, at, signal in lines
    ]
    return sorted(recorded, key=lambda end: end.restart)


def last_end(ends: Sequence[ScriptEnd], began: Iterable[int]) -> ScriptEnd | None:
    """Return the end of the job's last run. `ends` has the recorded ends in the order of restarts.

    `began` has the restarts that are known to have started. None: the job runs, or its script was killed before it
    recorded an end.
    """
    return ends[-1] if ends and ends[-1].restart >= max(began, default=0) else None


def started(paths: RunPaths, id: str, start: Start) -> None:
    """Record that a job starts to work on the run. Raises StorageError."""
    path = paths.job_started(id)
    try:
        with path.open("a", encoding="ascii") as file:
            file.write(f"{start.restart} {start.progress} {start.at:.0f} {start.limit_s:.0f}\n")
    except OSError as error:
        raise storage_error(path, error) from error


def starts(paths: RunPaths, id: str) -> list[Start]:
    """Return every start of the job on the run, oldest first. Raises StorageError if the file cannot be read."""
    lines = _lines(paths.job_started(id), r"(\d+) (\d+) (\d+) (\d+)")
    return [Start(int(restart), int(progress), float(at), float(limit)) for restart, progress, at, limit in lines]


def _lines(path: Path, pattern: str) -> Iterator[tuple[str, ...]]:
    """Yield the fields of every complete line that matches the pattern."""
    try:
        text = path.read_text("ascii", errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error(path, error, doing="read") from error
    for line in text.split("\n")[:-1]:
        if match := re.fullmatch(pattern, line):
            yield match.groups()


def _read(path: Path) -> JobRecord:
    hint = f"check whether the job has ended (squeue --me), then delete its record: rm {quoted(path)}"
    try:
        return JobRecord(**unseal(path.read_bytes().decode("ascii")))
    except OSError as error:
        raise storage_error(path, error, doing="read") from error
    except (ValueError, TypeError) as error:
        raise CorruptArtifactError(f"`{path}` is corrupt: {error}", hint=hint) from error
