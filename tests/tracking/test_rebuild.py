"""Rebuilding in a real MLflow database: everything is sent once, and a run keeps its one MLflow run."""

import json
import math
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tracking_lab import RECIPE, SETTINGS, Mlflow, RunDir, journaled_points, num_missing, stage_lists

from ppoctl.core.batch.sealed_json import sealed_line, unseal
from ppoctl.core.errors import EnvironmentProblemError, RecipeError, quoted
from ppoctl.recipe.tracking_table import MlflowTracking
from ppoctl.show.tracking.mirror import kept_by_mlflow, rebuild
from ppoctl.show.tracking.mlflow_payloads import ROWS_PER_TABLE
from ppoctl.show.tracking.mlflow_problems import fix, reason
from ppoctl.show.tracking.mlflow_run import Address
from ppoctl.store.recorded_run import STORIES

TABLE = '{"columns": ["row"], "data": [[0], [1]]}'


def finished(run: RunDir, steps: int = 3) -> None:
    run.event("attempt_started")
    for step in range(1, steps + 1):
        run.step(step)
    run.evaluation(steps)
    run.event("attempt_ended", status="finished", exit_code=0)


def test_rebuild_sends_everything_and_a_second_rebuild_nothing(run: RunDir, mlflow: Mlflow) -> None:
    finished(run)
    sent = rebuild(run.root, SETTINGS)
    assert (sent.lines, sent.params, sent.files, sent.status) == (12, 4, 3, 1)
    assert mlflow.points() == journaled_points(run.root)
    assert num_missing(rebuild(run.root, SETTINGS)) == 0
    assert mlflow.points() == journaled_points(run.root)


def test_rebuilt_run_has_name_status_times_and_params(run: RunDir, mlflow: Mlflow) -> None:
    finished(run)
    rebuild(run.root, SETTINGS)
    found = mlflow.run()
    assert (found.info.run_name, found.info.status, found.info.start_time) == ("demo", "FINISHED", 1_763_700_000_500)
    assert found.info.end_time == 1_763_712_012_250  # the journal's twelfth line
    assert found.data.params == {
        "name": "demo",
        "steps": "3",
        "ppo.kl.place": "loss",
        "ppo.kl.coef": "0.001",
    }
    assert found.data.tags["ppoctl.status"] == "finished"
    assert mlflow.text("recipe.toml") == 'name = "demo"\n'
    assert json.loads(mlflow.text("recipe.resolved.json"))["steps"] == 3
    assert mlflow.text("samples/step-000003.json") == TABLE
    assert Path(found.info.artifact_uri.removeprefix("file://").replace("%20", " ")).is_absolute()


def test_step_of_several_rounds_has_one_point_of_each_metric(run: RunDir, mlflow: Mlflow) -> None:
    run.recipe({**RECIPE, STORIES: stage_lists(of_rounds=True)})
    run.round(1, 1, score=0.5, of_all=0.5)
    run.round(1, 2, score=0.0, of_all=0.25)
    run.event("attempt_ended", status="preempted")
    assert rebuild(run.root, SETTINGS).points == 0  # a resume may add rounds, and MLflow cannot replace a point
    run.event("attempt_started")
    run.round(1, 3, score=1.0, of_all=0.5)
    assert rebuild(run.root, SETTINGS).points == 0
    run.stage(1, "actor_update", policy__loss=-0.5)
    rebuild(run.root, SETTINGS)
    assert num_missing(rebuild(run.root, SETTINGS)) == 0
    # 100 + 200 + 300 tokens, and a score of 1.5 in 3 rounds.
    values = {"rollout/tokens": 600.0, "reward/score_mean": 0.5, "groups/rounds": 3.0, "policy/loss": -0.5}
    assert [point for point in sorted(mlflow.points().elements()) if not point[0].startswith("time/")] == [
        (name, 1, value, at) for name, value in sorted(values.items()) for at in [point_time(mlflow, name)]
    ]
    run.stage(2, "rollout", rollout__tokens=7.0)
    run.event("attempt_ended", status="finished")  # of a command that only generates
    assert rebuild(run.root, SETTINGS).points == 2


