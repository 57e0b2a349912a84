"""`ppoctl track`: upload the parts of a run that MLflow does not have yet."""

from ppoctl.cli import render
from ppoctl.cli.options import JsonOption, RunArgument, Sets, open_run
from ppoctl.core.errors import RecipeError, quoted


def track(run: RunArgument, sets: Sets = None, json: JsonOption = False) -> None:
    """Upload the parts of a run that MLflow does not have yet. A second call uploads only the files again. `--set`
    changes keys of `tracking` for this call."""
    from ppoctl.recipe.tracking_table import MlflowTracking
    from ppoctl.run.mlflow_extras import around
    from ppoctl.run.run_recipe import newest_recorded, recipe_of
    from ppoctl.show.tracking.mirror import rebuild as send

    recorded = open_run(run)
    tracking = (recipe_of(recorded, sets) if sets else newest_recorded(recorded)).tracking
    if not isinstance(tracking, MlflowTracking):
        raise RecipeError(
            f'run `{run}` has `tracking.kind = "none"`',
            hint=f"ppoctl track {quoted(run)} --set tracking.kind=mlflow",
        )
    sent = send(run, tracking, around(recorded.paths, render.print_stderr))
    if json:
        render.json(vars(sent))
    else:
        render.table([(name, value) for name, value in vars(sent).items() if value], ("sent", ""))
