"""`ppoctl stop`: end a run in order, wherever it is at work or waits."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ppoctl.cli import render
from ppoctl.cli.options import JsonOption, RunArgument, Wait
from ppoctl.errors import SlurmError, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ppoctl.slurm.run_state import RunState
    from ppoctl.slurm.stopping import Stopped

_WHEN = {
    "stage": "when its present stage is done",
    "step": "when its present step is done",
    "now": "now: its present stage is lost, but for finished samples",
}


def stop(
    run: RunArgument,
    after: Annotated[
        Literal["stage", "step", "now"], typer.Option("--after", help="What it may still finish; now: nothing.")
    ] = "stage",
    wait: Wait = None,
    json: JsonOption = False,
) -> None:
    """Stop a run in order, here or in a job. Everything finished stays, and `resume` goes on from it. Jobs of the
    run that wait are cancelled."""
    from ppoctl.slurm import run_status, stopping
    from ppoctl.slurm.run_state import run_state
    from ppoctl.store import run_dir
    from ppoctl.store.run_paths import RunPaths

    paths = RunPaths(run)
    run_dir.facts(paths)
    done = stopping.stop(paths, after, run_status.slurm(wait))
    state = run_state(done.facts, done.snapshot, now=time.time())
    says = list(_says(run, after, done, state))
    if json:
        asked = None if done.asked is None else done.asked["attempt"]
        facts = {"asked": asked, "after": after, "signalled": done.signalled, "cancelled": list(done.cancelled)}
        render.json({"run": str(run), "state": state.word, **facts, "says": says})
    else:
        for text in says:
            render.line(render.printable(text))
    if done.unheard:
        jobs = " ".join(done.unheard)
        raise SlurmError(
            f"whether Slurm still has job {jobs.replace(' ', ', ')} of this run is unknown, and none was cancelled: "
            f"{done.snapshot.no_answer_reason}",
            hint=f"on a login node: ppoctl stop {quoted(run)} --wait 20",
        )


def _says(run: Path, after: str, done: "Stopped", state: "RunState") -> "Iterator[str]":
    """What was done, what will happen, and how to see it, a sentence each."""
    from ppoctl.store.jobs import resume_command

    if done.asked is not None:
        yield f"attempt {done.asked['attempt']} {_where(done)} is asked to stop {_WHEN[after]}"
        if done.signalled is not None:
            yield f"job {done.signalled} was told as well (TERM)"
        if state.word == "hung":
            yield f"but {state.description}; if it does not end: {_by_force(done)}"
        if state.word == "suspended":
            yield f"but {state.description}; it ends when it goes on: scontrol resume {done.job}"
    for id in done.cancelled:
        yield f"job {id} is cancelled"
    if done.asked is not None:
        yield f"it ends with exit code 130; see it: ppoctl status {quoted(run)}"
    if done.asked is not None or done.cancelled:
        yield f"go on later: {resume_command(run)}"
    elif not done.unheard:
        yield f"nothing of it is at work or waits: {state.word}, {state.description}"


def _where(done: "Stopped") -> str:
    assert done.asked is not None
    if done.job is not None:
        return f"in job {done.job} on {done.asked['host']}"
    if done.asked["status"] == "running":
        return f"(process {done.asked['pid']} here)"
    return f"on {done.asked['host']}, if it is still there,"


def _by_force(done: "Stopped") -> str:
    assert done.asked is not None
    return f"kill -9 {done.asked['pid']}" if done.job is None else f"scancel {done.job}"
