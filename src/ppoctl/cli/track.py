"""`ppoctl track`: upload the parts of a run that MLflow does not have yet, and write the file for TensorBoard."""

from ppoctl.cli import render
from ppoctl.cli.options import JsonOption, RunArgument, Sets, open_run
from ppoctl.core.errors import RecipeError, quoted


def track(run: RunArgument, sets: Sets = None, json: JsonOption = False) -> None:
    """Upload the parts of a run that MLflow does not have yet. A second call uploads only the files again. With
    `tracking.tensorboard`, write the event file for TensorBoard, too. `--set` changes keys of `tracking` for this
    call."""
    from ppoctl.recipe.tracking_table import MlflowTracking
    from ppoctl.run.mlflow_extras import around
    from ppoctl.run.run_recipe import newest_recorded, recipe_of
    from ppoctl.show.tracking.event_file import write_event_file
    from ppoctl.show.tracking.forwarder import Sent
    from ppoctl.show.tracking.mirror import rebuild as send

    recorded = open_run(run)
    tracking = (recipe_of(recorded, sets) if sets else newest_recorded(recorded)).tracking
    sent = Sent()
    if tracking.tensorboard:
        sent += Sent(tensorboard=write_event_file(recorded.paths))
    if isinstance(tracking, MlflowTracking):
        sent += send(run, tracking, around(recorded.paths, render.print_stderr))
    elif not tracking.tensorboard:
        raise RecipeError(
            f'run `{run}` has `tracking.kind = "none"` and `tracking.tensorboard = false`',
            hint=f"ppoctl track {quoted(run)} --set tracking.kind=mlflow",
        )
    if json:
        render.json(vars(sent))
    else:
        render.table([(name, value) for name, value in vars(sent).items() if value], ("sent", ""))
