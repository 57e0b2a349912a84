"""`ppoctl status`: the state of a run, from its own files; answers on a login node."""

from pathlib import Path
from typing import Any

from ppoctl.cli import render
from ppoctl.cli.options import Json, Run
from ppoctl.cli.summary import EXPECTED, expected_row
from ppoctl.errors import quoted


def status(run: Run, json: Json = False) -> None:
    """Show steps done, the last figures, attempts and how they ended, and saved steps to go on from."""
    report = read_status(run)
    if json:
        render.json(report)
        return
    render.heading(f"{report['name']}: {report['state']}")
    render.line()
    rows = [
        ("steps", f"{report['steps_done']} of {report['steps_planned']}"),
        ("last stage", report["last_stage"] or "none yet"),
        ("saved steps", ", ".join(map(str, report["saved_steps"])) or "none yet"),
        ("attempts", ", ".join(f"{a['attempt']} {a['status']}" for a in report["attempts"]) or "none"),
    ]
    render.table(rows)
    if report["figures"]:
        render.line()
        shown = [(metric, f"{value:.4g}") for metric, value in sorted(report["figures"].items())]
        render.table(shown, (f"step {report['steps_done']}", "value"))
    if report["expect"]:
        render.line()
        render.table([expected_row(verdict) for verdict in report["expect"]], EXPECTED)
    if report["state"] == "unmet":
        render.say(f"train longer: ppoctl resume {quoted(run)} --set steps={2 * report['steps_planned']}")
    elif report["state"] not in ("running", "finished"):
        render.say(f"continue: ppoctl resume {quoted(run)}")


def read_status(run: Path) -> dict[str, Any]:
    """Object that `status --json` prints."""
    from ppoctl.loop.expectations import judge
    from ppoctl.metrics import reported
    from ppoctl.recipe.schema import Expectation
    from ppoctl.store import run_dir
    from ppoctl.store.alive import attempts as attempts_in
    from ppoctl.store.journal import read_lines
    from ppoctl.store.layout import RunLayout
    from ppoctl.store.outline import outlines_of
    from ppoctl.store.retention import saved_steps

    layout = RunLayout(run)
    facts, outlines = run_dir.facts(layout), outlines_of(layout)
    lines = read_lines(layout.journal)
    stages = [line for line in lines if "stage" in line]
    recipes = run_dir.recipes(layout)
    newest = recipes[max(recipes)]
    done = max((line["step"] for line in stages if line["stage"] == outlines.at(line["step"]).last), default=0)
    last = max(stages, key=lambda line: line["seq"], default=None)
    attempts = attempts_in(lines)
    # A contract is judged when all steps are done; before that its figures are only on their way.
    expect = newest["expect"] if attempts and attempts[-1]["status"] in ("finished", "unmet") else {}
    wanted = {name: Expectation.model_validate(bounds) for name, bounds in expect.items()}
    return {
        "name": facts["name"],
        "state": attempts[-1]["status"] if attempts else "created",
        "steps_done": done,
        "steps_planned": newest["steps"],
        "last_stage": None if last is None else f"{last['stage']} of step {last['step']} ({last['seconds']:.1f} s)",
        "saved_steps": saved_steps(layout, outlines.roles),
        "attempts": attempts,
        "figures": {k: v for line in stages if line["step"] == done for k, v in reported(line).items()},
        "expect": [vars(verdict) for verdict in judge(wanted, lines)],
    }
