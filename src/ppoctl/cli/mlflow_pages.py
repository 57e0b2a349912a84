"""`make ui`: MLflow's pages of a runs folder, with the address of the charts of each experiment."""

import os
import socket
import sqlite3
import sys
from contextlib import closing, suppress
from pathlib import Path

from ppoctl.cli import render

_CHARTS = "runs?workflowType=machine_learning&compareRunsMode=CHART"
"""Page of an experiment with the curves of its runs; without it, MLflow opens pages about language model apps."""


def charts(database: Path, port: int) -> list[str]:
    """Return a line with the address of the charts of each experiment that has runs."""
    query = (
        "SELECT name, experiment_id FROM experiments WHERE lifecycle_stage = 'active' AND experiment_id IN "
        "(SELECT experiment_id FROM runs WHERE lifecycle_stage = 'active') ORDER BY experiment_id"
    )
    found: list[tuple[str, int]] = []
    # A database of another MLflow may have other tables; the server reports what is wrong with it.
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as own:
        found = own.execute(query).fetchall()
    return [
        f"charts of {render.printable(name)}: http://127.0.0.1:{port}/#/experiments/{id}/{_CHARTS}"
        for name, id in found
    ]


def is_in_use(port: int) -> bool:
    """Whether another program listens on the port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def main(runs: str, port: str) -> None:
    """Check the port, print the addresses, and become MLflow's server. Exits with 2 if the pages cannot be served."""
    database = Path(runs) / "mlflow.db"
    if not database.is_file():
        raise _refused(f"{database} does not exist: train first (make quickstart), or make ui RUNS=folder")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise _refused(f"PORT={port} is not a port: make ui PORT=5001")
    if is_in_use(int(port)):
        other = next((each for each in range(int(port) + 1, 65536) if not is_in_use(each)), 5001)
        raise _refused(f"port {port} is in use: make ui PORT={other}")
    # To stderr, which has no buffer that `execve` would lose.
    for line in charts(database, int(port)) or [f"open http://127.0.0.1:{port}"]:
        render.print_stderr(line)
    server = str(Path(sys.executable).with_name("mlflow"))
    address = ["--host", "127.0.0.1", "--port", port, "--workers", "1"]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "PYTHONWARNINGS": "ignore"}
    store = f"sqlite:///{database.resolve()}"
    os.execve(server, [server, "ui", *address, "--backend-store-uri", store], {**os.environ, **quiet})


def _refused(text: str) -> SystemExit:
    render.print_stderr(text)
    return SystemExit(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
