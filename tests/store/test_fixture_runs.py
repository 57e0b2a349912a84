"""Runs written by the first commit of a format can be resumed by every later one (see `fixture_runs`)."""

import json
from pathlib import Path

import pytest

from fakes.job import play
from ppoctl.cli.app import run
from ppoctl.run.loop.early_end import metrics_by_step
from ppoctl.run.run_recipe import recorded_recipes
from ppoctl.store.journal import read_lines
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import RunPaths
from store.fixture_runs import STOPS, bring, recipe


@pytest.mark.parametrize("name", STOPS)
def test_fixture_run_is_intact_and_resumes_to_todays_result(tmp_path: Path, name: str) -> None:
    root = bring(name, tmp_path)
    layout, before = RunPaths(root), RunPaths(root).ledger.read_bytes()
    assert not plan_resume(RecordedRun(layout)).broken
    # The fakes of that time had evaluation sets that no key named.
    assert recorded_recipes(RecordedRun(layout))[1] == recipe().model_copy(
        update={"data": recipe().data.model_copy(update={"eval": {}})}
    )
    play(root, recipe(steps=5))
    play(tmp_path / "today", recipe(steps=5))
    assert layout.ledger.read_bytes().startswith(before)
    kept, today = (metrics_by_step(read_lines(each.journal)) for each in (layout, RunPaths(tmp_path / "today")))
    for step in range(6):
        # `trained/` counts start at the first step that counted them.
        left_out = ("trained/", "eval/") if step == 3 else ("trained/",)
        metrics = {name: value for name, value in kept(step).items() if not name.startswith(left_out)}
        known = {name: today(step)[name] for name in metrics}  # not metrics that were added since
        assert known
        assert metrics == pytest.approx(known, rel=1e-4, abs=1e-6), step


@pytest.mark.parametrize("name", STOPS)
def test_fixture_run_can_be_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    root = bring(name, tmp_path)
    assert [RecordedRun(RunPaths(root)).outlines.at(step).story for step in (1, 2)] == ["critic_only", "ppo"]
    assert run(["status", str(root), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["steps_done"] == (2 if STOPS[name] else 3)
    assert status["saved_steps"] == ([2] if STOPS[name] else [2, 3])
    assert run(["show", str(root), "--manifest", "--step", "3"]) == 0
    assert "70-actor_update" not in capsys.readouterr().out
