"""The database file is made aside: what a kill leaves of that is removed by whoever comes next."""

import fcntl
import os

from tracking_lab import SETTINGS, RunDir

from ppoctl.tracking.mirror import rebuild


def test_what_a_killed_process_was_making_is_removed_and_what_a_living_one_is_making_is_not(run: RunDir) -> None:
    runs = run.root.parent
    killed, alive = (runs / f".mlflow.db.making-{name}" for name in ("killed", "alive"))
    for folder in (killed, alive):
        folder.mkdir()
        (folder / "made.db-journal").write_bytes(b"half")
    other = runs / ".other.db.making-killed"
    other.mkdir()
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        rebuild(run.root, SETTINGS)
    finally:
        os.close(lock)
    assert (killed.exists(), alive.exists(), other.exists()) == (False, True, True)


def test_a_database_that_was_made_leaves_nothing_beside_it(run: RunDir) -> None:
    runs = run.root.parent
    (runs / "mlflow.db").unlink()
    rebuild(run.root, SETTINGS)
    names = {path.name for path in runs.iterdir() if path.name not in (run.root.name, "mlflow-artifacts")}
    assert names == {"mlflow.db"}
