"""`ppoctl status`: the state of a run, from its own files and from what Slurm says of its jobs; answers on a login
node, and on any machine that sees the folder."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppoctl.cli import render
from ppoctl.cli.options import JsonOption, RunArgument, Wait
from ppoctl.cli.summary import EXPECTED, expected_row, key_figures
from ppoctl.errors import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppoctl.slurm.run_state import RunFacts, SlurmSnapshot
    from ppoctl.store.journal import JournalLine
    from ppoctl.store.run_paths import RunPaths
    from ppoctl.store.time_use import AttemptTime


SHOWN_ATTEMPTS = 8
"""Newest attempts of which the hours are printed; `--json` has all."""


def status(run: RunArgument, wait: Wait = None, json: JsonOption = False) -> None:
    """Show what a run is doing. Its job in the queue or at work, steps done, the last figures, attempts and how they
    ended, and saved steps to go on from."""
    report = read_status(run, wait)
    if json:
        render.json(report)
        return
    render.heading(f"{report['name']}: {report['state']}")
    render.prose(render.printable(report["says"]))
    render.line()
    rows = [
        ("steps", f"{report['steps_done']} of {report['steps_planned']}"),
        ("last stage", report["last_stage"] or "none yet"),
        ("saved steps", ", ".join(map(str, report["saved_steps"])) or "none yet"),
        ("attempts", ", ".join(f"{a['attempt']} {a['status']}" for a in report["attempts"]) or "none"),
    ]
    if report["jobs"]:
        rows.append(("jobs", ", ".join(_of_job(job) for job in report["jobs"])))
    render.table(rows)
    if report["spent"]:
        render.line()
        render.table(*_hours(report["spent"]))
    if report["figures"]:
        render.line()
        _print_figures(run, report)
    if report["expect"]:
        render.line()
        render.table([expected_row(verdict) for verdict in report["expect"]], EXPECTED)
    _say_what_to_type(run, report)


def _print_figures(run: Path, report: dict[str, Any]) -> None:
    """Print the figures by which a run is told, and where the others are: they would be longer than a screen."""
    figures = report["figures"]
    shown = key_figures(figures).values()
    render.table([(name, f"{figures[name]:.4g}") for name in shown], (f"step {report['steps_done']}", "value"))
    if further := len(figures) - len(shown):
        render.line(f"and {further} more: ppoctl status {quoted(run)} --json")


def _hours(spent: "Sequence[dict[str, Any]]") -> tuple[list[tuple[object, ...]], tuple[str, ...]]:
    """Rows and headers of what became of the time of the newest attempts, and of all; GPU-hours where there are
    GPUs."""
    from ppoctl.clock import duration

    whole = {key: sum(each[key] for each in spent) for key in spent[0] if key != "attempt"}
    rows = [*spent[-SHOWN_ATTEMPTS:]] + ([{"attempt": "all", **whole}] if len(spent) > 1 else [])
    on_gpus = whole["kept_gpu_hours"] + whole["lost_gpu_hours"] > 0

    def cells(each: dict[str, Any]) -> tuple[object, ...]:
        times = tuple(duration(each[key]) for key in ("wall_s", "kept_s", "starting_s", "lost_s"))
        gpu_hours = (f"{each['kept_gpu_hours']:.3g}", f"{each['lost_gpu_hours']:.3g}") if on_gpus else ()
        return (str(each["attempt"]), *times, *gpu_hours)

    headers = ("attempt", "took", "kept", "starting", "lost")
    return [cells(each) for each in rows], (*headers, *(("GPU-hours kept", "lost") if on_gpus else ()))


def _of_job(job: dict[str, Any]) -> str:
    if job["state"]:
        return f"{job['id']} {job['state'].lower()}"
    return f"{job['id']} ended with {job['ends'][-1]['exit_code']}" if job["ends"] else f"{job['id']} unknown"


def _say_what_to_type(run: Path, report: dict[str, Any]) -> None:
    from ppoctl.slurm.run_state import AT_WORK, WAITING
    from ppoctl.store.jobs import resume_command

    if report["state"] in ("unknown", "submitted") and report["slurm_silent"]:
        render.print_stderr(f"ask again, with more time for Slurm: ppoctl status {quoted(run)} --wait 20")
    elif report["state"] in {*AT_WORK, *WAITING}:
        if report["jobs"]:
            render.print_stderr(f"stop it: ppoctl stop {quoted(run)}")
    elif report["state"] == "unmet":
        render.print_stderr(f"train longer: {resume_command(run)} --set steps={2 * report['steps_planned']}")
    elif report["state"] != "finished":
        render.print_stderr(f"continue: {resume_command(run)}")


def read_status(run: Path, wait_s: float | None = None) -> dict[str, Any]:
    """Object that `status --json` prints. Slurm has `wait_s` seconds to answer; None: its default."""
    from ppoctl.metric_registry import reported
    from ppoctl.slurm import run_status
    from ppoctl.slurm.run_state import attempts_as_known, run_state
    from ppoctl.store import run_dir
    from ppoctl.store.journal import read_lines
    from ppoctl.store.outline import outlines_of
    from ppoctl.store.retention import saved_steps
    from ppoctl.store.run_paths import RunPaths
    from ppoctl.store.time_use import attempt_times

    paths = RunPaths(run)
    known = run_dir.facts(paths)
    lines = read_lines(paths.journal)
    facts = run_status.facts(paths, lines)
    told = run_status.ask(run_status.slurm(wait_s), [facts])
    state = run_state(facts, told, now=time.time())
    stages = [line for line in lines if "stage" in line]
    last = max(stages, key=lambda line: line["seq"], default=None)
    return {
        "name": known["name"],
        "state": state.word,
        "says": state.description,
        "steps_done": facts.steps_done,
        "steps_planned": facts.steps_planned,
        "last_stage": None if last is None else f"{last['stage']} of step {last['step']} ({last['seconds']:.1f} s)",
        "saved_steps": saved_steps(paths, outlines_of(paths).roles),
        "attempts": attempts_as_known(facts, told),
        "spent": [_as_json(each) for each in attempt_times(lines)],
        "jobs": _jobs(facts, told),
        "slurm_silent": told.no_answer_reason,
        "figures": {k: v for line in stages if line["step"] == facts.steps_done for k, v in reported(line).items()},
        "expect": _verdicts(paths, lines) if state.word in ("finished", "unmet") else [],
    }


def _as_json(each: "AttemptTime") -> dict[str, Any]:
    return {**vars(each), "kept_gpu_hours": each.kept_gpu_hours, "lost_gpu_hours": each.lost_gpu_hours}


def _jobs(facts: "RunFacts", told: "SlurmSnapshot") -> list[dict[str, Any]]:
    """What was submitted for the run, oldest first, with what Slurm says of it."""
    after = {job.id: job.after for job in facts.jobs}
    found = []
    for id in facts.job_ids:
        job = told.jobs.get(id)
        ends = [{"restart": end.restart, "exit_code": end.code, "at": end.at} for end in facts.ends.get(id, ())]
        said = {} if job is None else {key: value for key, value in vars(job).items() if key != "id"}
        found.append({"id": id, "state": None, "after": after.get(id), "ends": ends, **said})
    return found


def _verdicts(paths: "RunPaths", lines: "Sequence[JournalLine]") -> list[dict[str, Any]]:
    """A contract is judged when all steps are done; before that its figures are only on their way."""
    from ppoctl.store.run_dir import recipes

    asked = recipes(paths)
    expect = asked[max(asked)]["expect"]
    if not expect:
        return []
    from ppoctl.loop.expectations import check_expectations
    from ppoctl.recipe.schema import Expectation

    wanted = {name: Expectation.model_validate(bounds) for name, bounds in expect.items()}
    return [vars(verdict) for verdict in check_expectations(wanted, lines)]
