"""The time per step that a reward trial predicts."""

from types import SimpleNamespace
from typing import Any

from fakes.components import fake_recipe
from ppoctl.core.batch.scores import Score
from ppoctl.rewards.trial import ATTACKS
from ppoctl.run.reward_trial import _seconds


def test_scoring_time_of_a_step_uses_the_mean_of_the_trial() -> None:
    recipe = fake_recipe(reward={"kind": "exact_match", "workers": 4})
    took = [("gold", 2.0), ("wrong", 1.0), ("empty", 6.0), ("cut", 3.0), (next(iter(ATTACKS)), 100.0)]
    trial: Any = SimpleNamespace(
        tried=[SimpleNamespace(name=name, score=Score(1.0, "ok", seconds=s)) for name, s in took]
    )
    responses = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
    assert _seconds(trial, recipe) == {"p50": 3.0, "p99": 6.0, "max": 6.0, "step": responses * 3.0 / 4}
