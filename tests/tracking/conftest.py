"""A real MLflow database that is made once and copied."""

import multiprocessing
import shutil
import sqlite3
from importlib import import_module
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from tracking_lab import SETTINGS, MessageLog, Mlflow, RunDir

from ppoctl.recipe.tracking_table import MlflowTracking
from ppoctl.show.tracking.mirror import rebuild
from ppoctl.show.tracking.mlflow_run import _client, address_of


def create(runs: Path, go: Event) -> None:
    """Create the database of a runs folder if it does not exist, and read it."""
    go.wait()
    client = _client(address_of(SETTINGS, runs))
    assert [experiment.name for experiment in client.search_experiments()] == ["Default"]


@pytest.fixture(scope="session")
def creation(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int | None]]:
    """Let two processes create a database at once, where a killed process has left half of one. Return the runs
    folder and their exit codes."""
    runs = tmp_path_factory.mktemp("template")
    (runs / ".mlflow.db.making").mkdir()
    (runs / ".mlflow.db.making" / "made.db").write_bytes(b"half")
    _client(address_of(MlflowTracking(kind="mlflow", uri="http://127.0.0.1:9"), runs))  # the imports of both
    import_module("mlflow.store.tracking.sqlalchemy_store")
    forked = multiprocessing.get_context("fork")
    go = forked.Event()
    both = [forked.Process(target=create, args=(runs, go)) for _ in range(2)]
    for process in both:
        process.start()
    go.set()
    for process in both:
        process.join(120)
    return runs, [process.exitcode for process in both]


@pytest.fixture(scope="session")
def template_db(creation: tuple[Path, list[int | None]]) -> Path:
    """Return a migrated MLflow database, which takes 1 s to make and must not be written to."""
    runs, _ = creation
    # Made by ppoctl itself, so that a real first run creates a fresh database.
    assert rebuild(RunDir(runs).root, SETTINGS).params
    empty = runs / "empty.db"
    shutil.copyfile(runs / "mlflow.db", empty)
    _forget_runs(empty)
    return empty


@pytest.fixture
def runs_dir(tmp_path: Path, template_db: Path) -> Path:
    """Return a runs folder with an empty database; its name has a space, quotes and a hash."""
    runs = tmp_path / "my 'runs' #1"
    runs.mkdir()
    shutil.copyfile(template_db, runs / "mlflow.db")
    return runs


@pytest.fixture
def run(runs_dir: Path) -> RunDir:
    return RunDir(runs_dir)


@pytest.fixture
def mlflow(runs_dir: Path) -> Mlflow:
    return Mlflow(runs_dir)


@pytest.fixture
def messages() -> MessageLog:
    return MessageLog()


def _forget_runs(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        tables = ("metrics", "latest_metrics", "params", "tags", "runs")
        for table in tables:
            connection.execute(f"DELETE FROM {table}")
        connection.execute("DELETE FROM experiment_tags")
        connection.execute("DELETE FROM experiments WHERE experiment_id != 0")
    connection.close()
