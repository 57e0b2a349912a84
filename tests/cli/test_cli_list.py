"""`ppoctl runs` and `ppoctl rm`: a folder of runs, some of them broken; and names instead of paths."""

import io
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import CliResult, RunCli
from fakes.slurm import FakeSlurm
from ppoctl.cli.options import found_run, run_folders
from ppoctl.core.batch.sealed_json import seal, unseal
from ppoctl.store.attempt import claim
from ppoctl.store.jobs import JobRecord, record
from ppoctl.store.journal import NEWEST, Journal, read_lines, read_newest
from ppoctl.store.manifest import Manifest
from ppoctl.store.run_paths import RunPaths


@pytest.fixture
def make(played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: FakeSlurm) -> Callable[..., Journal]:
    """Return a function such that `make("a", reward=0.5)` makes the run `runs/a`, whose journal ends as given, `ago`
    seconds before now."""
    monkeypatch.chdir(tmp_path)

    def made(
        name: str, *, reward: float = 0.5, heldout: float = 0.25, ago: float = 60.0, **attempt: object
    ) -> Journal:
        paths = RunPaths(Path("runs") / name)
        shutil.copytree(played, paths.root)
        journal = Journal(paths, claim(paths))
        at = time.time() - ago
        journal.event("attempt_started", **{"at": at - 10, "pid": 2**22 + 1, "host": platform.node(), **attempt})
        for stage, figure, value in (
            ("reward", "reward/score_mean", reward),
            ("eval", "eval/heldout/pass_at_1", heldout),
        ):
            manifest = Manifest(stage, 1, name, (), "", {}, 1.0, at, journal.seq, {figure: value})
            journal.ensure(manifest)
        if not attempt:
            journal.event("attempt_ended", at=at, status="finished", exit_code=0)
        return journal

    return made


def pad_to(root: Path, size: int) -> None:
    """Enlarge the files of a folder to this total size; a second name of a file takes no more."""
    there = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    (root / "padding").write_bytes(bytes(size - there))
    os.link(root / "padding", root / "padding-again")


def names(result: CliResult) -> list[str]:
    return [line.split()[0] for line in result.out.splitlines()[1:]]


def test_runs_lists_each_run_newest_first(make: Callable[..., Journal], ask: RunCli) -> None:
    make("old", ago=7200)
    make("sweep/lr-1", ago=3600, reward=0.75, heldout=0.5)
    for name in ("old", "sweep/lr-1"):
        pad_to(Path("runs") / name, 3 << 20)
    result = ask("runs")
    assert result == CliResult(
        0,
        "run         state     steps  reward  evaluation    size   age     where\n"
        "sweep/lr-1  finished  1/1    0.75    heldout 0.5   3 MiB  1h 00m  -\n"
        "old         finished  1/1    0.5     heldout 0.25  3 MiB  2h 00m  -\n",
        "",
    )
    assert ask("runs", "runs/sweep").out.splitlines()[1].startswith("lr-1  finished  1/1 ")


def test_runs_shows_the_host_or_job_with_a_single_slurm_query(
    make: Callable[..., Journal], ask: RunCli, cluster: FakeSlurm
) -> None:
    make("here", pid=os.getpid(), at=time.time())
    for number, state in (("12", "RUNNING"), ("13", "PENDING")):
        record(
            make(f"in-{number}", host="node1", job=number, restart=0)._attempt.paths,
            JobRecord(number, 1.0, "resume"),
        )
        cluster.has(number, state, nodes="node1", restarts=int(state == "PENDING"))
    make("lost", host="elsewhere")
    make("killed", pid=2**22 + 1)
    parsed = {row["name"]: row for row in json.loads(ask("runs", "--json").out)["runs"]}
    assert {name: row["state"] for name, row in parsed.items()} == {
        "here": "running", "in-12": "running", "in-13": "requeued", "lost": "unknown", "killed": "killed",
    }  # fmt: skip
    assert {name: (row["host"], row["job"]) for name, row in parsed.items() if row["host"] or row["job"]} == {
        "here": (platform.node(), None), "in-12": ("node1", "12"), "in-13": (None, "13"), "lost": ("elsewhere", None),
    }  # fmt: skip
    assert [words for words in cluster.calls if words.startswith("squeue")] == cluster.calls[:1]
    at_work = {line.split()[0]: line.split("  ")[-1] for line in ask("runs").out.splitlines()[1:]}
    assert at_work["in-12"] == f"node1:{2**22 + 1}, job 12"
    assert at_work["in-13"] == "job 13"


