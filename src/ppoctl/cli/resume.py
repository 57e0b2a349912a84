"""`ppoctl resume`: print what will be restored, reused, replayed and run, and continue the run."""

from typing import TYPE_CHECKING, Annotated

import typer

from ppoctl.cli import render, summary
from ppoctl.cli.long_command import engine_ahead, working
from ppoctl.cli.options import (
    Chain,
    Force,
    JsonOption,
    On,
    Quiet,
    RunArgument,
    Sets,
    TakeOver,
    TestOnly,
    Verbose,
    open_run,
)
from ppoctl.cli.submission import Submission
from ppoctl.core.activity import loading
from ppoctl.core.errors import RecipeError, as_typed, quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppoctl.recipe.schema import Recipe
    from ppoctl.show.report.expectations import RunResult
    from ppoctl.store.recorded_run import RecordedRun
    from ppoctl.store.resume_plan import ResumePlan
    from ppoctl.store.run_paths import RunPaths

AllowMissing = Annotated[
    bool,
    typer.Option(
        "--allow-missing",
        help="Move damaged artifacts, and artifacts that depend on them, to discarded/, and recompute them.",
    ),
]
BackTo = Annotated[
    int | None,
    typer.Option("--back-to", metavar="STEP", help="Continue from this saved step; move later steps to discarded/."),
]


def resume(
    run: RunArgument,
    sets: Sets = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print what a resume would do, and exit.")] = False,
    allow_missing: AllowMissing = False,
    save_only: Annotated[
        bool,
        typer.Option(
            "--save-only",
            help="Save the newest states again, loadable by any parallel layout, and stop without training.",
        ),
    ] = False,
    rollout_only: Annotated[
        bool, typer.Option("--rollout-only", help="Generate and score the rollouts of the next step, and stop.")
    ] = False,
    back_to: BackTo = None,
    take_over: TakeOver = False,
    on: On = "here",
    test_only: TestOnly = False,
    chain: Chain = 1,
    force: Force = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    json: JsonOption = False,
) -> int | None:
    """Resume a run from the point where it stopped. Changed keys (--set) apply from the first step without a
    rollout."""
    recorded = open_run(run)
    if plan:
        _show_plan(recorded, sets or (), allow_missing=allow_missing, as_json=json)
        return None
    if on == "slurm":
        _discard_before_job(recorded, back_to, allow_missing=allow_missing, take_over=take_over)
        submission = Submission(test_only=test_only, chain=chain, as_json=json, force=force)
        submission.run_again(recorded, sets or (), rollout_only=rollout_only, save_only=save_only)
        return None
    with working(as_typed("resume", [run], sets or ()), verbose=verbose, quiet=quiet) as (screen, gate):
        if (code := _finished_job_code(recorded.paths)) is not None:
            return code
        has_request = sets or back_to is not None or allow_missing or save_only or rollout_only
        ended = None if has_request else _result_if_done(recorded)
        if ended is None:
            _require_idle(recorded.paths, take_over=take_over)
            recorded.refresh()  # another attempt may have changed the run until now
            table = _repaired_plan(recorded, back_to, allow_missing=allow_missing)
            _print(recorded, table, to_stderr=True)
            with engine_ahead(_resumable(recorded, sets or (), force=force)):
                with loading("libraries"):
                    from ppoctl.run import run_commands

                only: run_commands.RunUntil | None = "save" if save_only else "rollout" if rollout_only else None
                ended = run_commands.resume(recorded, table, sets or (), gate, only=only, screen=screen)
    # The JSON object is printed after the screen is closed: until then, libraries may write to stdout.
    (summary.print_rollout if rollout_only else summary.print_summary)(ended, as_json=json)
    return None


def _resumable(run: "RecordedRun", sets: "Sequence[str]", *, force: bool) -> "Recipe":
    from ppoctl.run.startable import resumable

    return resumable(run, sets, render.messages(), force=force)


def _discard_before_job(run: "RecordedRun", back_to: int | None, *, allow_missing: bool, take_over: bool) -> None:
    """Apply `--back-to` and `--allow-missing` before the job is submitted: a requeued job would apply them again.

    Raises RecipeError for an option that a job cannot have.
    """
    if take_over:
        raise RecipeError(
            "`--take-over` cannot be used with a job, which waits in the queue",
            hint=f"ppoctl stop {quoted(run.paths.root)}",
        )
    if back_to is not None or allow_missing:
        _require_idle(run.paths)
        _repaired_plan(run, back_to, allow_missing=allow_missing)


def _finished_job_code(paths: "RunPaths") -> int | None:
    """Return the exit code of a job that has nothing to do. None: there is something to do, or this is not a job."""
    from ppoctl.start.slurm.allocation import allocation
    from ppoctl.start.slurm.job_start import register_start

    job = allocation()
    code = None if job is None else register_start(paths, job)
    if code is not None:
        render.print_stderr(f"the previous job ended with exit code {code}: nothing is left to do")
    return code


def _require_idle(paths: "RunPaths", *, take_over: bool = False) -> None:
    from ppoctl.start.slurm.run_status import require_idle

    if not take_over:
        require_idle(paths)


