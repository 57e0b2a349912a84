"""`ppoctl runs`: a row for each run of a folder, whatever is wrong with some of them; and names instead of paths."""

import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from fakes.job import play
from fakes.slurm import FakeSlurm
from fakes.sockets import fake_recipe
from ppoctl.cli.app import run
from ppoctl.cli.options import run_folders
from ppoctl.store.attempt import claim
from ppoctl.store.jobs import JobRecord, record
from ppoctl.store.journal import NEWEST, Journal, read_lines, read_newest
from ppoctl.store.layout import RunLayout
from ppoctl.store.manifest import Manifest


class Said(NamedTuple):
    code: int
    out: str
    err: str


Ask = Callable[..., Said]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("played") / "q1"
    play(root, fake_recipe(steps=1))
    return root


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    found = FakeSlurm(tmp_path / "slurm")
    found.use(monkeypatch)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return found


@pytest.fixture
def make(played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: FakeSlurm) -> Callable[..., Journal]:
    """`make("a", reward=0.5)`: the run `runs/a`, whose journal ends as told, `ago` seconds before now."""
    monkeypatch.chdir(tmp_path)

    def made(
        name: str, *, reward: float = 0.5, heldout: float = 0.25, ago: float = 60.0, **attempt: object
    ) -> Journal:
        layout = RunLayout(Path("runs") / name)
        shutil.copytree(played, layout.root)
        journal = Journal(layout, claim(layout))
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


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    def asked(*words: object) -> Said:
        code = run([str(word) for word in words])
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    return asked


def pad_to(root: Path, size: int) -> None:
    """Make the files of a folder so large together; a second name of one takes no more."""
    there = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    (root / "padding").write_bytes(bytes(size - there))
    os.link(root / "padding", root / "padding-again")


def names(said: Said) -> list[str]:
    return [line.split()[0] for line in said.out.splitlines()[1:]]


def test_each_run_is_a_row_the_newest_first(make: Callable[..., Journal], ask: Ask) -> None:
    make("old", ago=7200)
    make("sweep/lr-1", ago=40, reward=0.75, heldout=0.5)
    for name in ("old", "sweep/lr-1"):
        pad_to(Path("runs") / name, 3 << 20)
    said = ask("runs")
    assert said == Said(
        0,
        "run         state     steps  reward  evaluation    size   age     at work\n"
        "sweep/lr-1  finished  1/1    0.75    heldout 0.5   3 MiB  40s     -\n"
        "old         finished  1/1    0.5     heldout 0.25  3 MiB  2h 00m  -\n",
        "",
    )
    assert ask("runs", "runs/sweep").out.splitlines()[1].startswith("lr-1  finished  1/1 ")


def test_a_run_at_work_says_where_and_slurm_is_asked_once(
    make: Callable[..., Journal], ask: Ask, cluster: FakeSlurm
) -> None:
    make("here", pid=os.getpid(), at=time.time())
    for number, state in (("12", "RUNNING"), ("13", "PENDING")):
        record(
            make(f"in-{number}", host="node1", job=number, restart=0)._attempt.layout,
            JobRecord(number, 1.0, "resume"),
        )
        cluster.has(number, state, nodes="node1", restarts=int(state == "PENDING"))
    make("lost", host="elsewhere")
    make("killed", pid=2**22 + 1)
    told = {row["name"]: row for row in json.loads(ask("runs", "--json").out)["runs"]}
    assert {name: row["state"] for name, row in told.items()} == {
        "here": "running", "in-12": "running", "in-13": "requeued", "lost": "unknown", "killed": "killed",
    }  # fmt: skip
    assert {name: (row["host"], row["job"]) for name, row in told.items() if row["host"] or row["job"]} == {
        "here": (platform.node(), None), "in-12": ("node1", "12"), "in-13": (None, "13"), "lost": ("elsewhere", None),
    }  # fmt: skip
    assert [words for words in cluster.asked if words.startswith("squeue")] == cluster.asked[:1]
    at_work = {line.split()[0]: line.split("  ")[-1] for line in ask("runs").out.splitlines()[1:]}
    assert at_work["in-12"] == f"node1:{2**22 + 1}, job 12"
    assert at_work["in-13"] == "job 13"


def test_a_broken_run_is_a_row_and_what_is_no_run_is_passed_over(make: Callable[..., Journal], ask: Ask) -> None:
    for name in ("whole", "flipped", "keyless", "closed"):
        make(name)
    journal = Path("runs/flipped/journal.jsonl")
    journal.write_bytes(journal.read_bytes().replace(b'"seconds"', b'"secomds"', 1))
    shutil.rmtree("runs/keyless/recipes")
    Path("runs/closed/run.json").unlink()
    Path("runs/mlflow-artifacts/1").mkdir(parents=True)
    Path("runs/.gone.creating-1").mkdir()
    Path("runs/mlflow.db").touch()
    said = ask("runs", "--sort", "name")
    assert said.code == 0
    assert [line.split()[:4] for line in said.out.splitlines()[1:]] == [
        ["closed", "broken", "-", "-"],
        ["flipped", "broken", "-", "-"],
        ["keyless", "broken", "-", "-"],
        ["whole", "finished", "1/1", "0.5"],
    ]
    assert said.err.splitlines() == [
        "note: `runs/closed` is not a run directory",
        "note: `runs/flipped/journal.jsonl` is corrupt: line 1: it does not match its own checksum",
        "note: `runs/keyless/recipes/000001.json` is missing: the recipe that the run began with",
    ]


