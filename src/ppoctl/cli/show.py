"""`ppoctl show`: one sample of a step with prompt, response, reward, and each token's advantage."""

import json as json_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppoctl.cli import render
from ppoctl.cli.options import Json, Run
from ppoctl.errors import RecipeError, quoted

if TYPE_CHECKING:
    from ppoctl.store.layout import RunLayout
    from ppoctl.wire.samples import ShownSample


def show(
    run: Run,
    step: Annotated[int | None, typer.Option("--step", help="PPO step; default: the last with rollouts.")] = None,
    sample: Annotated[int, typer.Option("--sample", help="Row of the step, from 0.")] = 0,
    worst: Annotated[bool, typer.Option("--worst", help="The sample with the lowest reward.")] = False,
    best: Annotated[bool, typer.Option("--best", help="The sample with the highest reward.")] = False,
    manifest: Annotated[bool, typer.Option("--manifest", help="Print the manifests of the step instead.")] = False,
    json: Json = False,
) -> None:
    """Look at what was generated, what it scored, and each token's advantage (green up, red down)."""
    from ppoctl.store import run_dir
    from ppoctl.store.layout import RunLayout

    layout = RunLayout(run)
    run_dir.facts(layout)
    step = _last_step(layout) if step is None else step
    if manifest:
        render.json({"step": step, "manifests": _manifests(layout, step)})
        return
    from ppoctl.wire.samples import read_sample

    found = read_sample(layout, step, "worst" if worst else "best" if best else sample)
    if json:
        render.json(vars(found))
    else:
        _print(found)


def _print(found: "ShownSample") -> None:
    rows = [
        (
            "sample",
            render.printable(f"{found.row} of step {found.step}: {found.prompt_id} #{found.sample}, {found.stamp}"),
        ),
        ("finish", f"{found.finish} after {len(found.tokens)} tokens"),
        ("answer", render.printable(found.answer.splitlines()[-1] if found.answer else "")),
        ("reward", f"{found.outcome} {found.score:g}" if found.score is not None else f"{found.outcome}, no score"),
    ]
    render.table(rows)
    render.line()
    render.heading("prompt")
    render.line(render.printable(found.prompt))
    render.line()
    render.heading("response")
    pieces = [render.printable(piece) for piece in found.pieces]
    render.line(render.weighted(pieces, found.advantages or [0.0] * len(pieces)))
    if found.advantages:
        render.line()
        values = ["-"] * len(pieces) if found.values is None else [f"{value:+.3f}" for value in found.values]
        columns = zip(found.pieces, found.advantages, values, found.logprobs, strict=False)
        table = [(json_module.dumps(p), f"{a:+.3f}", v, f"{lp:.3f}") for p, a, v, lp in columns]
        render.table(table, ("token", "advantage", "value", "log-prob"))


def _last_step(layout: "RunLayout") -> int:
    from ppoctl.store import manifest as manifests

    steps = [s for s in layout.committed_steps() if manifests.read(layout.stage(s, "rollout")) is not None]
    if not steps:
        raise RecipeError(f"run `{layout.root}` has no rollouts yet", hint=f"ppoctl status {quoted(layout.root)}")
    return steps[-1]


def _manifests(layout: "RunLayout", step: int) -> dict[str, Any]:
    from dataclasses import asdict

    from ppoctl.store import manifest as manifests
    from ppoctl.store.outline import EVAL, outlines_of

    names = (*outlines_of(layout).at(step).names, EVAL)
    found = {stage: manifests.read(layout.stage(step, stage)) for stage in names}
    shown = {stage: asdict(item) for stage, item in found.items() if item is not None}
    if not shown:
        raise RecipeError(f"step {step} of `{layout.root}` has no artifacts", hint=f"ls {quoted(layout.steps)}")
    return shown