def test_runs_lists_damaged_runs_and_skips_other_folders(make: Callable[..., Journal], ask: RunCli) -> None:
    for name in ("whole", "flipped", "keyless", "closed"):
        make(name)
    journal = Path("runs/flipped/journal.jsonl")
    journal.write_bytes(journal.read_bytes().replace(b'"seconds"', b'"secomds"', 1))
    shutil.rmtree("runs/keyless/recipes")
    Path("runs/closed/run.json").unlink()
    Path("runs/mlflow-artifacts/1").mkdir(parents=True)
    Path("runs/.gone.creating-1").mkdir()
    Path("runs/mlflow.db").touch()
    result = ask("runs", "--sort", "name")
    assert result.code == 0
    assert [line.split()[:4] for line in result.out.splitlines()[1:]] == [
        ["closed", "broken", "-", "-"],
        ["flipped", "broken", "-", "-"],
        ["keyless", "broken", "-", "-"],
        ["whole", "finished", "1/1", "0.5"],
    ]
    assert result.err.splitlines() == [
        "note: `runs/closed` is not a run directory",
        "note: `runs/flipped/journal.jsonl` is corrupt: line 1: it does not match its own checksum",
        "note: `runs/keyless/recipes/000001.json` is missing: the recipe that the run began with",
    ]


def test_runs_can_be_sorted_and_filtered(make: Callable[..., Journal], ask: RunCli) -> None:
    make("a", reward=0.1, heldout=0.9, ago=30)
    make("b", reward=float("nan"), heldout=0.2, ago=20)
    make("c", reward=0.7, heldout=0.4, ago=10, pid=2**22 + 1)
    Path("runs/a/more").write_bytes(b"0" * 100_000)
    orders = {by: names(ask("runs", "--sort", by)) for by in ("age", "reward", "eval", "name", "size")}
    assert orders == {**orders, "age": ["c", "b", "a"], "reward": ["c", "a", "b"], "eval": ["a", "c", "b"]}
    assert (orders["name"], orders["size"][0]) == (["a", "b", "c"], "a")
    assert names(ask("runs", "--state", "finished", "--sort", "name")) == ["a", "b"]
    assert ask("runs", "--state", "hung,lost") == CliResult(0, "", "none of 3 runs in `runs` is hung or lost\n")
    wrong = ask("runs", "--state", "runing")
    assert (wrong.code, wrong.err.splitlines()[0][:48]) == (2, "error: `--state runing` is not a state; states: ")


def test_runs_explains_a_folder_without_runs(make: Callable[..., Journal], ask: RunCli) -> None:
    assert ask("runs").err == (
        "error: there is no folder `runs`\n\nhint: ppoctl recipes list  # then train one of them\n"
    )
    make("q1")
    assert ask("runs", "runs/q1").err == "error: `runs/q1` is a run itself\n\nhint: ppoctl status runs/q1\n"
    Path("empty").mkdir()
    assert ask("runs", "empty") == CliResult(0, "", "there are no runs in `empty`\n")


def test_runs_folder_can_be_an_argument_or_an_option(make: Callable[..., Journal], ask: RunCli) -> None:
    make("q1")
    option, argument = (ask("runs", *words).out for words in (("--runs", "runs"), ("runs",)))
    assert re.sub(r"\d\ds", "", option) == re.sub(r"\d\ds", "", argument)  # it may be a second later
    assert ask("runs", "runs", "--runs", "other") == CliResult(
        2, "", "error: `runs` and `--runs other` both name the folder of run directories\n\nhint: ppoctl runs runs\n"
    )


def test_runs_notes_that_slurm_does_not_answer(make: Callable[..., Journal], ask: RunCli, cluster: FakeSlurm) -> None:
    record(make("q1", host="node1", job="12", restart=0)._attempt.paths, JobRecord("12", 1.0, "resume"))
    cluster.goes_away()
    result = ask("runs", "--wait", "0.1")
    assert result.out.splitlines()[1].split()[:2] == ["q1", "unknown"]
    assert result.err == (
        "note: Slurm did not answer about the jobs: `squeue` did not answer within 0.1 s; "
        "try again: ppoctl runs runs --wait 20\n"
    )


def test_runs_reads_only_the_end_of_a_long_journal(make: Callable[..., Journal]) -> None:
    journal = make("q1")
    for step in range(2, NEWEST + 20):
        journal.ensure(Manifest("values", step, str(step), (), "", {}, 1.0, 0.0, 1, {}))
    path = Path("runs/q1/journal.jsonl")
    whole, newest = read_lines(path), read_newest(path)
    assert newest[-NEWEST:] == whole[-NEWEST:]
    evaluations = [line for line in whole if line.get("stage") == "eval"]
    assert [line for line in newest if line.get("stage") == "eval"] == evaluations[-1:]
    events = [line for line in whole if line.get("event", "saved") != "saved"]
    assert [line for line in newest if line.get("event", "saved") != "saved"] == events
    assert len(newest) < len(whole)


