"""The `[tracking]` table: the metrics of a run in MLflow and for TensorBoard."""

from typing import Annotated, Literal

from pydantic import Field

from ppoctl.core.recipe_table import REPORTING, Table


class TrackingTable(Table):
    """Keys of every kind of tracking."""

    tensorboard: Annotated[bool, REPORTING] = False
    """Whether the metrics are also written to an event file for TensorBoard, in `tensorboard/` of the run
    directory."""


class MlflowTracking(TrackingTable):
    """Tracking by MLflow, as a mirror of the run directory. Training continues if MLflow is unreachable."""

    kind: Annotated[Literal["mlflow"], REPORTING]
    """Mirror the run to MLflow."""
    uri: Annotated[str | None, REPORTING] = None
    """MLflow tracking URI without a secret, or `$NAME` of an environment variable that contains it; absent: a sqlite
    file in the runs folder."""
    experiment: Annotated[str, REPORTING] = "ppoctl"
    """Name of the MLflow experiment."""


class NoTracking(TrackingTable):
    """No tracking outside the run directory."""

    kind: Annotated[Literal["none"], REPORTING]
    """No mirror."""


Tracking = Annotated[MlflowTracking | NoTracking, Field(discriminator="kind")]