def point_time(mlflow: Mlflow, name: str) -> int:
    """Return the time of the only point of a metric, after the round or the stage that decided it."""
    (at,) = [point[3] for point in mlflow.points().elements() if point[0] == name]
    assert at == (1_763_712_011_250 if name != "policy/loss" else 1_763_712_012_250), name
    return at


def test_changed_params_are_tags_and_the_new_recipe_is_uploaded(run: RunDir, mlflow: Mlflow) -> None:
    rebuild(run.root, SETTINGS)
    run.recipe({"name": "demo", "steps": 9, "seed": 1})
    sent = rebuild(run.root, SETTINGS)
    assert (sent.params, sent.tags) == (1, 1)
    found = mlflow.run()
    assert (found.data.params["steps"], found.data.tags["changed/steps"]) == ("3", "9")
    assert found.data.params["seed"] == "1"
    assert json.loads(mlflow.text("recipe.resolved.json"))["steps"] == 9
    assert num_missing(rebuild(run.root, SETTINGS)) == 0


def test_changed_experiment_does_not_create_a_second_run(run: RunDir, mlflow: Mlflow) -> None:
    run.step(1)
    rebuild(run.root, SETTINGS)
    assert num_missing(rebuild(run.root, MlflowTracking(kind="mlflow", experiment="elsewhere"))) == 0
    assert len(mlflow.runs()) == 1


def test_run_deleted_in_mlflow_is_recreated(run: RunDir, mlflow: Mlflow) -> None:
    run.step(1)
    rebuild(run.root, SETTINGS)
    mlflow.client.delete_run(mlflow.run().info.run_id)
    assert rebuild(run.root, SETTINGS).lines == 3
    assert mlflow.points() == journaled_points(run.root)


def test_deleted_experiment_is_an_error_with_the_command_that_restores_it(run: RunDir, mlflow: Mlflow) -> None:
    run.step(1)
    rebuild(run.root, SETTINGS)
    id = mlflow.run().info.experiment_id
    assert mlflow.client.get_experiment(id).tags["mlflow.experimentKind"] == "custom_model_development"
    mlflow.client.delete_experiment(id)
    second = RunDir(run.root.parent, "two")
    for each in (run, second):
        with pytest.raises(EnvironmentProblemError, match=rf"`ppoctl` \(id {id}\) was deleted") as caught:
            rebuild(each.root, SETTINGS)
        uri = quoted(f"sqlite:///{run.root.parent}/mlflow.db")
        assert caught.value.hint == f"MLFLOW_TRACKING_URI={uri} mlflow experiments restore --experiment-id {id}"
    rebuild(second.root, SETTINGS.model_copy(update={"experiment": "other"}))
    mlflow.client.restore_experiment(id)
    assert num_missing(rebuild(run.root, SETTINGS)) == 0
    assert mlflow.points() == journaled_points(run.root)


