"""Output of commands about an existing run, for runs on fakes: status, the end of a training, samples, resumes."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import RunCli
from fakes.components import fake_components, fake_recipe
from ppoctl.cli import resume, sample_screen, summary
from ppoctl.cli import train as train_module
from ppoctl.cli.app import app, run
from ppoctl.recipe.fingerprint import fingerprint
from ppoctl.recipe.loading.write import recipe_as_toml
from ppoctl.recipe.schema import Recipe
from ppoctl.run import new_run, session
from ppoctl.run.mlflow_extras import contract_of
from ppoctl.run.run_recipe import as_recorded, newest_recorded, recipe_of
from ppoctl.show.report.expectations import RunResult
from ppoctl.show.report.shown_sample import ShownSample
from ppoctl.store import run_dir
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import ResumePlan
from ppoctl.store.run_paths import RunPaths

UNMET = {"reward/score_mean": {"min": 2.0}, "value/clip_frac": {"max": 1.0}}


def trained(root: Path, recipe: Recipe) -> RunResult:
    """Return a run directory as `train` makes it, and an attempt on it."""
    paths = RunPaths(root)
    if not root.exists():
        new_run.create(paths, recipe, {"model": "a" * 64, "data": "b" * 64}, command="train")
    opened = session.OpenedRun(paths, {1: recipe}, fake_components(recipe), plan=ResumePlan(start=0, items=()))
    return session.attempt_run(opened)


def test_run_below_its_expectations_is_unmet_in_all_commands(tmp_path: Path, ask: RunCli) -> None:
    root = tmp_path / "fake"
    trained(root, fake_recipe(steps=2, expect=UNMET))
    result = ask("status", root)
    assert result.out.splitlines()[0] == "fake: unmet"
    expected = [line.split() for line in result.out.splitlines()[-3:]]
    assert expected[0] == ["expected", "reached", "bound"]
    assert [(row[0], row[-1]) for row in expected[1:]] == [("reward/score_mean", "UNMET"), ("value/clip_frac", "met")]
    assert result.err.endswith(f"train longer: ppoctl resume {root} --set steps=4\n")
    parsed = json.loads(ask("status", root, "--json").out)
    assert (parsed["state"], [verdict["met"] for verdict in parsed["expect"]]) == ("unmet", [False, True])
    assert parsed["figures"]["time/rollout_s"] >= 0


def test_train_json_reports_unmet_expectations(tmp_path: Path, ask: RunCli) -> None:
    ended = trained(tmp_path / "fake", fake_recipe(steps=2, expect=UNMET))
    before = list(app.registered_commands)

    def end_for_the_test(json: train_module.JsonOption = False) -> None:
        summary.print_summary(ended, as_json=json)

    app.command("end-for-the-test")(end_for_the_test)
    try:
        result = ask("end-for-the-test", "--json")
        plain = ask("end-for-the-test")
    finally:
        app.registered_commands[:] = before
    parsed = json.loads(result.out)
    assert (result.code, parsed["error"]["exit_code"], parsed["state"]) == (5, 5, "unmet")
    assert set(parsed) == {"run", "state", "figures", "expect", "error"}
    assert plain.err.splitlines()[-1] == f"hint: ppoctl resume {ended.paths.root} --set steps=4"
    assert plain.out.splitlines()[-1] == f"run: {ended.paths.root}"


HOSTILE = "\x1b]0;owned\x07\u202etxt\x00\r\x9b2J caf\u00e9"


def test_sample_screen_escapes_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    sample = ShownSample(
        step=1, row=0, prompt_id=HOSTILE, sample=0, stamp="actor@0", finish="terminated", prompt=HOSTILE + "\nnext",
        response="",
        answer=HOSTILE, outcome="ok", score=1.0, tokens=[5, 6], pieces=[HOSTILE, "b"], logprobs=[-1.0, -2.0],
        advantages=[0.5, -0.5], values=[0.0, 0.0],
    )  # fmt: skip
    sample_screen.print_sample(sample)
    out = capsys.readouterr().out
    assert all(char == "\n" or char.isprintable() for char in out)
    assert "\\x1b]0;owned\\x07\\u202etxt\\x00\\r\\x9b2J caf\u00e9\nnext\n" in out


def written(**keys: Any) -> Recipe:
    """Return a recipe that is unchanged when it is read from the run's file."""
    rows = {"format": "gsm8k", "path": "/nowhere/rows.jsonl"}
    absolute = {
        "model": {"path": "/nowhere/model", "dtype": "float32"},
        "data": {"train": rows, "eval": {"held": rows}},
    }
    return fake_recipe(reward={"kind": "gsm8k"}, **absolute, **keys)