def _result_if_done(run: "RecordedRun") -> "RunResult | None":
    """If all steps of the run are done, print a note and return the result; otherwise return None.

    Raises StorageError if artifacts of the run are missing or corrupt.
    """
    from ppoctl.run.run_recipe import is_edited, newest_recorded
    from ppoctl.show.report.expectations import RunResult, check_expectations
    from ppoctl.store.jobs import longer_command
    from ppoctl.store.liveness import EARLY_END, attempts
    from ppoctl.store.resume_plan import plan_resume

    paths = run.paths
    newest = next(reversed(attempts(run.lines)), None)
    if newest is None or newest["status"] not in ("finished", "unmet"):
        return None
    if is_edited(run):
        return None
    plan_resume(run).require_intact(paths)
    recipe = newest_recorded(run)
    early = newest.get(EARLY_END)
    done = "all steps are done" if early is None else f"`[until]` ended the run, {early}"
    # An unmet run ends with an error whose hint is the same command.
    command = longer_command(paths.root, recipe.steps, ended_early=early is not None)
    more = f"; more steps: {command}" if newest["status"] == "finished" else ""
    render.print_stderr(f"{done}: nothing is left to do{more}")
    return RunResult(paths, run.lines, check_expectations(recipe.expect, run.lines), early)


def _repaired_plan(run: "RecordedRun", back_to: int | None, *, allow_missing: bool) -> "ResumePlan":
    """Apply `--back-to` and `--allow-missing`, and return a resume plan without missing or corrupt artifacts.

    Raises StorageError if such artifacts remain.
    """
    from ppoctl.store.discard import repair, roll_back
    from ppoctl.store.resume_plan import plan_resume

    table, done = plan_resume(run), list[str]()
    if back_to is not None:
        table, done = roll_back(run, back_to)
    if allow_missing:
        table, repairs = repair(run, table)
        done += repairs
    table.require_intact(run.paths)
    for text in done:
        render.print_stderr(text)
    return table


def _show_plan(run: "RecordedRun", sets: "Sequence[str]", *, allow_missing: bool, as_json: bool) -> None:
    """Print what a resume would do. Raises StorageError if artifacts of the run are missing or corrupt."""
    from ppoctl.store.resume_plan import plan_resume

    table = plan_resume(run)
    _print_plan(run, table, sets, as_json=as_json)
    if not allow_missing:
        table.require_intact(run.paths)


def _print_plan(run: "RecordedRun", table: "ResumePlan", sets: "Sequence[str]", *, as_json: bool) -> None:
    """Print what a resume would do, including the recipe keys that it would change."""
    from ppoctl.run import changed_settings
    from ppoctl.run.run_recipe import recipe_of

    change = changed_settings.change(run, recipe_of(run, sets)) if sets else None
    to_come = _to_come(table, change.steps if change else changed_settings.last_step(run))
    if as_json:
        items = [{"item": item.name, "action": item.action, "note": item.note} for item in table.items]
        keys = [{"key": key, "from": old, "to": new} for key, old, new in change.keys] if change else []
        changes = {"changes_from": change.from_step if change else None, "changes": keys} if sets else {}
        span = [*to_come[:1], *to_come[-1:]]
        kept = [{"step": step, "stage": stage, "samples": number} for step, stage, number in table.finished]
        plan = {"from_step": table.start, "items": items, "notes": list(table.notes), "steps_to_come": span}
        plan["finished_samples"] = kept
        render.json({**plan, **changes})
        return
    _print(run, table, to_stderr=False)
    if to_come:
        render.line(f"  {'step' if len(to_come) == 1 else 'steps'} {_span(to_come)}  run")
    for step, stage, number in table.finished:
        if change is None or change.from_step is None or step < change.from_step:
            render.line(f"  {_reused(run, step, stage, number)}")
    for line in change.lines() if change else ["--set changes nothing"] if sets else []:
        render.line(f"  {line}")


def _to_come(table: "ResumePlan", steps: int) -> range:
    """Return the steps that have not been started."""
    begun = max((int(item.name.split("/")[1]) for item in table.items if item.name.startswith("steps/")), default=0)
    return range(max(begun, table.start) + 1, steps + 1)


def _reused(run: "RecordedRun", step: int, stage: str, number: int) -> str:
    from ppoctl.run.run_recipe import rows_of

    rows = rows_of(run, step, stage)
    return f"{number}{'' if rows is None else f' of {rows}'} samples of `{stage}` of step {step} reused"


def _span(steps: range) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def _print(run: "RecordedRun", table: "ResumePlan", *, to_stderr: bool) -> None:
    source = f"the states saved at step {table.start}" if table.start else "the model source"
    lines = [f"{run.paths.root.resolve().name}: continues from {source}"]
    width = max((len(item.name) for item in table.items), default=0)
    lines += [
        f"  {item.name.ljust(width)}  {': '.join(filter(None, (item.action, item.note)))}" for item in table.items
    ]
    lines += [f"note: {note}" for note in table.notes]
    for text in lines:
        (render.print_stderr if to_stderr else render.line)(text)
