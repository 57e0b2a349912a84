"""A real MLflow database that is made once and copied."""

import shutil
import sqlite3
from pathlib import Path

import pytest
from tracking_lab import SETTINGS, MessageLog, Mlflow, RunDir

from ppoctl.tracking.mirror import rebuild


@pytest.fixture(scope="session")
def template_db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a migrated MLflow database, which takes 1 s to make and must not be written to."""
    runs = tmp_path_factory.mktemp("template")
    run = RunDir(runs)
    # A process that was killed has left half a database.
    (runs / ".mlflow.db.making").mkdir()
    (runs / ".mlflow.db.making" / "made.db").write_bytes(b"half")
    # Made by ppoctl itself, so that a real first run creates a fresh database.
    assert rebuild(run.root, SETTINGS).params
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