def test_run_of_an_earlier_version_still_drops_special_tokens(tmp_path: Path) -> None:
    """A stage that an earlier version committed is reused, so the run must not switch to the new default."""
    paths, new = RunPaths(tmp_path / "fake"), written()
    recipe = new.model_copy(update={"rollout": new.rollout.model_copy(update={"special_tokens": "drop"})})
    line, recorded = 'special_tokens = "drop"\n', as_recorded(recipe)
    del recorded["rollout"]["special_tokens"]
    run_dir.create(paths, recipe_toml=recipe_as_toml(recipe).replace(line, ""), resolved=recorded, facts={})
    assert recipe_of(RecordedRun(paths)) == newest_recorded(RecordedRun(paths)) == recipe
    assert recipe_of(RecordedRun(paths), ["rollout.special_tokens=keep"]).rollout.special_tokens == "keep"
    paths.recipe_toml.write_text(recipe_as_toml(recipe).replace(line, line.replace("drop", "keep")))
    assert recipe_of(RecordedRun(paths)).rollout.special_tokens == "keep"
    nothing = fingerprint(new, ["rollout.stop_strings"])
    assert fingerprint(recipe, ["rollout.special_tokens"]) == nothing
    assert fingerprint(new, ["rollout.special_tokens"]) != nothing


def test_resume_of_a_finished_run_starts_no_attempt(tmp_path: Path, ask: RunCli) -> None:
    root = tmp_path / "fake"
    trained(root, written(steps=2))
    ask("status", root)  # it reads the output of the training, too
    result = ask("resume", root)
    assert result.code == 0
    over = "all steps are done: nothing is left to do"
    assert result.err == f"{over}; more steps: ppoctl resume {root} --set steps=4\n"
    assert result.out.splitlines()[-1] == f"run: {root}"
    assert json.loads(ask("resume", root, "--json").out)["state"] == "finished"
    assert RunPaths(root).attempts() == [1]


def test_run_that_until_ended_is_finished_in_all_commands(tmp_path: Path, ask: RunCli) -> None:
    root, entropy = tmp_path / "fake", "policy/entropy_mean"
    expect = {"reward/score_mean": {"max": 2.0}}
    ended = trained(root, written(steps=4, until={entropy: {"max": 9.0}}, expect=expect))
    value = next(line["figures"][entropy] for line in ended.lines if entropy in line.get("figures", {}))
    reason = f"`{entropy}` is {value:.4g} (at most 9)"
    assert ended.early_end == reason
    assert contract_of(RunPaths(root))["ppoctl.contract"] == "met"
    log = (RunPaths(root).console_log(1)).read_text("utf-8")
    assert f"the run ends after step 1 of 4: {reason}" in log
    status = ask("status", root).out
    assert status.splitlines()[0] == "fake: finished"
    assert f"`[until]` ended the run after step 1: {reason}" in " ".join(status.split())
    assert ["steps", "1", "of", "4"] in [line.split() for line in status.splitlines()]
    result, longer = ask("resume", root), f"ppoctl resume {root} --set until={{}}"
    assert result.err == f"`[until]` ended the run, {reason}: nothing is left to do; more steps: {longer}\n"
    assert result.code == 0
    assert json.loads(ask("resume", root, "--json").out)["state"] == "finished"
    assert json.loads(ask("resume", root, "--plan", "--json").out)["steps_to_come"] == []
    result = ask("resume", root, "--set", "steps=8")
    assert (result.code, result.out, result.err.splitlines()[-3:]) == (
        2,
        "",
        [f"error: `steps` is `8`, but `[until]` ended the run after step 1: {reason}", "", f"hint: {longer}"],
    )
    for changed in ("until={}", f"until.'{entropy}'.max=0.1"):
        result = ask("resume", root, "--plan", "--json", "--set", changed, "--set", "steps=8")
        assert json.loads(result.out)["steps_to_come"] == [2, 8], result
    assert RunPaths(root).attempts() == [1]


