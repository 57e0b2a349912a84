"""`ppoctl logs`: the log files of a run as a user reads and follows them."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import CliResult, RunCli
from cli.test_cli_runs import trained
from fakes.components import fake_components, fake_recipe
from fakes.job import PPO_STEP_FUNCTIONS
from fakes.slurm import FakeSlurm
from ppoctl.cli.logs import _is_over
from ppoctl.core.errors import DataError
from ppoctl.run import new_run, session
from ppoctl.store import run_dir
from ppoctl.store.attempt import claim
from ppoctl.store.jobs import JobRecord, record
from ppoctl.store.journal import Journal
from ppoctl.store.log_files import Tail
from ppoctl.store.resume_plan import ResumePlan
from ppoctl.store.run_paths import RunPaths

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  "


@pytest.fixture
def made(tmp_path: Path) -> RunPaths:
    """Return a run without logs."""
    paths = RunPaths(tmp_path / "run")
    run_dir.create(paths, recipe_toml="", resolved={"steps": 1, **PPO_STEP_FUNCTIONS}, facts={"name": "run"})
    return paths


def write_log(paths: RunPaths, name: str, text: str) -> Path:
    path = paths.attempt(paths.newest_attempt) / name
    path.write_text(text, "utf-8")
    return path


def test_console_log_has_timestamped_messages_and_the_failure(tmp_path: Path, ask: RunCli) -> None:
    trained(tmp_path / "fake", fake_recipe(steps=2))
    result = ask("logs", tmp_path / "fake")
    lines = result.out.splitlines()
    assert all(re.match(STAMP, line) for line in lines)
    messages = [re.sub(STAMP, "", line) for line in lines]
    assert messages[0] == f"attempt 1 on {os.uname().nodename}, process {os.getpid()}"
    assert "step 1/2  rollout ..." in messages
    assert [line.split("  ")[0] for line in messages if re.search(r"  reward \d.* kl ", line)] == [
        "step 1/2",
        "step 2/2",
    ]
    assert result.code == 0


def test_console_log_ends_with_the_error_without_secrets(tmp_path: Path, ask: RunCli) -> None:
    layout, recipe = RunPaths(tmp_path / "fake"), fake_recipe(steps=1)
    new_run.create(layout, recipe, {"model": "a" * 64, "data": "b" * 64}, command="train")

    class Refuses:
        def submit(self, request: object) -> None:
            raise DataError("no answer from https://me:hunter2@scorer", hint="curl https://scorer\n")

        def close(self) -> None:
            pass

    components = replace(fake_components(recipe), scorer=Refuses())  # type: ignore[arg-type]
    with pytest.raises(DataError):
        session.attempt_run(session.OpenedRun(layout, {1: recipe}, components, plan=ResumePlan(0, ())))
    *_, error, hint = ask("logs", layout.root).out.splitlines()
    assert re.fullmatch(STAMP + r"error: no answer from https://scorer", error)
    assert re.fullmatch(STAMP + r"hint: curl https://scorer", hint)


def test_logs_before_any_attempt_show_the_newest_slurm_log(made: RunPaths, ask: RunCli) -> None:
    assert ask("logs", made.root) == CliResult(
        2,
        "",
        f"error: run `{made.root}` has no log `console` yet\n\nhint: ppoctl logs {made.root} --list\n",
    )
    for job in (9, 10):
        (made.logs / f"slurm-{job}.log").write_text(f"job {job}\n")
    assert ask("logs", made.root) == CliResult(0, "job 10\n", "")
    assert ask("logs", made.root, "--what", "slurm").out == (
        "==> logs/slurm-9.log <==\njob 9\n==> logs/slurm-10.log <==\njob 10\n"
    )
    claim(made)
    write_log(made, "console.log", "step 1/1\n")
    assert ask("logs", made.root).out == "step 1/1\n"


def test_logs_selects_files_by_name_and_kind(made: RunPaths, ask: RunCli) -> None:
    claim(made)
    write_log(made, "console.log", "first\n")
    claim(made)
    for name in ("console.log", "actor-10.log", "actor-9.log", "generator-0.log", "vllm-engine-0.log"):
        write_log(made, name, f"{name} says\nno end")
    assert ask("logs", made.root, "--attempt", 1).out == "first\n"
    assert ask("logs", made.root, "--what", "engines").out == "vllm-engine-0.log says\nno end\n"
    for name in ("actor-9", "actor-9.log"):
        assert ask("logs", made.root, "--what", name, "-n", 1).out == "no end\n"
    ranks = ask("logs", made.root, "--what", "ranks").out.splitlines()
    assert [line for line in ranks if line.startswith("==>")][:3] == [
        "==> logs/attempt-2/actor-9.log <==",
        "==> logs/attempt-2/actor-10.log <==",
        "==> logs/attempt-2/generator-0.log <==",
    ]
    assert ask("logs", made.root, "--list").out.splitlines() == [
        "attempt  file               size",
        "      1  console.log        6 B",
        "      2  console.log        23 B",
        "      2  actor-9.log        23 B",
        "      2  actor-10.log       24 B",
        "      2  generator-0.log    27 B",
        "      2  vllm-engine-0.log  29 B",
    ]
    parsed = json.loads(ask("logs", made.root, "--json", "--attempt", 1).out)
    assert parsed == {"files": [{"file": str(made.attempt(1) / "console.log"), "attempt": 1, "bytes": 6}]}
    assert ask("logs", made.root, "--attempt", 7) == CliResult(
        2,
        "",
        f"error: run `{made.root}` has no attempt `7` (its attempts: 1, 2)\n\nhint: ppoctl logs {made.root} --list\n",
    )


def test_logs_escapes_control_characters(made: RunPaths, ask: RunCli) -> None:
    claim(made)
    (made.attempt(1) / "actor-0.log").write_bytes(b"\x1b]0;owned\x07\xff\n")
    assert ask("logs", made.root, "--what", "actor-0").out == "\\x1b]0;owned\\x07\ufffd\n"


def test_tail_handles_late_growing_truncated_and_replaced_files(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    tail = Tail(path)

    def new() -> list[str]:
        return [line for lines in tail.new() for line in lines]

    assert new() == []
    path.write_text("a\nb")
    assert new() == ["a"]
    with path.open("a") as file:
        file.write("c\n")
    assert new() == ["bc"]
    path.write_text("d\n")
    assert new() == ["d"]
    path.unlink()
    assert new() == []
    other = tmp_path / "other"
    other.write_text("eeeeeeeeeee\nf")
    other.rename(path)
    assert new() == ["eeeeeeeeeee"]
    assert (tail.rest(), tail.rest()) == (["f"], [])


@pytest.fixture
def follower(made: RunPaths) -> Callable[..., subprocess.Popen[str]]:
    """Start `ppoctl logs RUN -f` in a separate process."""

    def begin(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "ppoctl", "logs", str(made.root), "-f", *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return begin


def test_follow_goes_from_slurm_log_to_attempts_and_ends_with_the_run(
    made: RunPaths, follower: Callable[..., subprocess.Popen[str]]
) -> None:
    record(made, JobRecord("7", 1.0, "resume"))
    process = follower()
    assert process.stdout is not None
    (made.logs / "slurm-7.log").write_text("begins\n")
    assert process.stdout.readline() == "begins\n"
    for number, code in ((1, 75), (2, 0)):
        journal = Journal(made, claim(made))
        journal.event("attempt_started", pid=os.getpid(), host="another")
        write_log(made, "console.log", f"attempt {number}\n")
        if number == 2:
            assert process.stdout.readline() == "ends\n"
        assert process.stdout.readline() == f"==> logs/attempt-{number}/console.log <==\n"
        assert process.stdout.readline() == f"attempt {number}\n"
        with (made.attempt(number) / "console.log").open("a") as file:
            file.write("ends")
        journal.event("attempt_ended", status="x", exit_code=code)
    out, err = process.communicate(timeout=30)
    assert (out, err, process.returncode) == ("ends\n", "", 0)


def test_follow_ends_when_slurm_has_no_more_jobs(made: RunPaths, cluster: FakeSlurm) -> None:
    record(made, JobRecord("7", 1.0, "resume"))
    cluster.has("7", "PENDING")
    events: list[dict[str, Any]] = []
    assert not _is_over(made, events, may_query=True)
    cluster.has("7", "CANCELLED")
    assert not _is_over(made, events, may_query=False)
    assert _is_over(made, events, may_query=True)
    events.append({"event": "attempt_started", "attempt": 1, "pid": 1, "host": "another", "at": 1.0, "job": "7"})
    events.append({"event": "attempt_ended", "attempt": 1, "status": "preempted", "exit_code": 75, "at": 2.0})
    assert _is_over(made, events, may_query=True)
    cluster.has("7", "RUNNING", restarts=1)
    assert not _is_over(made, events, may_query=True)
    cluster.goes_away()
    assert not _is_over(made, events, may_query=True)


def test_ctrl_c_ends_follow_cleanly(made: RunPaths, follower: Callable[..., subprocess.Popen[str]]) -> None:
    claim(made)
    write_log(made, "console.log", "hello\n")
    process = follower()
    assert process.stdout is not None
    assert process.stdout.readline() == "hello\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 0