def test_rows_are_sorted_and_chosen(make: Callable[..., Journal], ask: Ask) -> None:
    make("a", reward=0.1, heldout=0.9, ago=30)
    make("b", reward=float("nan"), heldout=0.2, ago=20)
    make("c", reward=0.7, heldout=0.4, ago=10, pid=2**22 + 1)
    Path("runs/a/more").write_bytes(b"0" * 100_000)
    orders = {by: names(ask("runs", "--sort", by)) for by in ("age", "reward", "eval", "name", "size")}
    assert orders == {**orders, "age": ["c", "b", "a"], "reward": ["c", "a", "b"], "eval": ["a", "c", "b"]}
    assert (orders["name"], orders["size"][0]) == (["a", "b", "c"], "a")
    assert names(ask("runs", "--state", "finished", "--sort", "name")) == ["a", "b"]
    assert ask("runs", "--state", "hung,lost") == Said(0, "", "none of 3 runs in `runs` is hung or lost\n")
    wrong = ask("runs", "--state", "runing")
    assert (wrong.code, wrong.err.splitlines()[0][:36]) == (2, "error: `--state runing` is none of b")


def test_a_folder_that_holds_no_runs_is_told(make: Callable[..., Journal], ask: Ask) -> None:
    assert ask("runs").err == (
        "error: there is no folder `runs` here, so no runs\n\n"
        "hint: ppoctl recipes list  # train one of them: ppoctl train RECIPE\n"
    )
    make("q1")
    assert ask("runs", "runs/q1").err == "error: `runs/q1` is a run itself\n\nhint: ppoctl status runs/q1\n"
    Path("empty").mkdir()
    assert ask("runs", "empty") == Said(0, "", "no runs in `empty`\n")


def test_a_silent_slurm_is_a_note(make: Callable[..., Journal], ask: Ask, cluster: FakeSlurm) -> None:
    record(make("q1", host="node1", job="12", restart=0)._attempt.layout, JobRecord("12", 1.0, "resume"))
    cluster.goes_away()
    said = ask("runs", "--wait", "0.1")
    assert said.out.splitlines()[1].split()[:2] == ["q1", "unknown"]
    assert said.err == (
        "note: Slurm says nothing of the jobs: `squeue` gave no answer within 0.1 s; "
        "ask again: ppoctl runs runs --wait 20\n"
    )


def test_of_a_long_journal_only_what_a_list_says_is_read(make: Callable[..., Journal]) -> None:
    journal = make("q1")
    for step in range(2, NEWEST + 20):
        journal.ensure(Manifest("values", step, str(step), (), "", {}, 1.0, 0.0, 1, {}))
    path = Path("runs/q1/journal.jsonl")
    whole, newest = read_lines(path), read_newest(path)
    assert newest[-NEWEST:] == whole[-NEWEST:]
    evaluations = [line for line in whole if line.get("stage") == "eval"]
    assert [line for line in newest if line.get("stage") == "eval"] == evaluations[-1:]
    assert [line for line in newest if "event" in line] == [line for line in whole if "event" in line]
    assert len(newest) < len(whole)


def test_a_bare_name_is_a_run_of_the_folder(make: Callable[..., Journal], ask: Ask) -> None:
    make("q1")
    Path("q1").mkdir()  # no run
    assert ask("status", "q1").out.splitlines()[0] == "q1: finished"
    assert ask("logs", "q1", "--list").code == 0
    assert ask("compare", "q1", "runs/q1").out.splitlines()[-1] == "no difference"
    shutil.copytree("runs/q1", "q1", dirs_exist_ok=True)
    Path("runs/q1/run.json").unlink()
    assert ask("status", "q1").out.splitlines()[0] == "q1: finished"  # the one that is here
    wrong = ask("status", "q2")
    assert wrong == Said(2, "", "error: `q2` is not a run directory\n\nhint: ppoctl runs\n")


def test_runs_of_a_folder_and_of_its_folders_are_found(tmp_path: Path) -> None:
    for name in ("b", "sweep/a", "sweep/deep/c", ".hidden"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").touch()
    assert [str(path.relative_to(tmp_path)) for path in run_folders(tmp_path)] == ["b", "sweep/a"]
    assert run_folders(tmp_path / "none") == []
