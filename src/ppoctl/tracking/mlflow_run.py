"""One MLflow run, as a target for journal lines. The only file that imports mlflow, and it does so when opened.

    Forwarder -> Target (port) -> MlflowRun -> MlflowClient -> sqlite file, database or HTTP server

Calls block; who must not wait calls from another thread (`mirror`).
"""

import contextlib
import fcntl
import getpass
import logging
import os
import shutil
import sqlite3
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from ppoctl.errors import PpoctlError, without_secrets
from ppoctl.recipe.paths import resolved_uri
from ppoctl.recipe.schema import MlflowTracking
from ppoctl.store import run_dir
from ppoctl.store.run_paths import RunPaths
from ppoctl.tracking.inputs import DataInput
from ppoctl.tracking.mlflow_payloads import MARKER, Ending, JournalBatch

RUN_ID_TAG = "ppoctl.run_id"
RUN_DIR_TAG = "ppoctl.run_dir"

_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # With its defaults a call on a dead server blocks 247 s. Retrying is the forwarder's work, which asks before it
    # creates a run again; MLflow's own retries repeat a creation whose answer was lost.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
}
_LOCK_WAIT_S = 2.0


@dataclass(frozen=True)
class Marker:
    """The last journal line a target has: its number and the time it was committed."""

    seq: int
    at_ms: int