def test_bare_name_refers_to_a_run_in_the_runs_folder(make: Callable[..., Journal], ask: RunCli) -> None:
    make("q1")
    Path("q1").mkdir()  # not a run
    assert ask("status", "q1").out.splitlines()[0] == "my: finished"
    assert ask("logs", "q1", "--list").code == 0
    assert ask("compare", "q1", "runs/q1").out.splitlines()[-1] == "no difference"
    shutil.copytree("runs/q1", "q1", dirs_exist_ok=True)
    Path("runs/q1/run.json").unlink()
    assert ask("status", "q1").out.splitlines()[0] == "my: finished"  # the run in the present folder
    Path("runs/q1/run.json").touch()
    shutil.rmtree("q1")
    assert found_run(Path("q1/logs")) == Path("runs/q1/logs")
    for path in (Path("q2"), Path("q2/logs"), Path("slurm"), Path("runs/q1").absolute()):
        assert found_run(path) == path
    wrong = ask("status", "q2")
    says = "error: `q2` is not a run directory, and there is no such run in `runs`\n\nhint: "
    assert wrong == CliResult(2, "", f"{says}ppoctl runs\n")
    shutil.copytree("runs/q1", "elsewhere/q2")
    Path("elsewhere/q2/run.json").touch()
    assert ask("logs", "q2", "--list").err == f"{says}ppoctl logs elsewhere/q2\n"
    assert ask("logs", "q2", "--runs", "elsewhere").err.startswith("error: `elsewhere/q2/run.json` is corrupt")
    assert ask("status", "q3", "--runs", "elsewhere").err.endswith("ppoctl runs elsewhere\n")