def test_database_of_another_mlflow_is_named_with_its_fix(run: RunDir, runs_dir: Path, mlflow: Mlflow) -> None:
    database = runs_dir / "mlflow.db"
    with sqlite3.connect(database) as connection:
        (first,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    from alembic.script import ScriptDirectory
    from mlflow.store.db.utils import _get_alembic_config

    script = ScriptDirectory.from_config(_get_alembic_config(db_url="")).get_revision(first)
    for version, fixed_by in ((str(script.down_revision), "mlflow db upgrade"), ("f" * 12, "pip install --upgrade")):
        other = runs_dir / f"{version}.db"
        shutil.copyfile(database, other)
        with sqlite3.connect(other) as connection:
            connection.execute("UPDATE alembic_version SET version_num = ?", (version,))
        with pytest.raises(EnvironmentProblemError) as caught:
            rebuild(run.root, MlflowTracking(kind="mlflow", uri=f"sqlite:///{other}"))
        assert fixed_by in str(caught.value.hint)


def test_causes_of_errors_have_their_fix(tmp_path: Path) -> None:
    """The first text is sqlite's own; the others are those of MLflow 3.17's client."""
    (tmp_path / "mlflow.db").touch()
    with pytest.raises(sqlite3.OperationalError) as readonly:
        sqlite3.connect(f"file:{tmp_path}/mlflow.db?mode=ro", uri=True).execute("CREATE TABLE a (b)")
    file = Address(f"sqlite:///{tmp_path}/mlflow.db", "ppoctl", None, None)
    assert fix(readonly.value, file, tmp_path / "run") == f"chmod u+w {tmp_path}/mlflow.db"
    assert reason(EnvironmentProblemError("it is gone", hint="restore it")) == "it is gone; restore it"
    server = Address("https://host/mlflow/", "ppoctl", None, None)
    from mlflow.exceptions import MlflowException, RestException

    refused = RestException({"error_code": "PERMISSION_DENIED", "message": "no"})
    assert "MLFLOW_TRACKING_TOKEN" in fix(refused, server, tmp_path / "run")
    absent = MlflowException("API request to endpoint /api failed with error code 404 != 200. Response body: ''")
    assert fix(absent, server, tmp_path / "run").endswith("curl https://host/mlflow/version")


def damage_journal(run: RunDir) -> None:
    """Rewrite the journal as the worst damage leaves it: without its first line, and numbered from 1."""
    lines = [unseal(line) for line in run.paths.journal.read_text().splitlines()][1:]
    run.paths.journal.write_bytes(b"".join(sealed_line({**line, "seq": 1 + k}) for k, line in enumerate(lines)))


def test_rebuilt_journal_is_sent_completely_to_a_new_run(run: RunDir, mlflow: Mlflow) -> None:
    """Events are lost and the numbers shift, so the marker refers to another line: nothing is doubled or missing, and
    the previous MLflow run is deleted as MLflow deletes, which can be undone."""
    run.event("attempt_started")
    for step in (1, 2):
        run.step(step)
    rebuild(run.root, SETTINGS)
    before = mlflow.run().info.run_id
    run.step(3)
    damage_journal(run)
    assert rebuild(run.root, SETTINGS).lines == 9
    assert mlflow.points() == journaled_points(run.root)
    assert mlflow.client.get_run(before).info.lifecycle_stage == "deleted"
    assert num_missing(rebuild(run.root, SETTINGS)) == 0


def test_only_one_of_two_duplicate_mlflow_runs_gets_new_lines(run: RunDir, mlflow: Mlflow) -> None:
    """Both processes created an MLflow run before either saw the other's: one of them has everything, and the other
    stays unchanged."""
    run.step(1)
    rebuild(run.root, SETTINGS)
    tags = {"ppoctl.run_id": mlflow.run().data.tags["ppoctl.run_id"]}
    mlflow.client.create_run(mlflow.run().info.experiment_id, tags=tags, run_name="demo")
    rebuild(run.root, SETTINGS)
    run.step(2)
    rebuild(run.root, SETTINGS)
    first, second = sorted(mlflow.runs(), key=lambda each: str(each.info.run_id))
    assert first.data.metrics["progress/journal_seq"] == 6
    assert second.data.metrics.get("progress/journal_seq") in (None, 3)


def test_truncated_sample_table_is_sent_again(run: RunDir, mlflow: Mlflow) -> None:
    finished(run)
    rebuild(run.root, SETTINGS)
    uri = mlflow.run().info.artifact_uri.removeprefix("file://")
    from urllib.parse import unquote

    (Path(unquote(uri)) / "samples" / "step-000003.json").write_text('{"columns"')
    rebuild(run.root, SETTINGS)
    assert mlflow.text("samples/step-000003.json") == TABLE


def test_only_the_first_samples_are_uploaded(run: RunDir, mlflow: Mlflow) -> None:
    run.evaluation(1, rows=1000)
    rebuild(run.root, SETTINGS)
    assert len(json.loads(mlflow.text("samples/step-000001.json"))["data"]) == ROWS_PER_TABLE


def test_status_set_by_an_earlier_attempt_is_repaired(run: RunDir, mlflow: Mlflow) -> None:
    run.event("attempt_started")
    run.append({"event": "attempt_started", "attempt": 2})
    run.append({"event": "attempt_ended", "attempt": 2, "status": "finished", "exit_code": 0})
    rebuild(run.root, SETTINGS)
    mlflow.client.set_terminated(mlflow.run().info.run_id, "FAILED")
    run.event("attempt_ended", status="failed", exit_code=8)
    assert rebuild(run.root, SETTINGS).status == 1
    assert mlflow.run().info.status == "FINISHED"
    assert mlflow.run().data.tags["ppoctl.attempt"] == "2"


def test_journal_without_attempts_does_not_change_the_status(run: RunDir, mlflow: Mlflow) -> None:
    run.step(1)
    rebuild(run.root, SETTINGS)
    mlflow.client.set_terminated(mlflow.run().info.run_id, "FINISHED")
    assert rebuild(run.root, SETTINGS).status == 0
    assert mlflow.run().info.status == "FINISHED"


def test_delete_removes_only_the_mlflow_data_of_the_run(run: RunDir, runs_dir: Path, mlflow: Mlflow) -> None:
    run.step(1)
    rebuild(run.root, SETTINGS)
    rebuild(run.root, SETTINGS.model_copy(update={"experiment": "other"}))
    RunDir(runs_dir, "second")
    rebuild(runs_dir / "second", SETTINGS)
    kept = kept_by_mlflow(run.root, SETTINGS.model_copy(update={"experiment": "a third"}))
    ids = kept.delete()
    assert len(ids) == 1
    assert mlflow.client.get_run(ids[0]).info.lifecycle_stage == "deleted"
    assert kept_by_mlflow(run.root, SETTINGS).ids == []
    assert len(kept_by_mlflow(runs_dir / "second", SETTINGS).ids) == 1
    assert mlflow.client.get_experiment_by_name("a third") is None


def test_delete_for_a_copied_run_keeps_the_original(run: RunDir, runs_dir: Path, mlflow: Mlflow) -> None:
    """A copied directory has the original's id until something is sent from it."""
    run.step(1)
    rebuild(run.root, SETTINGS)
    copy = runs_dir / "copy"
    shutil.copytree(run.root, copy)
    assert kept_by_mlflow(copy, SETTINGS).delete() == []
    assert mlflow.run().info.lifecycle_stage == "active"
    # If the original no longer exists, the copy is a moved run.
    run.root.rename(runs_dir / "moved")
    assert len(kept_by_mlflow(copy, SETTINGS).ids) == 1


def test_delete_without_a_database_does_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert kept_by_mlflow(run.root, SETTINGS).delete() == []
    assert not (tmp_path / "mlflow.db").exists()


@pytest.mark.parametrize("kind", ["refused", "no database", "unknown scheme", "locked"])
def test_rebuild_errors_are_one_line_with_a_repeat_command(run: RunDir, runs_dir: Path, kind: str) -> None:
    (runs_dir / "folder").mkdir()
    uris = {
        "refused": "http://user:secret@127.0.0.1:9/mlflow",
        "no database": f"sqlite:///{runs_dir / 'folder'}",
        "unknown scheme": "carrier-pigeon://roof",
        "locked": f"sqlite:///{runs_dir / 'mlflow.db'}",
    }
    with sqlite3.connect(runs_dir / "mlflow.db") as connection:
        if kind == "locked":
            connection.execute("BEGIN EXCLUSIVE")
        with pytest.raises(EnvironmentProblemError) as caught:
            rebuild(run.root, MlflowTracking(kind="mlflow", uri=uris[kind]))
        connection.rollback()
    connection.close()
    assert "\n" not in caught.value.message
    assert "secret" not in caught.value.message
    again = f"ppoctl track {quoted(run.root)}"
    if kind in ("no database", "unknown scheme"):  # the same call would fail again
        again += f" --set {quoted(f'tracking.uri=sqlite:///{runs_dir}/mlflow.db')}"
    assert caught.value.hint is not None
    assert caught.value.hint.endswith(again)


def test_path_invalid_in_a_database_uri_is_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "100%25")
    with pytest.raises(EnvironmentProblemError, match=r"set `tracking\.uri`"):
        rebuild(run.root, SETTINGS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["100%25"]


def test_rebuild_of_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is not a run directory"):
        rebuild(tmp_path, SETTINGS)


# Kill drill (fault injection). A forked child mirrors and kills itself at a chosen transaction of the database, so
# that every moment between two transactions is hit: before the experiment, the run, params, tags, each batch, the
# status.


def killed_at_commit(number: int, work: Callable[[], object]) -> bool:
    """Run `work` in a forked child that dies by SIGKILL before its n-th writing commit; return False if it ended."""
    child = os.fork()
    if child == 0:
        try:
            from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
            from sqlalchemy import event
            from sqlalchemy.orm import Session

            # A connection must not be shared across a fork: the child opens its own.
            for engine in SqlAlchemyStore._engine_map.values():
                engine.dispose(close=False)
            left = number

            def wrote(session: Session, _: object) -> None:
                session.info["wrote"] = True

            def count(session: Session) -> None:
                nonlocal left
                session.flush()
                left -= session.info.pop("wrote", False)  # MLflow commits after reading, too
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            event.listen(Session, "after_flush", wrote)
            event.listen(Session, "before_commit", count)
            work()
        except BaseException as problem:  # noqa: BLE001 - a child must not continue as a second pytest
            sys.stderr.write(f"{problem!r}\n")
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


@pytest.mark.parametrize("is_sent_again", [False, True], ids=["first sent", "sent again"])
def test_kill_at_some_transactions_doubles_and_loses_nothing(
    runs_dir: Path, mlflow: Mlflow, monkeypatch: pytest.MonkeyPatch, is_sent_again: bool
) -> None:
    kill_at(range(2, 200, 13), runs_dir, mlflow, monkeypatch, is_sent_again=is_sent_again)


@pytest.mark.ci("one in 13 transactions")
@pytest.mark.sampled(2)  # every second transaction of both
@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("is_sent_again", [False, True], ids=["first sent", "sent again"])
def test_kill_at_any_transaction_doubles_and_loses_nothing(
    runs_dir: Path, mlflow: Mlflow, monkeypatch: pytest.MonkeyPatch, is_sent_again: bool, first: int
) -> None:
    kill_at(range(first, 200, 2), runs_dir, mlflow, monkeypatch, is_sent_again=is_sent_again)


def kill_at(
    numbers: range, runs_dir: Path, mlflow: Mlflow, monkeypatch: pytest.MonkeyPatch, *, is_sent_again: bool
) -> None:
    """Mirror a run for each of these transactions, until there are no more, and kill it there."""
    # At most two points per batch: several small transactions instead of one.
    monkeypatch.setattr("ppoctl.show.tracking.mlflow_payloads.POINTS_PER_BATCH", 2)
    kills = 0
    for number in numbers:
        run = RunDir(runs_dir, "k" * number)
        run.event("attempt_started")
        run.evaluation(1)
        if is_sent_again:
            rebuild(run.root, SETTINGS)
        run.stage(2, "reward", **{"reward/score_mean": 0.5, "reward/score_std": math.inf})
        run.event("attempt_ended", status="finished", exit_code=0)
        if is_sent_again:
            damage_journal(run)
        if not killed_at_commit(number, lambda root=run.root: rebuild(root, SETTINGS)):
            break
        kills += 1
        rebuild(run.root, SETTINGS)
        found = mlflow.run(run.root.name)
        assert mlflow.points(run.root.name) == journaled_points(run.root), f"killed at commit {number}"
        assert found.info.status == "FINISHED"
        assert len(found.data.params) == 4
        assert found.data.tags["nonfinite/reward/score_std"] == "inf at step 2"
        assert mlflow.text("samples/step-000001.json", run.root.name) == TABLE
        assert num_missing(rebuild(run.root, SETTINGS)) == 0
    assert 6 <= kills * numbers.step < 100