@runtime_checkable
class MirrorTarget(Protocol):
    """Receiver of journal lines. Any call may raise anything; the caller then opens a new target."""

    def marker(self) -> Marker | None:
        """The last line that the target has; None: it has none."""
        ...

    def restart(self) -> None:
        """Delete everything that the target has, and begin anew."""
        ...

    def params(self) -> Mapping[str, str]: ...

    def tags(self) -> Mapping[str, str]: ...

    def send(self, batch: JournalBatch) -> None:
        """Store the points of a batch, its marker last."""
        ...

    def describe(self, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Store params and set tags."""
        ...

    def inputs(self) -> set[str]:
        """Names of the tables of data that the target has."""
        ...

    def add_inputs(self, inputs: Sequence[DataInput]) -> None:
        """Store tables of data."""
        ...

    def keep(self, path: str, text: str) -> None:
        """Store a text file, in place of one that is there under this path."""
        ...

    def status(self) -> str: ...

    def end(self, ending: Ending) -> None:
        """Set the status of the run."""
        ...


@dataclass(frozen=True)
class Address:
    """The place that a run is mirrored to."""

    uri: str = field(repr=False)
    experiment: str
    artifacts: str | None
    """URI for the artifacts of a new experiment; None: the server decides."""
    file: Path | None
    """The sqlite file of the default URI."""

    @property
    def shown(self) -> str:
        """The URI without its secrets."""
        return without_secrets(self.uri)


def address_of(settings: MlflowTracking, runs_dir: Path) -> Address:
    """Address that the recipe sends this run to: by default a sqlite file in the runs folder, everything absolute.
    Raises EnvironmentProblemError where the URI is a variable that is not set."""
    folder = runs_dir.resolve()
    file = folder / "mlflow.db" if settings.uri is None else None
    uri = resolved_uri(settings.uri) or f"sqlite:///{file}"
    # A server knows where its artifacts go; for a database MLflow would take the current directory.
    by_server = urlsplit(uri).scheme in ("http", "https", "databricks", "databricks-uc", "uc")
    artifacts = None if by_server else (folder / "mlflow-artifacts").as_uri()
    return Address(uri, settings.experiment, artifacts, file)


class MlflowRun:
    """The MLflow run of one ppoctl run; found by its tag or created."""

    def __init__(self, paths: RunPaths, address: Address) -> None:
        """Open the run. Imports mlflow, 0.5 to 0.9 s. Raises whatever MLflow raises when it cannot be reached."""
        self._facts = run_dir.facts(paths)
        self._address = address
        self._client = _client(address)
        self._id = self._opened()

    def marker(self) -> Marker | None:
        if MARKER not in self._run().data.metrics:
            return None
        history = self._client.get_metric_history(self._id, MARKER)
        last = max(history, key=lambda metric: (metric.step, metric.timestamp))
        return Marker(last.step, last.timestamp)

    def restart(self) -> None:
        # MLflow keeps what is deleted until `mlflow gc`: `mlflow runs restore` brings it back.
        self._client.delete_run(self._id)
        self._id = self._opened()

    def params(self) -> Mapping[str, str]:
        return dict(self._run().data.params)

    def tags(self) -> Mapping[str, str]:
        return dict(self._run().data.tags)

    def send(self, batch: JournalBatch) -> None:
        from mlflow.entities import Metric, RunTag

        if batch.tags:
            # First, in a call of their own: MLflow stores metrics and tags in two transactions, and what lies
            # behind the marker must be complete.
            self._log(tags=[RunTag(*item) for item in batch.tags.items()])
        self._log(metrics=[Metric(p.name, p.value, p.at_ms, p.step) for p in batch.points])

    def describe(self, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        self._log(params=[Param(*item) for item in params.items()], tags=[RunTag(*item) for item in tags.items()])

    def inputs(self) -> set[str]:
        found = self._run().inputs
        return set() if found is None else {each.dataset.name for each in found.dataset_inputs}

    def add_inputs(self, inputs: Sequence[DataInput]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        datasets = [
            DatasetInput(
                Dataset(each.name, each.digest, each.kind, each.source, profile=each.profile),
                [InputTag("mlflow.data.context", each.context)],
            )
            for each in inputs
        ]
        self._client.log_inputs(self._id, datasets=datasets)

    def keep(self, path: str, text: str) -> None:
        self._client.log_text(self._id, text, path)

    def status(self) -> str:
        return str(self._run().info.status)

    def _log(self, **items: list[Any]) -> None:
        # Said explicitly, because MLFLOW_ENABLE_ASYNC_LOGGING would turn errors into silence.
        self._client.log_batch(self._id, **items, synchronous=True)

    def end(self, ending: Ending) -> None:
        self.describe({}, ending.tags)
        if ending.at_ms is None:
            self._client.update_run(self._id, status=ending.status)
        else:
            self._client.set_terminated(self._id, ending.status, end_time=ending.at_ms)

    def _run(self) -> Any:
        return self._client.get_run(self._id)

    def _opened(self) -> str:
        """Id of the run with the tag; of several, made in the same moment, always the same one."""
        return min(self._found(), default=None) or self._created()

    def _found(self) -> set[str]:
        """Ids of runs with the tag, in the recipe's experiment or, if that key was changed, in any other."""
        own = self._client.get_experiment_by_name(self._address.experiment)
        found = set() if own is None else _tagged(self._client, [own], self._facts["id"])
        return found or _tagged(self._client, self._client.search_experiments(), self._facts["id"])

    def _created(self) -> str:
        address, client = self._address, self._client
        own = client.get_experiment_by_name(address.experiment)
        if own is None:
            experiment_id = client.create_experiment(address.experiment, artifact_location=address.artifacts)
        else:
            experiment_id = own.experiment_id
        made = client.create_run(
            experiment_id,
            start_time=int(self._facts["created"] * 1000),
            run_name=self._facts["name"],
            tags={RUN_ID_TAG: self._facts["id"], **_maker(self._facts)},
        )
        return str(made.info.run_id)


def _maker(facts: Mapping[str, Any]) -> dict[str, str]:
    """Tags that say who made a run and with what, as MLflow's own clients do. A user without a name has none."""
    tags = {"mlflow.source.type": "JOB" if "on" in facts or "SLURM_JOB_ID" in os.environ else "LOCAL"}
    if "command" in facts:
        tags["mlflow.source.name"] = " ".join(("ppoctl", facts["command"], facts["name"]))
    with contextlib.suppress(KeyError, OSError):  # a container may run under a number that nobody has
        tags["mlflow.user"] = getpass.getuser()
    return tags


class KeptRuns:
    """The MLflow runs of one ppoctl run, as they are: none is created. Of a copy those that tell of another directory
    that is there, with the same id, are not its own."""

    def __init__(self, paths: RunPaths, address: Address) -> None:
        """Find them in all experiments. Raises whatever MLflow raises when it cannot be reached."""
        self.ids: list[str] = []
        if address.uri.startswith("sqlite:///") and not _sqlite_file(address).exists():
            return
        self._client = _client(address)
        found = _tagged(self._client, self._client.search_experiments(), run_dir.facts(paths)["id"])
        self.ids = sorted(id for id in found if self._is_of(paths, id))

    def _is_of(self, paths: RunPaths, id: str) -> bool:
        tags = self._client.get_run(id).data.tags
        told = RunPaths(Path(tags.get(RUN_DIR_TAG, paths.root)))
        return told.root == paths.root or not _is_there(told, tags[RUN_ID_TAG])

    def delete(self) -> list[str]:
        """Delete them, and return their ids; `mlflow gc` makes it final, and until then each can be restored."""
        for id in self.ids:
            self._client.delete_run(id)
        return self.ids


def _is_there(paths: RunPaths, id: str) -> bool:
    """Whether a run directory is there and has this id."""
    with contextlib.suppress(PpoctlError):
        return bool(run_dir.facts(paths)["id"] == id)
    return False


def _tagged(client: Any, experiments: Iterable[Any], run_id: str) -> set[str]:
    ids = [experiment.experiment_id for experiment in experiments]
    runs = client.search_runs(ids, f"tags.`{RUN_ID_TAG}` = '{run_id}'") if ids else ()
    return {run.info.run_id for run in runs}


def _client(address: Address) -> Any:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    # Deprecations between mlflow, sqlalchemy and alembic are not the reader's business.
    for module in ("mlflow", "sqlalchemy", "alembic"):
        warnings.filterwarnings("ignore", module=rf"{module}\b")
        logging.getLogger(module).setLevel(logging.ERROR)
    from mlflow.store.db import utils as database
    from mlflow.tracking import MlflowClient

    # Ten tries with doubling pauses, 100 s in one call; there is no setting for it, and waiting is the forwarder's.
    database.MAX_RETRY_COUNT = 0
    if address.uri.startswith("sqlite:///"):
        _check_sqlite(address)
    return MlflowClient(tracking_uri=address.uri)


def _sqlite_file(address: Address) -> Path:
    from sqlalchemy.engine import make_url

    return Path(make_url(address.uri).database or ":memory:")


def _check_sqlite(address: Address) -> None:
    """Raise at once when the file is locked or cannot be written (MLflow would wait 20 s); make it if there is none.

    A new file is made aside and moved into place: MLflow builds its tables in some eighty migrations, and a kill
    (or a second run starting) in the middle of them leaves a database that nothing can open.
    """
    path = _sqlite_file(address)
    if path.name == ":memory:":
        return
    if address.file not in (None, path):
        # Escaping would do for sqlalchemy, but MLflow reads the same URI unescaped and makes stray folders.
        raise ValueError(f"a database URI cannot carry the `%` or `?` in `{address.file}`; set `tracking.uri`")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        _make_sqlite(path)
    with contextlib.closing(sqlite3.connect(path, timeout=_LOCK_WAIT_S)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.rollback()


def _make_sqlite(path: Path) -> None:
    from mlflow.tracking import MlflowClient

    runs = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(runs, fcntl.LOCK_EX)  # one at a time: what lies aside was left by one that was killed
        if path.exists():
            return
        aside = path.with_name(f".{path.name}.making")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        # Two files: MLflow keeps a connection to the first, which must not become one to the real database.
        made, copy = aside / "made.db", aside / "copy.db"
        MlflowClient(tracking_uri=f"sqlite:///{made}").search_experiments(max_results=1)
        shutil.copyfile(made, copy)
        copy.rename(path)
        shutil.rmtree(aside)
    finally:
        os.close(runs)
