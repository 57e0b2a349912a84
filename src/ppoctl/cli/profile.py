"""`ppoctl profile`: run one step again under torch's profiler."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppoctl.cli import render
from ppoctl.cli.long_command import working
from ppoctl.cli.options import JsonOption, Quiet, RunArgument, open_run
from ppoctl.core.activity import loading
from ppoctl.core.errors import quoted

if TYPE_CHECKING:
    from ppoctl.core.machine.torch_profile import ProcessProfile


def profile(
    run: RunArgument,
    step: Annotated[
        int, typer.Option("--step", metavar="N", help="Step to run again. The states before it must be saved.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="New folder for the traces. Default: RUN/profile/step-N."),
    ] = None,
    quiet: Quiet = False,
    json: JsonOption = False,
) -> None:
    """Run one step again with torch's profiler, and print the ten slowest kernels of each process. Writes a trace of
    each process. The run itself does not change: it continues as if the step had not run again."""
    from ppoctl.start.slurm.run_status import require_idle
    from ppoctl.store.writable_folders import require_new

    recorded = open_run(run)
    folder = recorded.paths.profile(step) if out is None else out
    if out is not None:
        require_new(out, "folder with --out")
    elif folder.exists():
        require_new(folder, "folder with --out")
    typed = f"ppoctl profile {quoted(run)} --step {step}"
    with working(typed, quiet=quiet) as (screen, gate):
        gate.keeps = "a profile is written when the step has ended"
        require_idle(recorded.paths)
        with loading("libraries"):
            from ppoctl.run.profiled_step import profile_step

        profiles = profile_step(recorded, step, folder, gate, screen)
    if json:
        render.json({"step": step, "processes": [_as_json(profile) for profile in profiles]})
    else:
        for process in profiles:
            _print(process)


def _as_json(profile: "ProcessProfile") -> dict[str, object]:
    kernels = [vars(kernel) for kernel in profile.slowest]
    return {**vars(profile), "slowest": kernels, "trace": str(profile.trace)}


def _print(profile: "ProcessProfile") -> None:
    rows = [
        (str(kernel.calls), f"{kernel.ms:.1f}", f"{kernel.ms / profile.ms:.1%}", render.printable(kernel.name)[:80])
        for kernel in profile.slowest
    ]
    render.table(rows, ("calls", "ms", "share", f"{profile.process}, {profile.ms:.0f} ms on {profile.device}"))
    render.line(f"trace: {profile.trace}")
    render.line()
