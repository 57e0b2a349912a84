"""Runs as rows of a list: what each is doing, how far it is, its last figures and its size; Slurm is asked once for
all of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppoctl.slurm.run_state import RunFacts, RunState, SlurmSnapshot
    from ppoctl.store.journal import JournalLine

BROKEN = "broken"
"""State of a run that cannot be read."""

SHOWN_OF_A_SET = ("pass_at_1", "score_mean", "greedy_pass_at_1", "greedy_score_mean")
"""The figure by which an evaluation set is told: the first of these that it has."""


@dataclass(frozen=True)
class Listed:
    """What a list says of one run. Of one that is broken only its size and its age are known."""

    run: Path
    state: str
    """A word of `ppoctl status`, or `broken`."""
    says: str
    bytes: int
    written_at: float
    """Time of its last journal line, in unix seconds."""
    steps_done: int | None = None
    steps_planned: int | None = None
    reward: float | None = None
    evaluation: dict[str, float] = field(default_factory=dict)
    """One figure of each evaluation set, from its last evaluation."""
    evaluation_step: int | None = None
    host: str | None = None
    """Where the attempt is at work; None: none is."""
    pid: int | None = None
    job: str | None = None
    """Slurm's number of the job that is at work or waits."""
    may_be_at_work: bool = False
    """Whether nobody here can tell that it is not: Slurm is silent about its jobs, or its attempt is on another host
    and has not been silent for too long."""

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "name": self.run.name, "run": str(self.run)}

    @property
    def steps(self) -> str:
        return "-" if self.steps_planned is None else f"{self.steps_done}/{self.steps_planned}"

    @property
    def evaluated(self) -> str:
        """The last evaluation in words."""
        return ", ".join(f"{name} {value:.4g}" for name, value in self.evaluation.items()) or "-"

    @property
    def where(self) -> str:
        """Host and process of the attempt at work, and the job."""
        process = None if self.host is None else f"{self.host}:{self.pid}"
        return ", ".join(filter(None, [process, self.job and f"job {self.job}"])) or "-"


@dataclass(frozen=True)
class _Read:
    """What the folder of a run says."""

    facts: "RunFacts"
    lines: "Sequence[JournalLine]"


def listed(runs: Iterable[Path], wait_s: float | None = None) -> tuple[list[Listed], str | None]:
    """The runs as rows, and why Slurm says nothing of their jobs; None: it answered, or was not asked. It has
    `wait_s` seconds to answer; None: its default."""
    import time

    from ppoctl.errors import PpoctlError
    from ppoctl.slurm import run_status
    from ppoctl.slurm.run_state import run_state

    found: list[tuple[Path, _Read | str]] = []
    for run in runs:
        try:
            found.append((run, _read(run)))
        except PpoctlError as error:
            found.append((run, error.message))
        except OSError as error:
            found.append((run, f"`{error.filename}`: {(error.strerror or str(error)).lower()}"))
    told = run_status.ask(run_status.slurm(wait_s), [read.facts for _, read in found if isinstance(read, _Read)])
    rows = []
    for run, read in found:
        if isinstance(read, str):
            rows.append(Listed(run, BROKEN, read, _size(run), _touched_at(run)))
        else:
            state = run_state(read.facts, told, now=time.time())
            rows.append(_row(run, read, state, told))
    return rows, told.no_answer_reason


def _read(run: Path) -> _Read:
    from ppoctl.slurm import run_status
    from ppoctl.store.journal import read_newest
    from ppoctl.store.run_paths import RunPaths

    paths = RunPaths(run)
    lines = read_newest(paths.journal)
    return _Read(run_status.facts(paths, lines), lines)


def _row(run: Path, read: _Read, state: "RunState", told: "SlurmSnapshot") -> Listed:
    from ppoctl import metric_registry
    from ppoctl.slurm.run_state import AT_WORK, DONE, WAITING
    from ppoctl.store.outline import EVAL

    stages = [line for line in read.lines if "stage" in line]
    reward = metric_registry.REWARD_SCORE_MEAN.name
    rewards = [line["figures"][reward] for line in stages if reward in line["figures"]]
    evaluation: JournalLine = next((line for line in reversed(stages) if line["stage"] == EVAL), {})
    attempt = read.facts.newest if state.word in {*AT_WORK, "unknown"} else None
    at_work = {} if attempt is None or "exit_code" in attempt else attempt
    in_queue = (
        [*(job.id for job in told.waiting(read.facts)), *read.facts.job_ids[-1:]] if state.word in WAITING else []
    )
    unheard = told.no_answer_reason is not None and state.word not in DONE and bool(read.facts.open_jobs)
    return Listed(
        run=run,
        state=state.word,
        says=state.description,
        bytes=_size(run),
        written_at=read.lines[-1]["at"] if read.lines else _touched_at(run),
        steps_done=read.facts.steps_done,
        steps_planned=read.facts.steps_planned,
        reward=rewards[-1] if rewards else None,
        evaluation=_by_set(evaluation.get("figures", {})),
        evaluation_step=evaluation.get("step"),
        host=at_work.get("host"),
        pid=at_work.get("pid"),
        job=at_work.get("job") or next(iter(in_queue), None),
        may_be_at_work=unheard or (state.word == "unknown" and read.facts.quiet_s <= read.facts.patience_s),
    )


def _by_set(figures: dict[str, float]) -> dict[str, float]:
    from ppoctl.metric_registry import eval_set

    sets = dict.fromkeys(filter(None, map(eval_set, figures)))
    names = {each: [name for of in SHOWN_OF_A_SET if (name := f"eval/{each}/{of}") in figures] for each in sets}
    return {each: figures[found[0]] for each, found in names.items() if found}


def _size(run: Path) -> int:
    from ppoctl.store.disk import size_of

    return size_of(run)


def _touched_at(run: Path) -> float:
    """When a run that says no time of its own was written to."""
    from ppoctl.store.run_paths import RunPaths

    paths = RunPaths(run)
    there = next((path for path in (paths.journal, paths.run_json) if path.exists()), run)
    return there.stat().st_mtime
