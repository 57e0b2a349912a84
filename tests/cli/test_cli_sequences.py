"""Commands that read a run directory get its step function from the directory alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.job import stop_at
from fakes.step_functions import NO_CRITIC, TWO_ROUNDS
from ppoctl.algorithms.trace import StepFunction
from ppoctl.cli.app import run


def stopped(root: Path, step_function: StepFunction, moment: str) -> None:
    """Make a run that saves every second step, stopped in its third."""
    stop_at(root, moment, choose=lambda recipe, step: step_function, checkpoint={"every_steps": 2})


def json_of(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert run([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


STEP_FUNCTIONS = {
    "no critic": (NO_CRITIC, "actor_update", ["states/actor/000002"]),
    "two rounds": (TWO_ROUNDS, "rollout.2", ["states/actor/000002", "states/critic/000002"]),
}
"""The step function, the stage before which the run is stopped, and the states that it has saved."""


@pytest.mark.parametrize("name", STEP_FUNCTIONS)
def test_run_with_another_step_function_and_its_missing_stage_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    step_function, begins, states = STEP_FUNCTIONS[name]
    stopped(tmp_path / "r", step_function, f"3 {begins} starts")
    status = json_of(capsys, "status", str(tmp_path / "r"))
    assert (status["steps_done"], status["saved_steps"]) == (2, [2])
    plan = json_of(capsys, "resume", str(tmp_path / "r"), "--plan")
    assert plan["from_step"] == 2
    actions = {item["item"]: item["action"] for item in plan["items"]}
    assert [item for item, action in actions.items() if action == "restored"] == states
    updates = [item for item, action in actions.items() if action == "replayed"]
    assert updates == (["steps/000003/60-critic_update"] if name == "two rounds" else [])
    assert {item for item, action in actions.items() if action == "run"} >= {"steps/000003/70-actor_update"}
    shown = json_of(capsys, "show", str(tmp_path / "r"), "--manifest", "--step", "3")
    assert len(shown["manifests"]) == sum(action in ("recalled", "replayed") for action in actions.values())

    (tmp_path / "r/steps/000003/10-rollout/manifest.json").unlink()
    plan = json_of(capsys, "resume", str(tmp_path / "r"), "--plan", code=8)
    missing = [item["item"] for item in plan["items"] if item["action"] == "missing"]
    assert missing == ["steps/000003/10-rollout"]
    assert "`steps/000003/10-rollout` (missing)" in plan["error"]["message"]
    assert plan["error"]["hint"].endswith(f"ppoctl resume {tmp_path}/r --allow-missing")
    assert "error" not in json_of(capsys, "resume", str(tmp_path / "r"), "--plan", "--allow-missing")
