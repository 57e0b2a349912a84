"""`ppoctl resume`: continue a run, after saying what will be restored, recalled, replayed and run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppoctl.cli import ending, preflight, render
from ppoctl.cli.options import Force, Json, Run, Sets, Verbose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppoctl.store.resume_plan import ResumePlan


def resume(
    run: Run,
    sets: Sets = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the table and stop.")] = False,
    allow_missing: Annotated[
        bool,
        typer.Option("--allow-missing", help="Set aside what depends on missing or corrupt items; make it again."),
    ] = False,
    save_only: Annotated[
        bool,
        typer.Option("--save-only", help="Save the newest states again, for any layout, and stop; train nothing."),
    ] = False,
    force: Force = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Continue a run from any instant. Changed keys (--set) hold from the first step that has no rollout yet."""
    from ppoctl.store import run_dir
    from ppoctl.store.layout import RunLayout
    from ppoctl.store.resume_plan import plan_resume

    run_dir.facts(RunLayout(run))
    table = plan_resume(RunLayout(run))
    if plan:
        _tell_plan(run, table, sets or (), as_json=json)
        return
    _print(run, table, to_stderr=True)
    from ppoctl.recipe.load import load

    preflight.require_room(load([RunLayout(run).recipe_toml], sets or (), environ={}).recipe, run, force=force)
    from ppoctl.wire import commands

    ended = commands.resume(run, sets or (), allow_missing=allow_missing, save_only=save_only, verbose=verbose)
    ending.tell(ended, as_json=json)


def _tell_plan(run: Path, table: "ResumePlan", sets: "Sequence[str]", *, as_json: bool) -> None:
    """What would be done, with the keys that would change."""
    changes: dict[str, int | None] = {}
    if sets:
        from ppoctl.wire import commands

        changes["changes_from"] = commands.planned_change(run, sets)
    if as_json:
        items = [{"item": item.name, "action": item.action, "note": item.note} for item in table.items]
        render.json({"from_step": table.start, "items": items, **changes})
        return
    _print(run, table, to_stderr=False)
    for step in changes.values():
        render.line("  --set changes nothing" if step is None else f"  what --set changes holds from step {step}")


def _print(run: Path, table: "ResumePlan", *, to_stderr: bool) -> None:
    source = f"the states saved at step {table.start}" if table.start else "the model source"
    lines = [f"{run.resolve().name}: goes on from {source}"]
    width = max((len(item.name) for item in table.items), default=0)
    lines += [f"  {item.name.ljust(width)}  {item.action}" for item in table.items]
    for text in lines:
        if to_stderr:
            render.say(text)
        else:
            render.line(text)
