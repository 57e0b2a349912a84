"""The database file is made aside: what a kill leaves of that is removed by whoever comes next."""

from tracking_lab import SETTINGS, RunDir

from ppoctl.tracking.mirror import rebuild


def test_what_a_killed_process_was_making_is_made_anew_and_nothing_is_left_beside_it(run: RunDir) -> None:
    runs = run.root.parent
    (runs / "mlflow.db").unlink()
    (runs / ".mlflow.db.making").mkdir()
    (runs / ".mlflow.db.making" / "made.db").write_bytes(b"half")
    rebuild(run.root, SETTINGS)
    names = {path.name for path in runs.iterdir() if path.name not in (run.root.name, "mlflow-artifacts")}
    assert names == {"mlflow.db"}
