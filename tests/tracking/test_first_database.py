"""The database file is created under a temporary name: the next process removes what a kill left, and of two
concurrent processes the second waits."""

import multiprocessing
from multiprocessing.synchronize import Event
from pathlib import Path

from tracking_lab import SETTINGS


def test_half_made_database_of_a_killed_process_is_replaced(template_db: Path) -> None:
    """The database of all these tests is made beside one."""
    names = {path.name for path in template_db.parent.iterdir()} - {template_db.name, "demo", "mlflow-artifacts"}
    assert names == {"mlflow.db"}


def create(runs: Path, go: Event) -> None:
    from ppoctl.tracking.mlflow_run import _client, address_of

    go.wait()
    client = _client(address_of(SETTINGS, runs))
    assert [experiment.name for experiment in client.search_experiments()] == ["Default"]


def test_two_processes_can_create_the_database_at_once(tmp_path: Path, template_db: Path) -> None:
    assert template_db.exists(), "the children need not import MLflow again"
    forked = multiprocessing.get_context("fork")
    go = forked.Event()
    both = [forked.Process(target=create, args=(tmp_path, go)) for _ in range(2)]
    for process in both:
        process.start()
    go.set()
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]
