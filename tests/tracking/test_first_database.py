"""The database file is created under a temporary name: the next process removes what a kill left, and of two
concurrent processes the second waits."""

import subprocess
import sys
from pathlib import Path

from tracking_lab import SETTINGS, RunDir

from ppoctl.tracking.mirror import rebuild


def test_half_made_database_of_a_killed_process_is_replaced(run: RunDir) -> None:
    runs = run.root.parent
    (runs / "mlflow.db").unlink()
    (runs / ".mlflow.db.making").mkdir()
    (runs / ".mlflow.db.making" / "made.db").write_bytes(b"half")
    rebuild(run.root, SETTINGS)
    names = {path.name for path in runs.iterdir() if path.name not in (run.root.name, "mlflow-artifacts")}
    assert names == {"mlflow.db"}


FIRST = """
import sys
from pathlib import Path
from mlflow.tracking import MlflowClient
from ppoctl.recipe.schema import MlflowTracking
from ppoctl.tracking.mlflow_run import _client, address_of

print("imported", flush=True)
sys.stdin.readline()
client = _client(address_of(MlflowTracking(kind="mlflow"), Path(sys.argv[1])))
print(*(experiment.name for experiment in client.search_experiments()))
"""


def test_two_processes_can_create_the_database_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FIRST, str(tmp_path)]
    pipe = subprocess.PIPE
    both = [subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    try:
        for process in both:
            assert process.stdout is not None
            assert process.stdout.readline() == "imported\n"
        for process in both:
            assert process.stdin is not None
            process.stdin.write("now\n")
            process.stdin.flush()
        outputs = [process.communicate(timeout=120) for process in both]
    finally:
        for process in both:
            process.kill()
    assert [(process.returncode, out) for process, (out, _) in zip(both, outputs, strict=True)] == [
        (0, "Default\n")
    ] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]
