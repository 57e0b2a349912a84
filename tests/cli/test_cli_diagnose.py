"""`ppoctl diagnose` of runs on fake engines: the finding, the sample that shows it, and the exit code."""

import json
from pathlib import Path

from cli.conftest import RunCli
from fakes.components import fake_recipe
from fakes.job import play, stop_at
from ppoctl.core.metric_registry import REWARD_SCORE_MEAN
from ppoctl.show.diagnose.causes import read
from ppoctl.store.discard import roll_back
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths


def test_warning_is_printed_with_a_change_and_a_sample(tmp_path: Path, ask: RunCli) -> None:
    play(tmp_path / "fake")
    result = ask("diagnose", tmp_path / "fake")
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [
        "warning: step 1: responses are truncated: rollout/truncated_frac is `0.5`, above 0.1 "
        "(rollout.max_new_tokens is 6)",
        "    change: --set rollout.max_new_tokens=12",
        # the records of steps 1 and 2 have been removed
        f"    sample: ppoctl show {tmp_path}/fake --step 3 --sample 1  (prompt p8)",
        "note: `3` steps are too few to judge trends",
    ]


def test_failed_run_exits_with_5_and_the_sample_is_the_one_that_show_prints(tmp_path: Path, ask: RunCli) -> None:
    play(tmp_path / "fake", fake_recipe(actor={"optimizer": {"lr": 5.0}}, steps=1))
    result = ask("diagnose", tmp_path / "fake", "--json")
    found = json.loads(result.out)
    first = found["findings"][0]
    assert (result.code, found["ok"]) == (5, False)
    assert (first["level"], first["kind"], first["where"]) == ("error", "learning-rate-high", "step 1")
    assert first["hint"].startswith("--set actor.optimizer.lr=")
    listed = json.loads(ask("show", tmp_path / "fake", "--list", "--json").out)
    lowest = min(row["score"] for row in listed["samples"])
    assert listed["samples"][first["sample"]["row"]]["score"] == lowest


def test_run_without_metrics_is_refused(tmp_path: Path, ask: RunCli) -> None:
    play(tmp_path / "fake", fake_recipe(steps=1))
    RunPaths(tmp_path / "fake").journal.write_bytes(b"")
    result = ask("diagnose", tmp_path / "fake")
    assert result.code == 2
    assert "has no metrics yet" in result.err


def test_steps_that_were_undone_are_not_judged(tmp_path: Path) -> None:
    play(tmp_path / "fake", fake_recipe(steps=3, checkpoint={"every_steps": 1}))
    paths = RunPaths(tmp_path / "fake")
    assert read(paths.root).of(REWARD_SCORE_MEAN)[-1][0] == 3
    roll_back(RecordedRun(paths), 2)
    assert read(paths.root).of(REWARD_SCORE_MEAN)[-1][0] == 2


def test_step_without_scores_is_judged_by_its_responses(tmp_path: Path, ask: RunCli) -> None:
    stop_at(tmp_path / "fake", "1 reward starts")
    result = ask("diagnose", tmp_path / "fake")
    first, *_, last = result.out.splitlines()
    assert (result.code, last) == (0, "note: `0` steps are too few to judge trends")
    assert first.startswith("warning: step 1: responses are truncated")