def test_unmet_run_that_until_ended_continues_without_until(tmp_path: Path, ask: RunCli) -> None:
    root = tmp_path / "fake"
    trained(root, written(steps=4, until={"policy/entropy_mean": {"max": 9.0}}, expect=UNMET))
    ask("status", root)
    result = ask("resume", root)
    assert (result.code, result.err.splitlines()[-1]) == (5, f"hint: ppoctl resume {root} --set until={{}}")


def test_summary_goes_to_stdout_while_library_output_is_separated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "fake"
    trained(root, written(steps=2))
    capfd.readouterr()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):  # as a process has them; these are separated
        monkeypatch.setattr(f"sys.{name}", open(descriptor, "w", closefd=False))  # noqa: SIM115
    assert run(["resume", str(root)]) == 0
    result = capfd.readouterr()
    assert result.out.splitlines()[0].split() == ["metric", "step", "first", "step", "last"]
    assert result.out.splitlines()[-1] == f"run: {root}"
    assert result.err.startswith("all steps are done")


def test_finished_run_with_relative_paths_is_finished(tmp_path: Path) -> None:
    root = tmp_path / "fake"
    trained(root, fake_recipe(steps=2))
    assert resume._result_if_done(RecordedRun(RunPaths(root))) is not None


def test_resume_of_an_unmet_run_returns_the_same_exit_code(tmp_path: Path, ask: RunCli) -> None:
    root = tmp_path / "fake"
    trained(root, written(steps=2, expect=UNMET))
    ask("status", root)
    result = ask("resume", root)
    assert (result.code, result.err.splitlines()[-1]) == (5, f"hint: ppoctl resume {root} --set steps=4")
    assert result.err.splitlines()[0] == "all steps are done: nothing is left to do"


def test_resume_prints_notes_on_doubtful_keys(tmp_path: Path, ask: RunCli) -> None:
    root = tmp_path / "fake"
    trained(root, written(steps=2))
    doubtful = ("steps=4", "ppo.policy_loss.kind=reinforce", "ppo.epochs=2")
    result = ask("resume", root, *(word for key in doubtful for word in ("--set", key)))
    [note] = [line for line in result.err.splitlines() if "note: --set: the loss has no ratio" in line]
    assert "off-policy" in note
    assert result.code != 0


def test_run_path_is_printed_as_typed(tmp_path: Path, ask: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "fake", written(steps=2))
    monkeypatch.chdir(tmp_path)
    result = ask("resume", "fake")
    assert result.out.splitlines()[-1] == "run: fake"
    assert result.err.endswith("more steps: ppoctl resume fake --set steps=4\n")


def test_run_with_an_edited_recipe_is_not_finished(tmp_path: Path) -> None:
    root = tmp_path / "fake"
    trained(root, written(steps=2))
    file = RunPaths(root).recipe_toml
    assert "steps = 2\n" in file.read_text("utf-8")
    file.write_text(file.read_text("utf-8").replace("steps = 2\n", "steps = 3\n", 1), "utf-8")
    assert resume._result_if_done(RecordedRun(RunPaths(root))) is None
