"""`ppoctl track --rebuild`: send everything to MLflow that it lacks of a run."""

from typing import Annotated

import typer

from ppoctl.cli import render
from ppoctl.cli.options import Json, Run
from ppoctl.errors import RecipeError, quoted


def track(
    run: Run,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Send everything that MLflow lacks.")] = False,
    json: Json = False,
) -> None:
    """Send everything to MLflow that it lacks of a run; the journal is the truth, MLflow is its mirror. Running this
    twice sends files again and nothing else."""
    if not rebuild:
        raise RecipeError("nothing to do", hint=f"ppoctl track --rebuild {quoted(run)}")
    from ppoctl.recipe.load import from_resolved
    from ppoctl.recipe.schema import MlflowTracking
    from ppoctl.store import run_dir
    from ppoctl.store.layout import RunLayout
    from ppoctl.tracking.mirror import rebuild as send

    layout = RunLayout(run)
    run_dir.facts(layout)
    recipes = run_dir.recipes(layout)
    tracking = from_resolved(recipes[max(recipes)]).tracking
    if not isinstance(tracking, MlflowTracking):
        raise RecipeError(
            f'run `{run}` has `tracking.kind = "none"`',
            hint=f"ppoctl resume {quoted(run)} --set tracking.kind=mlflow",
        )
    sent = send(run, tracking)
    if json:
        render.json(vars(sent))
    else:
        render.table([(name, value) for name, value in vars(sent).items()], ("sent", ""))
