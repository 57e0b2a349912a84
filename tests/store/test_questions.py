"""Reading a run twice has the same result twice, and changes nothing in its directory."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fakes.components import FEW_ROWS, fake_recipe
from fakes.job import stop_at
from ppoctl.core.errors import PpoctlError
from ppoctl.run import changed_settings, new_run, run_recipe
from ppoctl.run.wire import sources
from ppoctl.show.diagnose import causes
from ppoctl.show.report.run_reader import read_runs
from ppoctl.start.slurm import run_status
from ppoctl.store import eval_samples, jobs, liveness, retention, run_dir, stop_request
from ppoctl.store.append import intact
from ppoctl.store.compare_ledgers import compare
from ppoctl.store.journal import read_lines
from ppoctl.store.ledger import end_of_blocks
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stored_samples import StepRecords, steps_with_rollouts

TABLES: dict[str, Any] = {"steps": 4, "checkpoint": {"every_steps": 2}, "rollout": FEW_ROWS}
"""A run that saves every second step; its fourth step is killed in the middle of the rollout."""

OF_A_RUN: dict[str, Callable[[RecordedRun], Any]] = {
    "plan of a resume": plan_resume,
    "saved steps": lambda run: run.saved_steps,
    "healthy steps": lambda run: retention.healthy_steps(run.paths, run.outlines.roles),
    "stages of a step": lambda run: run.stages(3),
    "manifests": lambda run: [(run.manifest(1, "rollout"), run.state_manifest("actor", 2), run.is_done(1))],
    "begun": lambda run: run.has_begun(),
    "facts": lambda run: run.facts,
    "newest recipe": lambda run: run.recipe,
    "recorded recipe": run_recipe.newest_recorded,
    "last step": changed_settings.last_step,
    "no change": lambda run: changed_settings.change(run, fake_recipe(**TABLES)),
    "a change": lambda run: changed_settings.change(run, fake_recipe(**{**TABLES, "steps": 6})),
    "clock": sources.clock_of,
    "facts of its state": lambda run: vars(run_status.facts(run, run.lines)) | {"quiet_s": 0.0},
    "samples": lambda run: [
        (step, StepRecords.read(run, step, per_token=False).num_seqs) for step in steps_with_rollouts(run)
    ],
}
QUESTIONS: dict[str, Callable[[RunPaths], Any]] = {
    **{name: lambda paths, ask=ask: ask(RecordedRun(paths)) for name, ask in OF_A_RUN.items()},
    "stop request": lambda paths: [stop_request.stop_requested(paths, number) for number in (1, 2)],
    "jobs": lambda paths: [(job, jobs.ends(paths, job.id), jobs.starts(paths, job.id)) for job in jobs.jobs(paths)],
    "command of a resume": lambda paths: jobs.resume_command(paths.root),
    "attempts": lambda paths: liveness.attempts(intact(paths.journal)),
    "early end": lambda paths: liveness.ended_early(intact(paths.journal)),
    "whether a process works on it": liveness.require_idle,
    "lines of the journal": lambda paths: read_lines(paths.journal),
    "end of the ledger": lambda paths: end_of_blocks(paths.ledger),
    "first free step": lambda paths: run_dir.first_free_step(paths, after=2),
    "taken": new_run.is_taken,
    "replaceable": new_run.is_replaceable,
    "metrics": lambda paths: read_runs([paths.root])[0].series,
    "curves": lambda paths: causes.read(paths.root),
    "samples of its evaluation": lambda paths: eval_samples.read(paths.root),
    "comparison": lambda paths: compare(paths.ledger, paths.ledger),
}  # fmt: skip


@pytest.fixture(scope="module", params=["killed", "first step"])
def paths(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Return a run with a job and a stop request, or a run in its first step without either."""
    root = tmp_path_factory.mktemp("questions") / "run"
    if request.param == "first step":
        return stop_at(root, "1 reward starts", **TABLES)
    found = stop_at(root, "inside rollout after 2 samples", **TABLES)
    jobs.record(found, jobs.JobRecord("9", 5.0, "resume"))
    jobs.started(found, "9", jobs.Start(0, 17, 100.0, 60.0))
    found.job_ended("9").write_text("0 75 100 USR1\n")
    stop_request.request_stop(found, "step")
    return found


def contents(root: Path) -> dict[str, object]:
    """Return the bytes and the time of each file, and None for each folder."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


def answer(question: Callable[[RunPaths], Any], paths: RunPaths) -> Sequence[str]:
    try:
        return ["answer", repr(question(paths))]
    except PpoctlError as error:
        return ["error", error.message]


@pytest.mark.parametrize("name", QUESTIONS)
def test_question_changes_nothing_and_has_the_same_answer_again(paths: RunPaths, name: str) -> None:
    before = contents(paths.root)
    first, second = (answer(QUESTIONS[name], paths) for _ in range(2))
    assert first[0] == "answer", first
    assert first == second
    assert contents(paths.root) == before
