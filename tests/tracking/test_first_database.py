"""The database file is created under a temporary name: the next process removes what a kill left, and of two
concurrent processes the second waits."""

from pathlib import Path


def test_two_processes_replace_the_half_made_database_of_a_killed_process(
    creation: tuple[Path, list[int | None]], template_db: Path
) -> None:
    """The database of all these tests is made by two processes at once, beside a half-made one."""
    runs, exit_codes = creation
    assert exit_codes == [0, 0]
    names = {path.name for path in runs.iterdir()} - {template_db.name, "demo", "mlflow-artifacts"}
    assert names == {"mlflow.db"}
