"""MLflow's pages start in the training environment: `make ui` on a runs folder."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

ROOT = Path(__file__).parents[2]
# Raised by sqlalchemy as MLflow uses it.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
START_S = 180.0
"""Maximum seconds for the server to start; it takes ten on an idle machine."""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Address of the pages of a folder with one run, whose `loss` was 0.5."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run = client.create_run(client.create_experiment("quickstart", str(tmp_path / "artifacts"))).info.run_id
    client.log_metric(run, "loss", 0.5)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Without the setup: a test must not install anything.
    environment = Path(sys.executable).parents[1]
    command = ["make", "-o", "setup", "ui", f"RUNS={tmp_path}", f"PORT={port}", f"VENV={environment}"]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def page(address: str, log: Path) -> str:
    """Return the first page, once the server answers."""
    until = time.monotonic() + START_S
    while True:
        try:
            with urlopen(address, timeout=10) as answer:
                return str(answer.read().decode())
        except (URLError, ConnectionError, TimeoutError):
            assert time.monotonic() < until, log.read_text()
            assert "Error" not in log.read_text(), log.read_text()
            time.sleep(0.5)


def test_port_in_use_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").touch()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        command = ["make", "-s", "-o", "setup", "ui", f"RUNS={tmp_path}", f"PORT={port}"]
        environment = Path(sys.executable).parents[1]
        done = subprocess.run([*command, f"VENV={environment}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stdout == ""
    assert f"port {port} is in use: make ui PORT=" in done.stderr


def test_make_ui_passes_database_and_address_to_mlflow(tmp_path: Path) -> None:
    """In place of MLflow's server, a program prints its arguments."""
    bin_ = tmp_path / "venv" / "bin"
    bin_.mkdir(parents=True)
    (bin_ / "python").symlink_to(sys.executable)
    (bin_ / "mlflow").write_text('#!/bin/sh\necho "$@" "$MLFLOW_DISABLE_TELEMETRY"\n')
    (bin_ / "mlflow").chmod(0o755)
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database, database:
        for table, name in (("experiments", "quickstart"), ("runs", "run")):
            database.execute(f"CREATE TABLE {table} (experiment_id INTEGER, name TEXT, lifecycle_stage TEXT)")
            database.execute(f"INSERT INTO {table} VALUES (1, ?, 'active')", [name])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = ["make", "-s", "-o", "setup", "ui", f"RUNS={tmp_path}", f"PORT={port}", f"VENV={bin_.parent}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == (
        f"ui --host 127.0.0.1 --port {port} --workers 1 --backend-store-uri sqlite:///{tmp_path}/mlflow.db true\n"
    )
    assert f"charts of quickstart: http://127.0.0.1:{port}/#/experiments/1/runs?" in done.stderr


@pytest.mark.ci("test_make_ui_passes_database_and_address_to_mlflow")
def test_make_ui_serves_the_pages_and_the_run(address: str, tmp_path: Path) -> None:
    assert "<title>MLflow</title>" in page(address, tmp_path / "log")
    charts = (
        f"charts of quickstart: {address}/#/experiments/1/runs?workflowType=machine_learning&compareRunsMode=CHART"
    )
    assert charts in (tmp_path / "log").read_text()
    body = json.dumps({"experiment_ids": ["1"], "max_results": 5}).encode()
    request = Request(f"{address}/api/2.0/mlflow/runs/search", body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        [run] = json.load(answer)["runs"]
    assert [(metric["key"], metric["value"]) for metric in run["data"]["metrics"]] == [("loss", 0.5)]