def test_runs_of_a_folder_and_its_subfolders_are_found(tmp_path: Path) -> None:
    for name in ("b", "sweep/a", "sweep/deep/c", ".hidden"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").touch()
    assert [str(path.relative_to(tmp_path)) for path in run_folders(tmp_path)] == ["b", "sweep/a"]
    assert run_folders(tmp_path / "none") == []


# --- ppoctl rm ----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def types(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`types("y\n")`: a user at a terminal answers this."""

    def typed(answer: str) -> None:
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
        monkeypatch.setenv("NO_COLOR", "1")

    return typed


def there(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def mirrored(name: str, **tracking: str) -> None:
    """Make a run one that MLflow has."""
    for path in (RunPaths(Path("runs") / name).recipe_from(1), RunPaths(Path("runs") / name).recipe_resolved):
        recipe = unseal(path.read_text("ascii"))
        path.write_text(seal({**recipe, "tracking": {**recipe["tracking"], "kind": "mlflow", **tracking}}), "ascii")


def test_rm_deletes_a_run_only_after_confirmation(
    make: Callable[..., Journal], ask: RunCli, types: Callable[[str], None]
) -> None:
    for name in ("q1", "q2", "q3"):
        make(name)
        pad_to(Path("runs") / name, 3 << 20)
    mirrored("q2")
    for answer in ("\n", "n\n", "", "yess\n"):
        types(answer)
        result = ask("rm", "q1")
        assert result == CliResult(
            0,
            "",
            "runs/q1: finished, 3 MiB, 1 of 1 steps, last evaluation heldout 0.25\n"
            "delete it? [y/N] nothing was deleted\n",
        )
    types("y\n")
    assert ask("rm", "q1").out == "deleted runs/q1 (3 MiB)\n"
    assert there("runs") == ["q2", "q3"]
    types("Yes\n")
    result = ask("rm", "q3", "runs/q2", "q2")
    assert result.err.splitlines()[-1] == "delete all 2 and their MLflow runs? [y/N] "
    assert result.out == "deleted runs/q3 (3 MiB)\ndeleted runs/q2 (3 MiB)\n"
    assert there("runs") == []


def test_rm_without_a_terminal_requires_yes(make: Callable[..., Journal], ask: RunCli) -> None:
    make("q1")
    result = ask("rm", "q1")
    assert result == CliResult(
        2,
        "",
        "error: `ppoctl rm` must ask before it deletes, and there is no terminal\n\nhint: ppoctl rm runs/q1 --yes\n",
    )
    parsed = json.loads(ask("rm", "q1", "--yes", "--json").out)
    assert [(each["run"], each["mlflow"]) for each in parsed["deleted"]] == [("runs/q1", [])]
    says = "error: `q1` is not a run directory, and there is no such run in `runs`"
    assert ask("rm", "q1", "--yes").err.splitlines()[0] == says


def test_rm_refuses_running_runs_and_then_deletes_nothing(
    make: Callable[..., Journal], ask: RunCli, cluster: FakeSlurm
) -> None:
    make("idle")
    make("here", pid=1, at=time.time())
    make("away", host="elsewhere", ago=0)
    for number in ("12", "13"):
        layout = make(f"in-{number}", host="node1", job=number, restart=0)._attempt.paths
        record(layout, JobRecord(number, 1.0, "resume"))
    cluster.has("12", "RUNNING", nodes="node1")
    cluster.has("13", "PENDING", reason="Resources")
    for name, says in (
        ("here", "is running: attempt 2 is running as process 1 of this host"),
        ("in-12", "is running: attempt 2 is running in job 12 on node1"),
        ("in-13", "is pending: job 13 waits for `Resources`"),
        ("away", "may be running: attempt 2 is running or killed on elsewhere"),
    ):
        result = ask("rm", "idle", name, "--yes")
        assert result.code == 8, name
        assert result.err.startswith(f"error: run `runs/{name}` {says}"), result.err
        assert result.err.endswith(f"hint: ppoctl stop runs/{name}\n")
    requeued = make("requeued", host="node1", job="14", restart=0)
    requeued.event("attempt_ended", status="preempted", exit_code=75)
    cluster.goes_away()
    for name in ("in-13", "requeued"):
        result = ask("rm", "idle", name, "--yes", "--wait", "0.1")
        assert (result.code, result.err.split(":")[1]) == (8, f" run `runs/{name}` may be running")
    assert len(there("runs")) == 6


def test_rm_deletes_a_run_whose_remote_attempt_is_long_silent(make: Callable[..., Journal], ask: RunCli) -> None:
    make("away", host="elsewhere", ago=10 * 24 * 3600)
    assert ask("rm", "away", "--yes").code == 0
    assert there("runs") == []


def test_rm_deletes_a_damaged_run_unless_running(make: Callable[..., Journal], ask: RunCli) -> None:
    for name, attempt in (("flipped", {}), ("keyless", {}), ("alive", {"pid": 1, "at": time.time()})):
        make(name, **attempt)  # type: ignore[arg-type]
    for name in ("flipped", "alive"):
        journal = Path(f"runs/{name}/journal.jsonl")
        journal.write_bytes(journal.read_bytes().replace(b'"seconds"', b'"secomds"', 1))
    Path("runs/keyless/run.json").unlink()
    result = ask("rm", "alive", "--yes")
    assert result.err == (
        "error: run `runs/alive` is in use: attempt 2 is process 1 on this host\n\nhint: ppoctl stop runs/alive\n"
    )
    assert ask("rm", "flipped", "--yes").code == 0
    result = ask("rm", "keyless", "--yes")
    assert result == CliResult(
        8,
        "",
        "error: the MLflow settings of run `runs/keyless` cannot be read: `runs/keyless` is not a run directory\n\n"
        "hint: delete only the directory: ppoctl rm runs/keyless --keep-tracking\n",
    )
    assert ask("rm", "keyless", "--yes", "--keep-tracking").code == 0
    assert there("runs") == ["alive"]


def test_rm_deletes_nothing_if_mlflow_does_not_answer(make: Callable[..., Journal], ask: RunCli) -> None:
    make("a")
    make("q1")
    mirrored("q1", uri="http://127.0.0.1:9")
    result = ask("rm", "a", "q1", "--yes")
    assert result.code == 3
    first, _, hint = result.err.splitlines()
    assert first.startswith("error: cannot query MLflow at `http://127.0.0.1:9` about run `runs/q1`: ")
    assert first.endswith("; nothing was deleted")
    assert hint == "hint: try again, or delete the directory only: ppoctl rm runs/q1 --keep-tracking"
    assert there("runs") == ["a", "q1"]
    assert ask("rm", "a", "q1", "--yes", "--keep-tracking").code == 0


def test_rm_finishes_an_interrupted_removal(make: Callable[..., Journal], ask: RunCli) -> None:
    make("q1")
    Path("runs/.q0.removing-1a2b3c4d/states").mkdir(parents=True)
    Path("elsewhere").mkdir()
    Path("runs/q1").rename("elsewhere/q1")
    Path("runs/q1").symlink_to(Path("elsewhere/q1").absolute())
    assert ask("rm", "q1", "--yes").code == 0
    assert there("elsewhere") == []
    assert there("runs") == [".q0.removing-1a2b3c4d"]
    make("q2")
    assert ask("rm", "q2", "--yes").code == 0
    assert there("runs") == []
