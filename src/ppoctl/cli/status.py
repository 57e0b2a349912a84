"""`ppoctl status`: the state of a run, read from the files of the run and from Slurm's data on its jobs.

The command works on a login node, and on any other machine that can read the run directory.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppoctl.cli import render
from ppoctl.cli.options import JsonOption, RunArgument, Wait, open_run
from ppoctl.cli.summary import EXPECTED, expected_row, key_figures
from ppoctl.core.errors import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppoctl.start.slurm.run_state import RunFacts, SlurmSnapshot
    from ppoctl.store.recorded_run import RecordedRun
    from ppoctl.store.time_use import AttemptTime


SHOWN_ATTEMPTS = 8
"""Number of newest attempts whose time use is printed. `--json` prints the time use of all attempts."""


def status(run: RunArgument, wait: Wait = None, json: JsonOption = False) -> None:
    """Show the state of a run. Prints jobs, steps done, saved steps, attempts and their time use, and the stages and
    metrics of the last complete step."""
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
        render.table(*_time_use(report["spent"]))
    if report["stages"]:
        render.line()
        _print_stages(report)
    if report["waits"]:
        render.line()
        _print_waits(report["waits"])
    if report["figures"]:
        render.line()
        _print_metrics(run, report)
    if report["expect"]:
        render.line()
        render.table([expected_row(result) for result in report["expect"]], EXPECTED)
    _print_next_command(run, report)


def _print_stages(report: dict[str, Any]) -> None:
    """Print where the last complete step spent its time."""
    from ppoctl.show.report.stage_table import StageRow, table

    headers, cells = table([StageRow(**row) for row in report["stages"]])
    render.table(cells, (f"stages of step {report['steps_done']}", *headers))


def _print_waits(found: dict[str, Any]) -> None:
    """Print who worked and who waited in the last complete step."""
    from ppoctl.show.report import waiting_bars
    from ppoctl.show.report.who_waited import StepWaits

    waits = StepWaits.from_json(found)
    render.table(*waiting_bars.rows(waits, render.width()))
    render.line(waiting_bars.legend(waits))
    if advice := waiting_bars.longer_side([waits]):
        render.prose(advice)


def _print_metrics(run: Path, report: dict[str, Any]) -> None:
    """Print the key metrics, and the command that prints all other metrics, which would not fit on a screen."""
    metrics = report["figures"]
    shown = key_figures(metrics).values()
    render.table([(name, f"{metrics[name]:.4g}") for name in shown], (f"step {report['steps_done']}", "value"))
    if further := len(metrics) - len(shown):
        render.line(f"and {further} more: ppoctl status {quoted(run)} --json")


def _time_use(spent: "Sequence[dict[str, Any]]") -> tuple[list[tuple[object, ...]], tuple[str, ...]]:
    """Return rows and headers with the time use of the newest attempts and of all attempts together.

    If GPUs were used, the rows include GPU-hours.
    """
    from ppoctl.core.clock import duration

    total = {key: sum(times[key] for times in spent) for key in spent[0] if key != "attempt"}
    rows = [*spent[-SHOWN_ATTEMPTS:]] + ([{"attempt": "all", **total}] if len(spent) > 1 else [])
    on_gpus = total["kept_gpu_hours"] + total["lost_gpu_hours"] > 0

    def cells(row: dict[str, Any]) -> tuple[object, ...]:
        times = tuple(duration(row[key]) for key in ("wall_s", "kept_s", "starting_s", "lost_s"))
        gpu_hours = (f"{row['kept_gpu_hours']:.3g}", f"{row['lost_gpu_hours']:.3g}") if on_gpus else ()
        return (str(row["attempt"]), *times, *gpu_hours)

    headers = ("attempt", "took", "kept", "starting", "lost")
    return [cells(row) for row in rows], (*headers, *(("GPU-hours kept", "lost") if on_gpus else ()))


def _of_job(job: dict[str, Any]) -> str:
    if job["state"]:
        return f"{job['id']} {job['state'].lower()}"
    return f"{job['id']} ended with {job['ends'][-1]['exit_code']}" if job["ends"] else f"{job['id']} unknown"


def _print_next_command(run: Path, report: dict[str, Any]) -> None:
    from ppoctl.start.slurm.run_state import AT_WORK, WAITING
    from ppoctl.store.jobs import resume_command

    if report["state"] in ("unknown", "submitted") and report["slurm_silent"]:
        render.print_stderr(f"try again, with more time for Slurm: ppoctl status {quoted(run)} --wait 20")
    elif report["state"] in {*AT_WORK, *WAITING}:
        if report["jobs"]:
            render.print_stderr(f"stop it: ppoctl stop {quoted(run)}")
    elif report["state"] == "unmet":
        render.print_stderr(f"train longer: {resume_command(run)} --set steps={2 * report['steps_planned']}")
    elif report["state"] != "finished":
        render.print_stderr(f"continue: {resume_command(run)}")


def read_status(run: Path, wait_s: float | None = None) -> dict[str, Any]:
    """Return the object that `status --json` prints.

    `wait_s` is the timeout for Slurm in seconds; None means the default timeout.
    """
    from ppoctl.core.step_metrics import of_step
    from ppoctl.show.report.stage_table import stage_rows
    from ppoctl.show.report.who_waited import step_waits
    from ppoctl.start.slurm import run_status
    from ppoctl.start.slurm.run_state import attempts_as_known, run_state
    from ppoctl.store.time_use import attempt_times

    recorded = open_run(run)
    lines = recorded.lines
    facts = run_status.facts(recorded, lines)
    snapshot = run_status.ask(run_status.slurm(wait_s), [facts])
    state = run_state(facts, snapshot, now=time.time())
    stages = [line for line in lines if "stage" in line]
    last = max(stages, key=lambda line: line["seq"], default=None)
    of_last_step = [line for line in lines if line.get("step") == facts.steps_done]
    metrics = of_step(of_last_step)
    waits = step_waits(lines, facts.steps_done) if facts.steps_done else None
    names = dict.fromkeys(line["stage"].partition(".")[0] for line in of_last_step if "stage" in line)
    return {
        "name": recorded.facts["name"],
        "state": state.word,
        "says": state.description,
        "steps_done": facts.steps_done,
        "steps_planned": facts.steps_planned,
        "last_stage": None if last is None else f"{last['stage']} of step {last['step']} ({last['seconds']:.1f} s)",
        "saved_steps": recorded.saved_steps,
        "attempts": attempts_as_known(facts, snapshot),
        "spent": [_as_json(times) for times in attempt_times(lines)],
        "jobs": _jobs(facts, snapshot),
        "slurm_silent": snapshot.no_answer_reason,
        "stages": [vars(row) for row in stage_rows(names, recorded.outlines.roles, metrics)],
        "waits": None if waits is None else waits.as_json(),
        "figures": metrics,
        "expect": _expectation_results(recorded) if state.word in ("finished", "unmet") else [],
    }


def _as_json(times: "AttemptTime") -> dict[str, Any]:
    return {**vars(times), "kept_gpu_hours": times.kept_gpu_hours, "lost_gpu_hours": times.lost_gpu_hours}


def _jobs(facts: "RunFacts", snapshot: "SlurmSnapshot") -> list[dict[str, Any]]:
    """Return the jobs that were submitted for the run, oldest first, with Slurm's data on each."""
    after = {job.id: job.after for job in facts.jobs}
    rows = []
    for id in facts.job_ids:
        job = snapshot.jobs.get(id)
        ends = [{"restart": end.restart, "exit_code": end.code, "at": end.at} for end in facts.ends.get(id, ())]
        fields = {} if job is None else {key: value for key, value in vars(job).items() if key != "id"}
        rows.append({"id": id, "state": None, "after": after.get(id), "ends": ends, **fields})
    return rows


def _expectation_results(run: "RecordedRun") -> list[dict[str, Any]]:
    """Return the results of `[expect]`. Call it only when all steps are done: earlier values are not final."""
    expect = run.recipe["expect"]
    if not expect:
        return []
    from ppoctl.recipe.schema import Expectation
    from ppoctl.show.report.expectations import check_expectations

    wanted = {name: Expectation.model_validate(bounds) for name, bounds in expect.items()}
    return [vars(result) for result in check_expectations(wanted, run.lines)]
