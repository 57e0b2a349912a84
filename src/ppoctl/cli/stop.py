"""`ppoctl stop`: stop a run gracefully, on any machine or in a job, and cancel the pending jobs of the run."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ppoctl.cli import render
from ppoctl.cli.options import JsonOption, RunArgument, Wait, open_run
from ppoctl.core.errors import SlurmError, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ppoctl.start.slurm.run_state import RunState
    from ppoctl.start.slurm.stopping import Stopped

_WHEN = {
    "stage": "after the current stage",
    "step": "after the current step",
    "now": "now: of the current stage, only finished samples are kept",
}


def stop(
    run: RunArgument,
    after: Annotated[
        Literal["stage", "step", "now"],
        typer.Option(
            "--after", help="What to finish before the stop: the current stage, the current step, or nothing (now)."
        ),
    ] = "stage",
    wait: Wait = None,
    json: JsonOption = False,
) -> None:
    """Stop a run gracefully, here or in a job. Finished work is kept, and `resume` continues from it. Pending jobs of
    the run are cancelled."""
    from ppoctl.start.slurm import run_status, stopping
    from ppoctl.start.slurm.run_state import run_state

    paths = open_run(run).paths
    done = stopping.stop(paths, after, run_status.slurm(wait))
    state = run_state(done.facts, done.snapshot, now=time.time())
    messages = list(_messages(run, after, done, state))
    if json:
        attempt = None if done.asked is None else done.asked["attempt"]
        facts = {"asked": attempt, "after": after, "signalled": done.signalled, "cancelled": list(done.cancelled)}
        render.json({"run": str(run), "state": state.word, **facts, "says": messages})
    else:
        for text in messages:
            render.line(render.printable(text))
    if done.unheard:
        jobs = " ".join(done.unheard)
        raise SlurmError(
            f"no job was cancelled, because Slurm did not answer about job {jobs.replace(' ', ', ')} of this run: "
            f"{done.snapshot.no_answer_reason}",
            hint=f"on a login node: ppoctl stop {quoted(run)} --wait 20",
        )


def _messages(run: Path, after: str, done: "Stopped", state: "RunState") -> "Iterator[str]":
    """Yield lines that describe the actions that were taken, what will happen next, and how to check it."""
    from ppoctl.store.jobs import resume_command

    if done.asked is not None:
        yield f"attempt {done.asked['attempt']} {_where(done)} will stop {_WHEN[after]}"
        if done.signalled is not None:
            yield f"job {done.signalled} received SIGTERM as well"
        if state.word == "hung":
            yield f"but {state.description}; if it does not end: {_kill_command(done)}"
        if state.word == "suspended":
            yield f"but {state.description}; it ends after it is resumed: scontrol resume {done.job}"
    for id in done.cancelled:
        yield f"job {id} is cancelled"
    if done.asked is not None:
        yield f"it will end with exit code 130; check: ppoctl status {quoted(run)}"
    if done.asked is not None or done.cancelled:
        yield f"continue later: {resume_command(run)}"
    elif not done.unheard:
        yield f"the run is neither running nor pending: {state.word}, {state.description}"


def _where(done: "Stopped") -> str:
    assert done.asked is not None
    if done.job is not None:
        return f"in job {done.job} on {done.asked['host']}"
    if done.asked["status"] == "running":
        return f"(process {done.asked['pid']} here)"
    return f"on {done.asked['host']}, if it is still running,"


def _kill_command(done: "Stopped") -> str:
    assert done.asked is not None
    return f"kill -9 {done.asked['pid']}" if done.job is None else f"scancel {done.job}"
