"""Jobs of a cluster that were submitted for a run, and how their scripts ended: what the run itself knows when nobody
else does. Light."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ppoctl.batch.sealed_json import seal, unseal
from ppoctl.errors import CorruptArtifactError, quoted
from ppoctl.store.artifact import write_atomically
from ppoctl.store.disk import storage_error
from ppoctl.store.run_paths import RunPaths


@dataclass(frozen=True)
class JobRecord:
    """One job, as it was submitted."""

    id: str
    """Slurm's number of it."""
    submitted_at: float
    """Time of the submission, in unix seconds."""
    command: str
    """What its script does with the run: `resume` or `rollout`."""
    after: str | None = None
    """Id of the job that it waits for, in a chain; None: it waits for none."""
    restarts_max: int = 0
    """Most times that it goes back into the queue."""


@dataclass(frozen=True)
class ScriptEnd:
    """One end of a job's script, as the script wrote it down."""

    restart: int
    """How often the job had gone back into the queue before."""
    code: int
    """Exit code of the command."""
    at: float
    """Time, in unix seconds."""
    signal: str = ""
    """Signal that the script got last, `USR1` or `TERM`; empty: none."""


@dataclass(frozen=True)
class Start:
    """One start of a job on its run."""

    restart: int
    """How often the job had gone back into the queue before."""
    progress: int
    """A number that grows with all that is committed."""
    at: float
    """Time, in unix seconds."""
    limit_s: float
    """Seconds that there were until the time limit; 0: not known, or none."""


def record(paths: RunPaths, job: JobRecord) -> None:
    """Write down that a job was submitted for the run. Raises StorageError."""
    try:
        paths.jobs.mkdir(exist_ok=True)
    except OSError as error:
        raise storage_error(paths.jobs, error) from error
    write_atomically(paths.job(job.id), seal(asdict(job), indent=1).encode("ascii"))


def resume_command(run: Path) -> str:
    """What to type to go on with the run where it ran before: as a job, if one was submitted for it, or may have
    been."""
    paths = RunPaths(run)
    return f"ppoctl resume {quoted(run)}" + (" --on slurm" if paths.jobs.is_dir() else "")


def jobs(paths: RunPaths) -> list[JobRecord]:
    """The jobs that were submitted for the run, oldest first. Raises CorruptArtifactError naming a file that is not
    as it was written, StorageError where they cannot be read."""
    try:
        files = [path for path in paths.jobs.iterdir() if path.suffix == ".json"]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error(paths.jobs, error, doing="read") from error
    # The ids of one cluster rise: they tell what one second of a clock does not.
    return sorted(map(_read, files), key=lambda job: (job.submitted_at, len(job.id), job.id))


def ends(paths: RunPaths, id: str) -> list[ScriptEnd]:
    """Every end of the job's script, in the order of its restarts: behind a cut network an old one is written late.
    None where it wrote none. Lines that are not whole do not count. Raises StorageError where they cannot be read."""
    lines = _lines(paths.job_ended(id), r"(\d+) (\d+) (\d+) (\S+)")
    found = [ScriptEnd(int(restart), int(code), float(at), signal.strip("-")) for restart, code, at, signal in lines]
    return sorted(found, key=lambda end: end.restart)


def last_end(ends: Sequence[ScriptEnd], began: Iterable[int]) -> ScriptEnd | None:
    """How the job ended when it ran last: one of its `ends`, in the order of restarts, where `began` has the restarts
    that are known to have begun. None: it runs, or its script was killed before it could say."""
    return ends[-1] if ends and ends[-1].restart >= max(began, default=0) else None


def started(paths: RunPaths, id: str, start: Start) -> None:
    """Write down that a job starts to work on the run. Raises StorageError."""
    path = paths.job_started(id)
    try:
        with path.open("a", encoding="ascii") as file:
            file.write(f"{start.restart} {start.progress} {start.at:.0f} {start.limit_s:.0f}\n")
    except OSError as error:
        raise storage_error(path, error) from error


def starts(paths: RunPaths, id: str) -> list[Start]:
    """Every start of the job on the run, oldest first. Raises StorageError where they cannot be read."""
    found = _lines(paths.job_started(id), r"(\d+) (\d+) (\d+) (\d+)")
    return [Start(int(restart), int(progress), float(at), float(limit)) for restart, progress, at, limit in found]


def _lines(path: Path, pattern: str) -> Iterator[tuple[str, ...]]:
    """The words of every whole line that is as it was written."""
    try:
        text = path.read_text("ascii", errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error(path, error, doing="read") from error
    for line in text.split("\n")[:-1]:
        if found := re.fullmatch(pattern, line):
            yield found.groups()


def _read(path: Path) -> JobRecord:
    hint = f"see whether the job is over (squeue --me); then do without its record: rm {quoted(path)}"
    try:
        return JobRecord(**unseal(path.read_bytes().decode("ascii")))
    except OSError as error:
        raise storage_error(path, error, doing="read") from error
    except (ValueError, TypeError) as error:
        raise CorruptArtifactError(f"`{path}` is corrupt: {error}", hint=hint) from error
