"""An MLflow run as a target for journal lines. Only this file imports mlflow, and only when a run is opened.

    Forwarder -> MirrorTarget (port) -> MlflowRun -> MlflowClient -> sqlite file, database or HTTP server

Calls block. A caller that must not wait uses another thread (`mirror`).
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

from ppoctl.core.errors import EnvironmentProblemError, PpoctlError, quoted, without_secrets
from ppoctl.recipe.paths import resolved_uri
from ppoctl.recipe.tracking_table import MlflowTracking
from ppoctl.show.tracking.inputs import DataInput
from ppoctl.show.tracking.mlflow_payloads import MARKER, Ending, JournalBatch
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths

RUN_ID_TAG = "ppoctl.run_id"
RUN_DIR_TAG = "ppoctl.run_dir"

_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # With the defaults, a call to a dead server blocks for 247 s. The mirror retries instead, and searches for the
    # run before it creates one; MLflow's own retries would repeat a creation whose answer was lost.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
}
_LOCK_WAIT_S = 2.0
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""Tag that makes MLflow's pages show a new experiment as training of models, not as an app with a language model."""


@dataclass(frozen=True)
class Marker:
    """The last journal line that a target has: its number and the time of its commit."""

    seq: int
    at_ms: int


@runtime_checkable
class MirrorTarget(Protocol):
    """Receiver of journal lines. Any call may raise any exception; the caller then opens a new target."""

    def marker(self) -> Marker | None:
        """Return the last line that the target has; None: the target has no line."""
        ...

    def restart(self) -> None:
        """Delete everything that the target has, and start again with an empty target."""
        ...

    def params(self) -> Mapping[str, str]: ...

    def tags(self) -> Mapping[str, str]: ...

    def send(self, batch: JournalBatch) -> None:
        """Store the points of a batch, with the marker last."""
        ...

    def describe(self, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Store params and set tags."""
        ...

    def inputs(self) -> set[str]:
        """Return the names of the tables of data that the target has."""
        ...

    def add_inputs(self, inputs: Sequence[DataInput]) -> None:
        """Store tables of data."""
        ...

    def keep(self, path: str, text: str) -> None:
        """Store a text file; it replaces an existing file of this path."""
        ...

    def status(self) -> str: ...

    def end(self, ending: Ending) -> None:
        """Set the status of the run."""
        ...


@dataclass(frozen=True)
class Address:
    """The MLflow server or database, and the experiment, of a run's mirror."""

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
    """Return the address from the recipe; by default a sqlite file in the runs folder. All paths are absolute.

    Raises EnvironmentProblemError if the URI is a variable that is not set.
    """
    folder = runs_dir.resolve()
    file = folder / "mlflow.db" if settings.uri is None else None
    uri = resolved_uri(settings.uri) or f"sqlite:///{file}"
    # A server decides where its artifacts are stored; for a database MLflow would use the current directory.
    by_server = urlsplit(uri).scheme in ("http", "https", "databricks", "databricks-uc", "uc")
    artifacts = None if by_server else (folder / "mlflow-artifacts").as_uri()
    return Address(uri, settings.experiment, artifacts, file)


class MlflowRun:
    """The MLflow run of a ppoctl run, found by its tag or created."""

    def __init__(self, paths: RunPaths, address: Address) -> None:
        """Open the run. Imports mlflow (0.5 to 0.9 s). Raises MLflow's errors if MLflow cannot be reached."""
        self._facts = RecordedRun(paths).facts
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
        # MLflow only hides a deleted run until `mlflow gc`; `mlflow runs restore` restores it.
        self._client.delete_run(self._id)
        self._id = self._opened()

    def params(self) -> Mapping[str, str]:
        return dict(self._run().data.params)

    def tags(self) -> Mapping[str, str]:
        return dict(self._run().data.tags)

    def send(self, batch: JournalBatch) -> None:
        from mlflow.entities import Metric, RunTag

        if batch.tags:
            # Tags first, in a separate call: MLflow stores metrics and tags in two transactions. If the marker were
            # stored before the tags, a kill in between would lose the tags, since the marker shows them as sent.
            self._log(tags=[RunTag(*item) for item in batch.tags.items()])
        self._log(metrics=[Metric(p.name, p.value, p.at_ms, p.step) for p in batch.points])

    def describe(self, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        self._log(params=[Param(*item) for item in params.items()], tags=[RunTag(*item) for item in tags.items()])

    def inputs(self) -> set[str]:
        run_inputs = self._run().inputs
        return set() if run_inputs is None else {entry.dataset.name for entry in run_inputs.dataset_inputs}

    def add_inputs(self, inputs: Sequence[DataInput]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        datasets = [
            DatasetInput(
                Dataset(data.name, data.digest, data.kind, data.source, profile=data.profile),
                [InputTag("mlflow.data.context", data.context)],
            )
            for data in inputs
        ]
        self._client.log_inputs(self._id, datasets=datasets)

    def keep(self, path: str, text: str) -> None:
        self._client.log_text(self._id, text, path)

    def status(self) -> str:
        return str(self._run().info.status)

    def _log(self, **items: list[Any]) -> None:
        # `synchronous` is explicit, because MLFLOW_ENABLE_ASYNC_LOGGING would hide errors.
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
        """Return the id of the run with the tag, and create the run if there is none.

        If two processes created a run at the same moment, all callers return the id of the same run.
        """
        return min(self._existing(), default=None) or self._create()

    def _existing(self) -> set[str]:
        """Return the ids of runs with the tag, in the recipe's experiment or, if there are none, in any other."""
        own = self._client.get_experiment_by_name(self._address.experiment)
        ids = set() if own is None else _tagged(self._client, [own], self._facts["id"])
        return ids or _tagged(self._client, self._client.search_experiments(), self._facts["id"])

    def _create(self) -> str:
        address, client = self._address, self._client
        own = client.get_experiment_by_name(address.experiment)
        if own is None:
            experiment_id = client.create_experiment(
                address.experiment, artifact_location=address.artifacts, tags=_EXPERIMENT_TAGS
            )
        elif own.lifecycle_stage == "deleted":
            raise EnvironmentProblemError(
                f"experiment `{own.name}` (id {own.experiment_id}) was deleted in MLflow at `{address.shown}`; "
                f"`--set tracking.experiment={quoted(own.name + '-2')}` uses another one",
                hint=f"MLFLOW_TRACKING_URI={quoted(address.shown)} mlflow experiments restore "
                f"--experiment-id {own.experiment_id}",
            )
        else:
            experiment_id = own.experiment_id
        created = client.create_run(
            experiment_id,
            start_time=int(self._facts["created"] * 1000),
            run_name=self._facts["name"],
            tags={RUN_ID_TAG: self._facts["id"], **_source_tags(self._facts)},
        )
        return str(created.info.run_id)


def _source_tags(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of MLflow's own clients: source type, command and user.

    The user is omitted if the user id has no name.
    """
    tags = {"mlflow.source.type": "JOB" if "on" in facts or "SLURM_JOB_ID" in os.environ else "LOCAL"}
    if "command" in facts:
        tags["mlflow.source.name"] = " ".join(("ppoctl", facts["command"], facts["name"]))
    with contextlib.suppress(KeyError, OSError):  # a container may run under a user id without a name
        tags["mlflow.user"] = getpass.getuser()
    return tags


class KeptRuns:
    """The existing MLflow runs of a ppoctl run; no run is created.

    MLflow runs whose tag names another existing directory with the same id belong to that directory: this run is then
    a copy.
    """

    def __init__(self, paths: RunPaths, address: Address) -> None:
        """Find the runs in all experiments. Raises MLflow's errors if MLflow cannot be reached."""
        self.ids: list[str] = []
        if address.uri.startswith("sqlite:///") and not _sqlite_file(address).exists():
            return
        self._client = _client(address)
        ids = _tagged(self._client, self._client.search_experiments(), RecordedRun(paths).facts["id"])
        self.ids = sorted(id for id in ids if self._is_of(paths, id))

    def _is_of(self, paths: RunPaths, id: str) -> bool:
        tags = self._client.get_run(id).data.tags
        mirrored = RunPaths(Path(tags.get(RUN_DIR_TAG, paths.root)))
        return mirrored.root == paths.root or not _exists(mirrored, tags[RUN_ID_TAG])

    def delete(self) -> list[str]:
        """Delete the runs, and return their ids. They can be restored until `mlflow gc`."""
        for id in self.ids:
            self._client.delete_run(id)
        return self.ids


def _exists(paths: RunPaths, id: str) -> bool:
    """Return whether a run directory exists and has this id."""
    with contextlib.suppress(PpoctlError):
        return bool(RecordedRun(paths).facts["id"] == id)
    return False


def _tagged(client: Any, experiments: Iterable[Any], run_id: str) -> set[str]:
    ids = [experiment.experiment_id for experiment in experiments]
    runs = client.search_runs(ids, f"tags.`{RUN_ID_TAG}` = '{run_id}'") if ids else ()
    return {run.info.run_id for run in runs}


def _client(address: Address) -> Any:
    # Before the import of mlflow, which reads the log level then.
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    # Deprecation warnings between mlflow, sqlalchemy and alembic do not concern the user.
    for module in ("mlflow", "sqlalchemy", "alembic"):
        warnings.filterwarnings("ignore", module=rf"{module}\b")
        logging.getLogger(module).setLevel(logging.ERROR)
    from mlflow.store.db import utils as database
    from mlflow.tracking import MlflowClient

    # By default MLflow tries ten times and doubles the pause each time, so that a call can take 100 s. No
    # setting changes this. The forwarder retries instead.
    database.MAX_RETRY_COUNT = 0
    if address.uri.startswith("sqlite:///"):
        _check_sqlite(address)
    return MlflowClient(tracking_uri=address.uri)


def _sqlite_file(address: Address) -> Path:
    from sqlalchemy.engine import make_url

    return Path(make_url(address.uri).database or ":memory:")


def _check_sqlite(address: Address) -> None:
    """Raise an error soon if the file is locked (MLflow would wait 20 s); create it if it is missing.

    A new file is created in a temporary folder and then moved: MLflow creates its tables in about eighty migrations.
    A kill during the migrations, or a second run that starts then, would leave a database that MLflow cannot open.
    """
    path = _sqlite_file(address)
    if path.name == ":memory:":
        return
    if address.file not in (None, path):
        # sqlalchemy accepts an escaped URI, but MLflow does not unescape it and would create other folders.
        raise ValueError(f"a database URI cannot contain the `%` or `?` in `{address.file}`; set `tracking.uri`")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        _make_sqlite(path)
    with contextlib.closing(sqlite3.connect(path, timeout=_LOCK_WAIT_S)) as connection:
        # It takes the write lock, so it fails if another process still holds the lock after `_LOCK_WAIT_S`.
        connection.execute("BEGIN IMMEDIATE")
        connection.rollback()


def _make_sqlite(path: Path) -> None:
    from mlflow.tracking import MlflowClient

    runs = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(runs, fcntl.LOCK_EX)  # one process at a time, so an existing folder is from a killed process
        if path.exists():
            return
        aside = path.with_name(f".{path.name}.making")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        # Two files: MLflow keeps a connection to the first one open, which must not become the real database.
        created, copy = aside / "made.db", aside / "copy.db"
        MlflowClient(tracking_uri=f"sqlite:///{created}").search_experiments(max_results=1)
        shutil.copyfile(created, copy)
        copy.rename(path)
        shutil.rmtree(aside)
    finally:
        os.close(runs)
