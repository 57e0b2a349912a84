"""Rows of `ppoctl runs`: state, steps, last metrics and size of each run. Slurm is queried once for all runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppoctl.start.slurm.run_state import RunFacts, RunState, SlurmSnapshot
    from ppoctl.store.journal import JournalLine

BROKEN = "broken"
"""State that is listed for a run that cannot be read."""

SHOWN_OF_A_SET = ("pass_at_1", "score_mean", "greedy_pass_at_1", "greedy_score_mean")
"""Metrics of an evaluation set, by priority. The list shows the first metric that the set has."""


@dataclass(frozen=True)
class Listed:
    """One run in the list. For a broken run, only size and age are known."""

    run: Path
    state: str
    """State as printed by `ppoctl status`, or `broken`."""
    says: str
    bytes: int
    written_at: float
    """Time of the last journal line, in Unix seconds."""
    steps_done: int | None = None
    steps_planned: int | None = None
    reward: float | None = None
    evaluation: dict[str, float] = field(default_factory=dict)
    """One metric of each evaluation set, from the last evaluation."""
    evaluation_step: int | None = None
    host: str | None = None
    """Host of the running attempt; None if no attempt is running."""
    pid: int | None = None
    job: str | None = None
    """Slurm's id of the running or pending job."""
    may_be_at_work: bool = False
    """Whether the run may be running: Slurm does not answer about the jobs of the run, or the newest attempt is on
    another host and wrote to the journal recently."""

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "name": self.run.name, "run": str(self.run)}

    @property
    def steps(self) -> str:
        return "-" if self.steps_planned is None else f"{self.steps_done}/{self.steps_planned}"

    @property
    def evaluated(self) -> str:
        """Values of the last evaluation as text: `NAME VALUE, ...`."""
        return ", ".join(f"{name} {value:.4g}" for name, value in self.evaluation.items()) or "-"

    @property
    def where(self) -> str:
        """Host and process id of the running attempt, and the id of the job."""
        process = None if self.host is None else f"{self.host}:{self.pid}"
        return ", ".join(filter(None, [process, self.job and f"job {self.job}"])) or "-"


@dataclass(frozen=True)
class _Read:
    """Facts and newest journal lines of a run directory."""

    facts: "RunFacts"
    lines: "Sequence[JournalLine]"


def listed(runs: Iterable[Path], wait_s: float | None = None) -> tuple[list[Listed], str | None]:
    """Return the runs as rows, and the reason why Slurm did not answer about their jobs.

    The reason is None if Slurm answered or was not queried. `wait_s` is the timeout for Slurm in seconds; None means
    the default timeout.
    """
    import time

    from ppoctl.core.errors import PpoctlError
    from ppoctl.start.slurm import run_status
    from ppoctl.start.slurm.run_state import run_state
    from ppoctl.store.disk_errors import size_of

    results: list[tuple[Path, _Read | str]] = []
    for run in runs:
        try:
            results.append((run, _read(run)))
        except PpoctlError as error:
            results.append((run, error.message))
        except OSError as error:
            results.append((run, f"`{error.filename}`: {(error.strerror or str(error)).lower()}"))
    snapshot = run_status.ask(
        run_status.slurm(wait_s), [read.facts for _, read in results if isinstance(read, _Read)]
    )
    rows = []
    for run, read in results:
        if isinstance(read, str):
            rows.append(Listed(run, BROKEN, read, size_of(run), _touched_at(run)))
        else:
            state = run_state(read.facts, snapshot, now=time.time())
            rows.append(_row(run, read, state, snapshot))
    return rows, snapshot.no_answer_reason


def _read(run: Path) -> _Read:
    from ppoctl.start.slurm import run_status
    from ppoctl.store.journal import read_newest
    from ppoctl.store.recorded_run import RecordedRun
    from ppoctl.store.run_paths import RunPaths

    recorded = RecordedRun(RunPaths(run))
    lines = read_newest(recorded.paths.journal)
    return _Read(run_status.facts(recorded, lines), lines)


def _row(run: Path, read: _Read, state: "RunState", snapshot: "SlurmSnapshot") -> Listed:
    from ppoctl.core import metric_registry
    from ppoctl.start.slurm.run_state import AT_WORK, DONE, WAITING
    from ppoctl.store.disk_errors import size_of
    from ppoctl.store.outline import EVAL

    stages = [line for line in read.lines if "stage" in line]
    reward = metric_registry.REWARD_SCORE_MEAN.name
    rewards = [line["figures"][reward] for line in stages if reward in line["figures"]]
    evaluation: JournalLine = next((line for line in reversed(stages) if line["stage"] == EVAL), {})
    attempt = read.facts.newest if state.word in {*AT_WORK, "unknown"} else None
    running = {} if attempt is None or "exit_code" in attempt else attempt
    in_queue = (
        [*(job.id for job in snapshot.waiting(read.facts)), *read.facts.job_ids[-1:]] if state.word in WAITING else []
    )
    unanswered = snapshot.no_answer_reason is not None and state.word not in DONE and bool(read.facts.open_jobs)
    return Listed(
        run=run,
        state=state.word,
        says=state.description,
        bytes=size_of(run),
        written_at=read.lines[-1]["at"] if read.lines else _touched_at(run),
        steps_done=read.facts.steps_done,
        steps_planned=read.facts.steps_planned,
        reward=rewards[-1] if rewards else None,
        evaluation=_by_set(evaluation.get("figures", {})),
        evaluation_step=evaluation.get("step"),
        host=running.get("host"),
        pid=running.get("pid"),
        job=running.get("job") or next(iter(in_queue), None),
        may_be_at_work=unanswered or (state.word == "unknown" and read.facts.quiet_s <= read.facts.patience_s),
    )


def _by_set(metrics: dict[str, float]) -> dict[str, float]:
    from ppoctl.core.metric_registry import eval_set

    sets = dict.fromkeys(filter(None, map(eval_set, metrics)))
    names = {
        set_name: [name for suffix in SHOWN_OF_A_SET if (name := f"eval/{set_name}/{suffix}") in metrics]
        for set_name in sets
    }
    return {set_name: metrics[present[0]] for set_name, present in names.items() if present}


def _touched_at(run: Path) -> float:
    """Return the time, in Unix seconds, at which a run without journal lines was last written to."""
    from ppoctl.store.run_paths import RunPaths

    paths = RunPaths(run)
    newest = next((path for path in (paths.journal, paths.run_json) if path.exists()), run)
    return newest.stat().st_mtime
